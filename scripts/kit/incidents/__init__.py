"""Incidents on a real fleet: a fault, the alerts it raises, and what each tool then shows."""
