"""Planning of loads, which maps, checks and compares the keys of checkpoints and states."""
