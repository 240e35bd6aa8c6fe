"""Mapping of tensors from one layout to another, by names and positions of elements."""
