"""Bytes: ranged reads, headers, zips, restricted pickles, execution and publishing.

Nothing here knows about models. Functions that compute with values import torch when called.
"""
