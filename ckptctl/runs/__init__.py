"""The checkpoints of a run: which there are, which are complete, what names them."""
