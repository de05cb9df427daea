"""The parts of kvrouter for use inside a Python service (docs/library.md)."""
