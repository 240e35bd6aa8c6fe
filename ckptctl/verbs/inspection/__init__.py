"""Contents of a checkpoint, from its index."""
