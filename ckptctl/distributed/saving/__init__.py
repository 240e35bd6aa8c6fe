"""One state dict of all ranks, written as one checkpoint."""
