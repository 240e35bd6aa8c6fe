"""Planning of conversions, shards and retention, without access to files, torch or a clock."""
