"""Extraction of single tensors or slices from a checkpoint."""
