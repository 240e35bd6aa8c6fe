"""Listing, verification and pruning of the checkpoints in a run folder."""
