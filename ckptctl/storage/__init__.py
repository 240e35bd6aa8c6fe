"""Bytes: ranged reads, headers, zips, restricted pickles, execution and publishing.

Nothing here knows about models. Only :mod:`ckptctl.storage.arithmetic` and
:mod:`ckptctl.storage.statistics` import torch, and they do so when called.
"""
