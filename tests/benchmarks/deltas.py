"""Deltas of training runs: bytes next to other tools, and CPU time next to reading both sides.

::

    python -m tests.benchmarks.deltas                       # 42M parameters, 3 rounds
    python -m tests.benchmarks.deltas --model medium        # 7M parameters
    python -m tests.benchmarks.deltas --model large --runs 1 --only training --xdelta3 ""  # 153M
    python -m tests.benchmarks.deltas --model small --xdelta3 /opt/xdelta3
    python -m tests.benchmarks.deltas --only speed          # does not need transformers

A Llama of random weights is trained by AdamW on random tokens: real optimizer steps on float32
weights, which are saved as bfloat16. ``xor + zstd`` is
the payload of the layout that slime, miles and SGLang share: the XOR of each changed tensor,
compressed by zstd at level 1. ``read`` hashes both files with SHA-256 in one process. CPU is user
and system time of whole processes, which take turns; ``zstd`` and ``xdelta3`` start faster than
Python imports torch, so ``imports`` is measured, too. The training needs transformers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ckptctl.units import parse_bytes
from tests.benchmarks.measure import PYTHON, TOOL, in_turn, run
from tests.benchmarks.options import machine, parser_of, run_bench
from tests.benchmarks.report import table

SIZES = {
    "small": (128, 2, 1024, 352),
    "medium": (256, 4, 8192, 704),
    "full": (512, 8, 16_384, 1408),
    "large": (768, 12, 49_152, 2048),
}
RATES = ("1e-6", "1e-5")
TRAIN = """
import sys, torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
folder, rate = Path(sys.argv[1]), float(sys.argv[2])
hidden, layers, vocab, ffn = map(int, sys.argv[3:7])
torch.manual_seed(0)
config = LlamaConfig(hidden_size=hidden, num_hidden_layers=layers, vocab_size=vocab,
    intermediate_size=ffn, num_attention_heads=8, num_key_value_heads=4, dtype="float32")
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
def save(step):
    state = {k: v.detach().bfloat16() for k, v in model.state_dict().items()}
    model.save_pretrained(folder / f"step-{step}", state_dict=state, max_shard_size="100GB")
save(0)
for step in range(1, 12):
    tokens = torch.randint(0, vocab, (2, 64))
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step in (1, 10, 11):
        save(step)
"""
XOR = """
import sys, zstandard
from safetensors.torch import load_file
import torch
old, new = (load_file(path) for path in sys.argv[1:3])
total = 0
for name, tensor in new.items():
    words = tensor.view(torch.int16) ^ old[name].view(torch.int16)
    if words.any():
        total += len(zstandard.ZstdCompressor(level=1).compress(words.numpy().tobytes()))
open(sys.argv[3], "wb").truncate(total)
"""
DENSITY = """
import sys, torch
from safetensors.torch import load_file
old, new = (load_file(path) for path in sys.argv[1:3])
changed = sum(int((new[k].view(torch.int16) != old[k].view(torch.int16)).sum()) for k in new)
open(sys.argv[3], "w").write(str(changed / sum(v.numel() for v in new.values())))
"""
SPEED = """
import hashlib, json, shutil, sys, time
from pathlib import Path
import torch
from safetensors.torch import save_file
from ckptctl import delta
torch.set_num_threads(1)
folder, nbytes = Path(sys.argv[1]), int(sys.argv[2])
for name in ("old", "new"):
    (folder / name).mkdir()
old = {f"w{i}": (torch.randn(nbytes // 32, ) * 0.02).bfloat16() for i in range(16)}
new = {k: (v.float() + 2e-6 * torch.randn(v.shape)).bfloat16() for k, v in old.items()}
for name, state in (("old", old), ("new", new)):
    save_file(state, folder / name / "model.safetensors")
del old, new
def read():
    for name in ("old", "new"):
        with open(folder / name / "model.safetensors", "rb") as file:
            hashlib.file_digest(file, "sha256")
def make():
    shutil.rmtree(folder / "delta", ignore_errors=True)
    delta.make(folder / "old", folder / "new", folder / "delta", jobs=1)
def apply():
    shutil.rmtree(folder / "out", ignore_errors=True)
    delta.apply(folder / "old", folder / "delta", folder / "out", jobs=1)
cpu = {"read both": [], "delta make": [], "delta apply": []}
for _ in range(int(sys.argv[3])):
    for name, work in zip(cpu, (read, make, apply)):
        start = time.process_time()
        work()
        cpu[name].append((time.process_time() - start) / nbytes * 1e9)
Path(sys.argv[4]).write_text(json.dumps(cpu))
"""
READ = """
import hashlib, sys
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        hashlib.file_digest(file, "sha256")
"""


@dataclass
class Row:
    """One pair of checkpoints.

    Attributes:
        pair: Learning rate and steps.
        density: Share of changed elements.
        nbytes: Size by method.
        cpu: CPU seconds of all rounds, by method.
    """

    pair: str
    density: float = 0.0
    nbytes: dict[str, int] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)


class Deltas:
    """Measurements of all pairs."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.rows: list[Row] = []
        self._options, self._scratch = options, scratch

    def measure_all(self) -> None:
        if self._options.only != "speed":
            self._measure_training()
        if self._options.only != "training":
            self._measure_speed()

    def _measure_training(self) -> None:
        for rate in self._options.rates:
            folder = self._scratch / rate
            shape = map(str, SIZES[self._options.model])
            run([PYTHON, "-c", TRAIN, str(folder), rate, *shape])
            for name, old, new in (("one step", 10, 11), ("ten steps", 0, 10)):
                row = Row(f"lr {rate}, {name}")
                self._measure(row, folder / f"step-{old}", folder / f"step-{new}")
                self.rows.append(row)
            shutil.rmtree(folder)
        self._print()

    def _measure_speed(self) -> None:
        """Print CPU seconds per GB of a checkpoint of one process, without its imports."""
        folder = self._scratch / "speed"
        folder.mkdir()
        result, nbytes = folder / "result.json", str(self._options.speed_bytes)
        run([PYTHON, "-c", SPEED, str(folder), nbytes, str(self._options.runs), str(result)])
        cpu = json.loads(result.read_text())
        self.rows.append(Row("seconds per GB, one thread", cpu=cpu))
        print("\nCPU seconds per GB, one thread, without imports\n")
        print(table([*cpu], [[f"{statistics.median(values):.2f}" for values in cpu.values()]]))

    def _measure(self, row: Row, old: Path, new: Path) -> None:
        files = [str(path / "model.safetensors") for path in (old, new)]
        out = self._scratch / "out"
        out.mkdir()
        run([PYTHON, "-c", DENSITY, *files, str(out / "density")])
        row.density = float((out / "density").read_text())
        row.nbytes["full"] = Path(files[1]).stat().st_size
        made, xdelta3 = str(out / "delta"), self._options.xdelta3
        commands = {
            "ckptctl": [*TOOL, "delta", "make", str(old), str(new), made, "-q"],
            "ckptctl, deflate": [
                *(*TOOL, "delta", "make", str(old), str(new), str(out / "deflate"), "-q"),
                *("--compression", "deflate"),
            ],
            "zstd -3 of NEW": ["zstd", "-q", "-f", "-3", files[1], "-o", str(out / "zst")],
            "zstd -3 --patch-from": [
                *("zstd", "-q", "-f", "-3", "--long=31", f"--patch-from={files[0]}"),
                *(files[1], "-o", str(out / "patch")),
            ],
            "xor + zstd": [PYTHON, "-c", XOR, *files, str(out / "xor")],
            "read": [PYTHON, "-c", READ, *files],
            "imports": [PYTHON, "-c", "import torch"],
        }
        results = {
            "ckptctl": out / "delta",
            "ckptctl, deflate": out / "deflate",
            "zstd -3 of NEW": out / "zst",
            "zstd -3 --patch-from": out / "patch",
            "xor + zstd": out / "xor",
        }
        if xdelta3:
            commands["xdelta3"] = [
                *(xdelta3, "-e", "-f", "-B", str(1 << 30), "-s"),
                *(*files, str(out / "vcdiff")),
            ]
            results["xdelta3"] = out / "vcdiff"
        commands["apply"] = [
            *(*TOOL, "delta", "apply", str(old), made, str(out / "applied"), "-q"),
        ]
        for number in range(self._options.runs):
            for name, command in in_turn(commands.items(), number):
                stale = {"apply": "applied", "ckptctl": "delta", "ckptctl, deflate": "deflate"}
                if name in stale:
                    shutil.rmtree(out / stale[name], ignore_errors=True)
                if name == "apply" and not Path(made).exists():
                    run(commands["ckptctl"])
                row.cpu.setdefault(name, []).append(run(command).cpu)
        for name, path in results.items():
            parts = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
            row.nbytes[name] = sum(part.stat().st_size for part in parts)
        shutil.rmtree(out)

    def _print(self) -> None:
        names = [name for name in self.rows[0].nbytes if name != "full"]
        print("Size, as a share of the full checkpoint\n")
        print(
            table(
                ["pair", "changed elements", *names],
                [
                    [
                        row.pair,
                        f"{100 * row.density:.2f} %",
                        *(f"{100 * row.nbytes[name] / row.nbytes['full']:.2f} %" for name in names),
                    ]
                    for row in self.rows
                ],
            )
        )
        methods = list(self.rows[0].cpu)
        print("\nCPU seconds\n")
        print(
            table(
                ["pair", *methods],
                [
                    [row.pair, *(f"{statistics.median(row.cpu[name]):.2f}" for name in methods)]
                    for row in self.rows
                ],
            )
        )


def main() -> int:
    parser = parser_of("deltas", __doc__, runs=3)
    parser.add_argument("--model", choices=SIZES, default="full", help="size of the model")
    parser.add_argument("--only", choices=("training", "speed"), help="part to measure")
    parser.add_argument("--rates", nargs="+", default=RATES, help="learning rates")
    parser.add_argument("--xdelta3", default=shutil.which("xdelta3"), help="its path, or empty")
    parser.add_argument(
        "--speed-bytes", type=parse_bytes, default="200MB", help="bytes for the speed of threads"
    )
    options = parser.parse_args()
    return run_bench(options, Deltas, machine(options.where))


if __name__ == "__main__":
    sys.exit(main())
