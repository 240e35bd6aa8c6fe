"""What options take, by name: for the shell to offer, and for errors to list."""

from __future__ import annotations

FORMATS_ELSEWHERE = {
    "fsdp": "dcp",
    "fsdp2": "dcp",
    "huggingface": "hf",
    "llama": "meta",
    "lora": "peft",
    "pt": "torch",
    "pth": "torch",
    "pytorch": "torch",
    "safetensors": "hf",
    "torchtitan": "dcp",
    "transformers": "hf",
    "vllm": "hf",
    "zero": "deepspeed",
}
"""Formats by what else they are called, or by the program that reads or writes them."""


def readable_formats() -> list[str]:
    """Return what ``--from`` accepts."""
    from ckptctl import formats

    return [*formats.names(), *formats.added()]


def writable_formats() -> list[str]:
    """Return what ``--to`` accepts."""
    from ckptctl import formats
    from ckptctl.formats.base import WritableFormat

    added = formats.added().items()
    more = (name for name, found in added if isinstance(found, WritableFormat))
    return [*formats.writable(), *more]


def parts() -> list[str]:
    """Return what ``--only`` accepts."""
    return ["model", "all"]


def weights() -> list[str]:
    """Return what ``--weights`` accepts."""
    return ["master", "module"]


def orders() -> list[str]:
    """Return what ``--sort`` accepts."""
    return ["name", "size"]


def tied() -> list[str]:
    """Return what ``--tied`` accepts."""
    return ["drop", "copy"]


def model_types() -> list[str]:
    """Return what ``--model-type`` accepts."""
    from ckptctl import families

    return list(families.names())


def layouts() -> list[str]:
    """Return the layouts of all families."""
    from ckptctl import families

    return sorted({name for family in families.families().values() for name in family.layouts})


def dtypes() -> list[str]:
    """Return the dtypes that a cast may go to."""
    from ckptctl.dtypes import BY_NAME

    short = (dtype.short for dtype in BY_NAME.values() if dtype.floating)
    return [f"fp{name[1:]}" if name[1:].isdigit() else name for name in short]


def dequantized() -> list[str]:
    """Return what ``--dequantize`` accepts."""
    return ["bf16", "fp32"]
