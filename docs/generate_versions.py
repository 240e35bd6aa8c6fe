"""Write the tested versions into ``docs/reference/compatibility.md``.

``python docs/generate_versions.py`` replaces the text between ``<!-- generated: versions -->`` and
``<!-- end -->``. The versions are those of ``tests/constraints.txt`` and of the requirements of the
oracles, and the oldest supported ones those of ``pyproject.toml``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "reference" / "compatibility.md"
BLOCK = re.compile(r"(<!-- generated: versions -->\n).*?(<!-- end -->\n)", re.DOTALL)
PINS = (
    "tests/constraints.txt",
    "tests/oracle/requirements.txt",
    "tests/oracle/trainers/requirements.txt",
    "tests/oracle/quantizers.txt",
)
"""Files of pins, each of which the tests install."""
USED = (
    *("torch", "safetensors", "huggingface-hub", "fsspec", "s3fs", "gcsfs", "adlfs"),
    *("typer", "rich", "pyyaml", "isal", "zstandard"),
)
"""Packages that ckptctl imports."""
COMPARED = (
    *("transformers", "accelerate", "peft", "torchtune", "torchtitan", "lightning", "deepspeed"),
    *("megatron-core", "megatron-bridge", "torch-checkpointing", "torchsnapshot"),
    *("compressed-tensors", "llmcompressor", "nvidia-modelopt", "torchao", "gptqmodel"),
    *("bitsandbytes", "gguf", "mlx-lm", "mlx-vlm", "mistral-inference", "llama-models"),
    *("ai2-olmo-core", "ai2-olmo"),
)
"""Programs that read ckptctl's output in the tests, or write its input."""
EXTRAS = (
    *("torch", "lightning", "torchtitan", "torchtune", "transformers"),
    *("s3", "gcs", "azure", "gguf", "zstd"),
)
"""Extras of ``pyproject.toml`` for users."""


def read_pins() -> dict[str, str]:
    """Return the pinned version of each package.

    Raises:
        ValueError: Two files pin different versions.
    """
    pins: dict[str, str] = {}
    for file in PINS:
        text = (REPOSITORY / file).read_text()
        for name, version in re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE):
            if pins.setdefault(name.replace("_", "-"), version) != version:
                raise ValueError(f"{file} pins {name} {version}, another file {pins[name]}")
    return pins


def render() -> str:
    """Return the page."""
    oldest, pins = _read_oldest(), read_pins()
    rows = [
        ("package", "tested", "supported"),
        ("---", "---", "---"),
        *((f"`{name}`", pins[name], oldest.get(name, "")) for name in USED),
        *((f"`{name}`", pins[name], oldest.get(name, "")) for name in COMPARED),
    ]
    table = "".join("| " + " | ".join(row).rstrip() + " |\n" for row in rows)
    return BLOCK.sub(lambda match: f"{match[1]}\n{table}\n{match[2]}", PAGE.read_text())


def _read_oldest() -> Mapping[str, str]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = (*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra]))
    return dict(_parse_oldest(lines))


def _parse_oldest(lines: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for line in lines:
        if found := re.match(r"([\w.-]+)>=([\w.]+)", line):
            yield found[1].replace("_", "-").lower(), f"{found[2]} and later"


if __name__ == "__main__":
    PAGE.write_text(render())
