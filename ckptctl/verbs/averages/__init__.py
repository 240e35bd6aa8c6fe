"""Averages of checkpoints of one model, such as the last checkpoints of a run."""
