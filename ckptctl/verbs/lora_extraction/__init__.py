"""Extraction of LoRA adapters from two models."""
