"""Traces, and the router with simulated engines in virtual time."""
