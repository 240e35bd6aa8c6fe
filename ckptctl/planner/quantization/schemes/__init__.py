"""The schemes: a module each, with ``SCHEMES``; see :mod:`ckptctl.planner.quantization.scheme`."""
