"""Shared by the scripts: a fleet of processes, an open-loop load generator, figures and tables."""
