"""Conversion steps that merge adapters into models, or fill a source from its base model."""
