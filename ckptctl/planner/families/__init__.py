"""Model families, defined by text tables and by declarations about ties, configs and layers."""
