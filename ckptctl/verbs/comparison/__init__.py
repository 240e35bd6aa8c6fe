"""Comparison of two checkpoints, across formats and layouts."""
