"""The agent of an engine: announces it, publishes its KV events and its load."""
