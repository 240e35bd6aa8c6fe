"""Conversion pipeline: open, recognize the model, apply steps, lay out, copy, publish."""
