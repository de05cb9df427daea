"""What a trace holds for a router, and what the published tuning guide makes of it."""
