"""Training runs: their checkpoints, which of these are complete, and which may be removed."""
