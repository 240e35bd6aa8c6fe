"""Bytes: ranged reads, headers, zips, restricted pickles, execution and publishing.

Nothing here knows about models. What computes with values imports torch, and does so when called.
"""
