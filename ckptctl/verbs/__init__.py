"""Commands that only read checkpoints, and ``consolidate --metadata-only``."""
