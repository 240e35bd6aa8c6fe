"""Asynchronous saves, written in the background of training."""
