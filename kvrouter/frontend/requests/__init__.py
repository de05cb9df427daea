"""One request: what is read of it, where it waits, its attempts, and what workers lost with it mean."""
