"""Damaged and forged messages, thrown at real processes: `python -m scripts.kit.fuzz WHAT`."""
