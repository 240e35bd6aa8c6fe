"""Collectives, agreement of ranks, and execution of one plan by several ranks."""
