"""Deltas between checkpoints: make, verify, apply and squash them."""
