"""Ranks: collectives, agreement and shares of a plan."""
