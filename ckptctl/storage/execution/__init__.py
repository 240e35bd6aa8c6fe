"""Carrying out a plan: tiles of bytes on many threads, journalled, checked and synced."""
