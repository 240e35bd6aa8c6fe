"""Pickles, read without importing or calling what they name, and written."""
