"""Plugins for trainers, one module each.

A module imports its trainer, so only user code imports it, never ``import ckptctl``.
"""

from ckptctl.installed import require_torch

require_torch("a trainer's plugin")
