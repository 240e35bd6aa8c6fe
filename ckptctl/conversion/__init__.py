"""The conversion: open, understand the model, apply steps, lay out, copy, publish."""
