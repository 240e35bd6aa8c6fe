"""A page about a checkpoint: what it holds, where it lies, what is wrong, how another differs."""
