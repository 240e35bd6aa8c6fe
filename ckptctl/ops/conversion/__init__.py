"""A checkpoint turned into another format, layout, dtype or sharding."""
