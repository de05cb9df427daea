"""The sockets of an engine's KV events, and the order of its batches."""
