"""Extraction of selected tensors or slices from a checkpoint."""
