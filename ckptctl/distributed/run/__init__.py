"""Checkpoint manager of a training run, with its local saves, schedule and preemption."""
