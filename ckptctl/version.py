"""The version of the program, which every room may state without importing the public API."""

__version__ = "0.1.0"
