"""Faults against a running fleet, one after the other, and what became of the requests meanwhile."""
