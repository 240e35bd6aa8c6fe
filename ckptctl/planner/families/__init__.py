"""Model families as text tables, with declarations about ties, configs and layer types."""
