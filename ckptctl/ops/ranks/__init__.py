"""The processes that work together: what they share, and whether they mean the same."""
