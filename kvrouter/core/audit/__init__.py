"""Predictions and states compared with what engines report."""
