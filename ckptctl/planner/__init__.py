"""Pure planning: boxes, axis tables, configs, shards and copies. No files, no torch, no clock."""
