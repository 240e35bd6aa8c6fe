"""Quantization schemes, one family of them per module.

Each module defines ``SCHEMES``; see :mod:`ckptctl.numerics.quantization.scheme`.
"""
