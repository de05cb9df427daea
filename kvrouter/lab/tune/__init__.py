"""Searches the best settings for a trace in the simulator."""
