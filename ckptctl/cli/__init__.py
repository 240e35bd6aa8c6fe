"""The command line: one module per command, found by listing this package.

A module that defines ``register(app)`` is a command. Commands parse and print; what they do is in
:mod:`ckptctl.ops`.
"""
