"""Megatron-Core's distributed checkpoints: a DCP directory whose tensors have several spellings.

Megatron-LM, Megatron-Bridge, NeMo 2, verl, slime and ms-swift write them.
"""
