"""Extraction of a LoRA adapter from a base model and a fine-tuned model."""
