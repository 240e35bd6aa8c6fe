"""Arithmetic on weights: schemes of quantization, what is computed on read, and recipes."""
