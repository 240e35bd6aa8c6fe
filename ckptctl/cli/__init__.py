"""The command line: one module per command, found by listing this package.

A module that defines ``register(app)`` is a command. Commands parse and print; what they do is in
:mod:`ckptctl.ops`.
"""

import gc

# Python looks for reference cycles after every 700 new objects, which takes a sixth of the time of
# a short command: importing modules and reading indexes makes many objects and no garbage.
gc.set_threshold(50_000, 20, 50)
