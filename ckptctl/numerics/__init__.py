"""Arithmetic on weights, such as dequantization on read and the recipes of ``--quantize``."""
