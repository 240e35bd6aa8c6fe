"""Inspection of a checkpoint's contents, as listed in its index."""
