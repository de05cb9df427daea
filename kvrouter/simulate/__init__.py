"""Traces and, later, the same core in virtual time."""
