"""Plugins for other people's trainers, one module for each of them.

A module imports its trainer, and nothing imports it but the user: ``import ckptctl`` imports none.
"""

from ckptctl.installed import require_torch

require_torch("a trainer's plugin")
