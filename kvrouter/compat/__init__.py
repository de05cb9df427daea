"""Names of other systems, as thin layers over kvrouter's public names (docs/coming-from-*.md)."""
