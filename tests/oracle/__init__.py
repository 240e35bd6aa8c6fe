"""Comparisons with other people's implementations."""
