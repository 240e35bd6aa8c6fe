"""config.json and params.json: what they state, and each made from the other."""

MEGATRON = "megatron"
"""The extension of a catalog that has what Megatron's programs recorded of the model, by file."""
