"""Execution of plans: tiles of bytes are copied by many threads, journaled, verified and synced."""
