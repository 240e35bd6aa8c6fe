"""Facts of a model in config.json, params.json and Megatron's records, and their conversion."""

MEGATRON = "megatron"
"""Catalog extension with the model records of Megatron-based programs, by file."""
