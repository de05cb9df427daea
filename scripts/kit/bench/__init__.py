"""Measurements: `scripts/bench SUBCOMMAND`."""
