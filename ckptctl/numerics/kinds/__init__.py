"""Kinds of virtual files, found by name: see :class:`ckptctl.storage.computed.Kind`."""
