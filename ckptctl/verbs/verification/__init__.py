"""Proof that a checkpoint is whole, or what is wrong with it and where."""
