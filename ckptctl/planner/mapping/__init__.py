"""Mapping of tensors from one layout to another, by key and by position of each element."""
