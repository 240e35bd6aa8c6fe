"""Helpers that several formats share."""
