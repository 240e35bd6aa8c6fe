"""The shards of all ranks, written as one DCP directory."""
