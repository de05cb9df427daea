"""The flags of `python -m kvrouter.frontend`."""
