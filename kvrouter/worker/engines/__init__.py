"""What engines report, and how: one adapter for each kind."""
