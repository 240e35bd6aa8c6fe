"""Read, compare and convert the facts about a model in config.json and similar files."""

MEGATRON = "megatron"
"""Name of the catalog extension that contains Megatron's model records, by file name."""
