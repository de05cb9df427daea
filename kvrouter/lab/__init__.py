"""Fleets that do not exist: a mock engine, the simulator, and what a trace says of them."""
