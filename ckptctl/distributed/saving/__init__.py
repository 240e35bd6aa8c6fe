"""Synchronous saves of one state dict by all ranks."""
