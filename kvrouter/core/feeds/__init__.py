"""Ordered streams of frames: numbered by their source, repaired by their reader."""
