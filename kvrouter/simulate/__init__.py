"""Traces, and the same core in virtual time."""
