"""Planners and storage for the functions of ``torch.distributed.checkpoint``."""
