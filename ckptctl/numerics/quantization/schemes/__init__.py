"""The schemes: a module each, with ``SCHEMES``; see :mod:`ckptctl.numerics.quantization.scheme`."""
