"""Removing checkpoints that no rule keeps, or their optimizer state."""
