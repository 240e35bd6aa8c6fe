"""The schemes: a module each, with ``SCHEMES``; see :mod:`ckptctl.planner.quantisation.scheme`."""
