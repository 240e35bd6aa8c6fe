"""Real command lines of every command, and the checkpoints that they are about.

A command that is missing here fails ``test_additions``: give it at least one line that succeeds.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckptctl import delta
from ckptctl.cli import schema as schemas
from ckptctl.cli.app import app
from tests.checkpoints import save_hf, tiny_llama
from tests.checkpoints.adapters import random_adapter, save_peft
from tests.conftest import DATA
from tests.runs import START, age, save_step, tear

COMMANDS = sorted(str(info.name) for info in app.registered_commands)
LONG = "begins.here." + "a.very.long.name." * 20 + "weight"
"""A tensor's name that no terminal has room for."""


@dataclass(frozen=True)
class Line:
    """A command line.

    Attributes:
        text: What follows the command; ``{out}`` is a path at which there is nothing, ``{copy:x}``
            a copy of ``{x}`` that may be changed.
        code: What it ends with.
    """

    text: str
    code: int = 0

    def __str__(self) -> str:
        return self.text or "(nothing)"


LINES = {
    "average": (
        Line("{base} {tuned} {out}"),
        Line("{base} {tuned} {out} --dry-run --ema 0.5"),
    ),
    "browse": (Line("{hf}"), Line("{long}")),
    "consolidate": (
        Line("{ranks} {out}"),
        Line("{copy:ranks} --metadata-only"),
        Line("{ranks} --metadata-only --dry-run"),
        Line("{torn_ranks} {out} --allow-missing", 7),
        Line("{run} {out} --each --steps 9,10"),
    ),
    "convert": (
        Line("{hf} {out} --to dcp"),
        Line("{hf} {out} --to meta --dry-run"),
        Line("{long} {out}.pt --to torch --verify"),
        Line("{run} {out} --to hf --each", 7),
        Line("{run} {out} --to hf --each --steps :100 --task 1/2"),
        Line("{run} {out} --to hf --each --dry-run --keep-last 1", 7),
    ),
    "delta apply": (
        Line("{base} {delta} {out}"),
        Line("{base} {delta} {out} --to dcp --dry-run"),
        Line("{tuned} {delta} {out}", 6),
    ),
    "delta make": (Line("{base} {tuned} {out}"), Line("{base} {base} {out}")),
    "delta squash": (Line("{delta} {delta_back} {out}"),),
    "delta verify": (Line("{delta}"), Line("{delta} {delta_back} --base {base}")),
    "diff": (
        Line("{long} {long} --structure"),
        Line("{base} {hf}", 1),
        Line("{base} {step}", 1),
        Line("{hf} {hf} --quick"),
    ),
    "doctor": (Line("{place}"), Line("")),
    "extract": (
        Line(f"{{long}} '{LONG}'"),
        Line("{hf} 'model.layers.0.*' -o {out}.safetensors"),
        Line("{hf} 'lm_head.weight[0:2]' -o {out}.npy --dtype fp32"),
        Line("{step} w0 -o {out}.pt"),
    ),
    "formats": (Line(""), Line("dcp"), Line("deepspeed")),
    "inspect": (
        Line("{long} --tensors"),
        Line("{hf} --stats"),
        Line("{hf} --fit 2x80GB --context 4k"),
        Line("{run}"),
        Line("{torn}", 4),
        Line("{ranks}"),
    ),
    "latest": (Line("{run}"),),
    "ls": (Line("{run}"),),
    "map": (
        Line("model.layers.0.self_attn.q_proj.weight -m llama3 --to-layout meta --config {hf}"),
        Line("'layers.{{i}}.feed_forward.experts.{{x}}.w1.weight' -m mixtral --to-layout hf-v5"),
    ),
    "extract-lora": (
        Line("{base} {tuned} {out} --rank 2"),
        Line("{base} {tuned} {out} --energy 0.9 --dtype bf16"),
        Line("{base} {base} {out} --rank 2", 6),
    ),
    "merge": (Line("{base} {adapter} {out}"), Line("{base} {adapter} {out} --dry-run")),
    "models": (Line("--layout torchtitan@0.3"), Line(""), Line("mixtral"), Line("phi3")),
    "prune": (
        Line("{copy:run} --keep-last 1 --yes"),
        Line("{run} --keep-last 1 --dry-run"),
        Line("{run} --keep-last 1", 6),
        Line("{copy:run} --keep-last 1 --include-incomplete --min-age 1h --yes"),
        Line("{copy:training} --keep-last 1 --thin optimizer --yes"),
        Line("{training} --keep-last 1 --thin optimizer --dry-run"),
        Line("{training} --keep-last 1 --thin optimizer", 6),
    ),
    "report": (
        Line("{hf} -o {out}.html --stats"),
        Line("{base} {hf} -o {out}.html"),
        Line("{torn} -o {out}.html", 4),
        Line("{torn_ranks} {ranks} -o {out}.html", 4),
    ),
    "schema": (Line(""),),
    "verify": (
        Line("{long}"),
        Line("{copy:hf} --level full --manifest"),
        Line("{hf} --level full --nan"),
        Line("{hf} --level full --require-verified", 9),
        Line("{torn}", 4),
        Line("{run} --each", 7),
        Line("{run} --each --steps :100 --level full"),
    ),
}
SCENES = {
    "average": "average base tuned averaged",
    "browse": "browse hf",
    "consolidate": "consolidate ranks whole",
    "consolidate-metadata": "consolidate ranks --metadata-only",
    "convert": "convert hf out --to dcp",
    "convert-dry-run": "convert hf out --to meta --dry-run",
    "convert-run": "convert run out --to hf --each",
    "convert-run-dry-run": "convert run out --to hf --each --dry-run",
    "delta-apply": "delta apply base delta applied",
    "delta-make": "delta make base tuned new.delta --compression deflate",
    "delta-squash": "delta squash delta delta_back squashed.delta --compression deflate",
    "delta-verify": "delta verify delta delta_back --base base",
    "diff": "diff base hf",
    "diff-same": "diff hf hf",
    "diff-structure": "diff hf ranks --structure",
    "doctor": "doctor .",
    "error-damaged": "convert cut out --to dcp",
    "error-destination-exists": "convert hf base --to dcp",
    "error-incomplete": "convert torn_ranks out --to dcp",
    "error-missing-argument": "convert hf --to dcp",
    "error-not-a-checkpoint": "inspect .",
    "error-unknown-format": "convert hf out --to safetensor",
    "error-unknown-model-type": "convert hf out --to meta -m lama3",
    "error-unknown-option": "convert hf out --to dcp --force",
    "extract": "extract hf 'model.layers.0.*' -o some.safetensors",
    "extract-values": "extract hf model.norm.weight",
    "extract-lora": "extract-lora base tuned low-rank --rank 2",
    "formats": "formats",
    "formats-one": "formats deepspeed",
    "inspect": "inspect hf",
    "inspect-depth": "inspect hf --depth 2 --sort size",
    "inspect-fit": "inspect hf --fit 2x80GB --context 4k",
    "inspect-long": "inspect long --tensors",
    "inspect-ranks": "inspect ranks",
    "inspect-run": "inspect run",
    "inspect-stats": "inspect hf --stats",
    "inspect-torn": "inspect torn_ranks",
    "latest": "latest run",
    "ls": "ls run",
    "map": "map model.layers.0.self_attn.q_proj.weight -m llama3 --to-layout meta --config hf",
    "map-experts": "map layers.3.feed_forward.experts.5.w1.weight -m mixtral --to-layout hf-v5",
    "merge": "merge base adapter merged",
    "merge-dry-run": "merge base adapter merged --dry-run",
    "models": "models --layout meta",
    "models-one": "models mixtral --layout hf-v5",
    "prune": "prune run --keep-last 1 --yes",
    "prune-dry-run": "prune run --keep-last 1 --dry-run",
    "report": "report hf -o page.html",
    "schema": "schema",
    "verify": "verify hf",
    "verify-full": "verify hf --level full",
    "verify-run": "verify run --each",
    "verify-manifest": "verify hf --level full --nan --manifest",
    "verify-torn": "verify torn",
}
"""Command lines of snapshots by the names of their files, for the checkpoints of `make`."""
CASES = [
    pytest.param(name, line, id=f"{name}-{number}")
    for name, lines in LINES.items()
    for number, line in enumerate(lines)
]
FIRST = [pytest.param(name, LINES[name][0], id=name) for name in LINES]


def make(folder: Path) -> dict[str, Path]:
    """Write all checkpoints, and return them by their names in the lines."""
    state, config = tiny_llama("llama3")
    (folder / "base").mkdir()
    save_hf(folder / "base", state, config)
    save_peft(folder / "adapter", random_adapter(state))
    (folder / "tuned").mkdir()
    moved = {n: v + v.flip(0) if n.endswith("proj.weight") else v for n, v in state.items()}
    save_hf(folder / "tuned", moved, config)
    delta.make(folder / "base", folder / "tuned", folder / "delta", compression="deflate")
    delta.make(folder / "tuned", folder / "base", folder / "delta_back", compression="deflate")
    _copy(DATA / "tiny-llama3-hf", folder / "hf")
    _copy(DATA / "dcp-rank-local" / "w2" / "ckpt", folder / "ranks")
    _copy(folder / "ranks", folder / "torn_ranks")
    (folder / "torn_ranks" / "__1_0.distcp").unlink()
    _copy(folder / "hf", folder / "cut")
    last = max((folder / "cut").glob("*.safetensors"))
    os.truncate(last, last.stat().st_size - 1)
    for step in (9, 10, 100):
        save_step(folder / "run" / f"step-{step}")
    tear(save_step(folder / "run" / "step-200"))
    tear(save_step(folder / "torn"))
    save_step(folder / "step")
    for step in (1, 2):
        (save_step(folder / "training" / f"checkpoint-{step}") / "optimizer.pt").write_bytes(b"x")
        age(folder / "training" / f"checkpoint-{step}", START + step)
    _write_long(folder / "long")
    names = (path.name for path in folder.iterdir())
    return {"place": folder, **{name: folder / name for name in names}}


def arguments(line: Line, places: dict[str, Path], scratch: Path) -> list[str]:
    """Return the words of *line*; what it may change lies in *scratch*."""
    copies = {f"copy:{name}": scratch / name for name in places}
    text = line.text
    for name, path in copies.items():
        if f"{{{name}}}" in text:
            _copy(places[name.removeprefix("copy:")], path)
            text = text.replace(f"{{{name}}}", shlex.quote(str(path)))
    return shlex.split(text.format(out=scratch / "out", **places))


def validate(document: Any, name: str) -> None:
    """Check *document* against the schema *name*, in which no field goes unmentioned."""
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator(
        schemas.require_json_document(name).build_schema(closed=True)
    ).validate(document)


def hidden(folder: Path) -> list[str]:
    """Return what is hidden below *folder*, other than what a checkpoint consists of."""
    return sorted(str(path) for path in folder.rglob(".*") if path.name != ".metadata")


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=shutil.copyfile, dirs_exist_ok=True)
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _write_long(folder: Path) -> None:
    """Write two tensors by hand, one of which has the long name."""
    folder.mkdir()
    tensors = {LONG: [0, 16], "odd:name/of=a tensor": [16, 24]}
    entries = {
        name: {"dtype": "F32", "shape": [(b - a) // 4], "data_offsets": [a, b]}
        for name, (a, b) in tensors.items()
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    content = len(header).to_bytes(8, "little") + header + bytes(24)
    (folder / "model.safetensors").write_bytes(content)
