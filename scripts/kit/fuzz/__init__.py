"""Damaged and forged messages, sent to real processes: `python -m scripts.kit.fuzz WHAT`."""
