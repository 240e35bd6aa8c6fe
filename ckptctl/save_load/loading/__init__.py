"""Loads of any checkpoint into a state dict: mapping, checks, read plans, key comparison."""
