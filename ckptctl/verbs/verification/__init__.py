"""Verification: whether a checkpoint is complete, or what is wrong and where."""
