"""Single tensors, or slices of them, taken out of a checkpoint."""
