"""Clients' keys: their file, who sends which, and what each may."""
