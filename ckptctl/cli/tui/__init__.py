"""Interactive views of checkpoints in a terminal, on textual."""
