"""Kinds of virtual files, loaded by name; see :class:`ckptctl.storage.computed.Kind`."""
