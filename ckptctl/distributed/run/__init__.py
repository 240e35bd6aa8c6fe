"""Checkpoint manager of a training run."""
