"""Byte-level access to checkpoint files, from ranged reads and file formats to plan execution.

This package is independent of model families. Its functions only import torch when they compute
with tensor elements.
"""
