"""Adapters made of two models: the low-rank part of what a training changed."""
