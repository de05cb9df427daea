"""The blocks of an engine, and which of them are published."""
