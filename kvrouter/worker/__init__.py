"""The agent beside an engine: announces it, bridges its KV events, reports its load."""
