"""Faults against a running fleet, one after the other, and their effect on requests."""
