"""The asyncio shell around core/fleet/replica.py, for the frontend and the library."""
