"""Carrying out a plan: tiles of bytes on many threads, journaled, checked and synced."""
