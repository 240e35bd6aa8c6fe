"""Saves of the shards of all ranks as one DCP directory."""
