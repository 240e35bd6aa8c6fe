"""Checkpoints that trainers write here and now, against the live weights; see README.md."""
