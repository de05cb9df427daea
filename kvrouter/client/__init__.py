"""The parts of kvrouter inside somebody's own Python service (docs/library.md)."""
