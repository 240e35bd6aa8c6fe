"""Execution of plans by threads that copy tiles of bytes, journal, verify and sync them."""
