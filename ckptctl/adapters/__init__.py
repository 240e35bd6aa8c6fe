"""Steps that combine a source with an adapter or with its base model."""
