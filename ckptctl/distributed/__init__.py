"""Saving, loading and managing checkpoints in training, over the core that the commands use.

Everything here imports torch. Of the command line nothing imports any of it, but for the group of
ranks of a run under torchrun.
"""
