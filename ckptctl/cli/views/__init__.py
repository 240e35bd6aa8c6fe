"""Displays of single commands, imported when they are shown. Those of browse use textual."""
