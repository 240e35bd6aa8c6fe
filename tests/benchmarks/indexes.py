"""What commands cost that only read an index: ``python -m tests.benchmarks.indexes``.

Whole processes: metadata-only consolidation of 1,000 tensors on 512 ranks, every item checked;
``verify --level fast`` of 300 tensors on 8 ranks, and of an index of a model of eight billion
parameters; ``inspect``, ``verify``, ``diff`` with itself and the plan of a conversion of
Llama-3.1-405B as FSDP saves it on many ranks, beside the reader of torch; ``inspect`` and the plan
of a conversion to ``hf`` of DeepSeek-V3
as Megatron-Core saves it on many ranks. In this process, the proof that 506 × 506 boxes tile a
tensor.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ckptctl.catalog import Box
from ckptctl.planner.boxes import compute_coverage
from tests.benchmarks import startup
from tests.benchmarks.measure import PYTHON, TOOL, Sample, run
from tests.benchmarks.options import numbers, parser_of
from tests.benchmarks.workspace import discard

STOCK = """
import sys
from torch.distributed.checkpoint import FileSystemReader
FileSystemReader(sys.argv[1]).read_metadata()
"""
SIDE = 16
ELEMENTS = "40000"


def tiled(count: int) -> Sample:
    """Prove that so many boxes in each direction tile a tensor."""
    places = [(SIDE * row, SIDE * column) for row in range(count) for column in range(count)]
    boxes = [Box(place, (SIDE, SIDE)) for place in places]
    start = time.perf_counter()
    assert compute_coverage((SIDE * count, SIDE * count), boxes).is_exact
    wall = time.perf_counter() - start
    return Sample(wall, wall, 0)


def of_ranks(folder: Path, model: str, ranks: int) -> dict[str, list[str]]:
    """Save a model on so many ranks; the commands that read what it left."""
    path = folder / f"{model}-{ranks}"
    run([PYTHON, "-m", "tests.benchmarks.build_fsdp", str(path), str(ranks), model])
    saved, plan = str(path), ["convert", "--dry-run", "--json", "--to", "hf"]
    commands = {
        "inspect": [*TOOL, "inspect", saved, "--json"],
        "verify --level fast": [*TOOL, "verify", "--level", "fast", saved],
        "verify": [*TOOL, "verify", saved],
        "diff --structure": [*TOOL, "diff", "--structure", saved, saved],
        "diff --quick": [*TOOL, "diff", "--quick", saved, saved],
        "convert --dry-run": [*TOOL, *plan, saved, str(folder / "out")],
        "torch's reader alone": [PYTHON, "-c", STOCK, saved],
    }
    return {f"{name}, {model} × {ranks} ranks": line for name, line in commands.items()}


def of_megatron(folder: Path, given: argparse.Namespace) -> dict[str, list[str]]:
    """Save DeepSeek-V3 in as many chunks as asked for; the commands that read what that left."""
    found: dict[str, list[str]] = {}
    for cuts in given.expert_tensor:
        path = folder / f"deepseek-{cuts}"
        build = [PYTHON, "-m", "tests.benchmarks.build_mcore", str(path)]
        run([*build, str(given.megatron_on), str(cuts), str(given.layers)])
        saved = f"DeepSeek-V3 × {given.megatron_on} ranks, experts in {cuts}"
        plan = ["convert", "--dry-run", str(path), str(folder / "out"), "--to", "hf"]
        found[f"inspect, {saved}"] = [*TOOL, "inspect", str(path), "--json"]
        found[f"convert --dry-run, {saved}"] = [*TOOL, *plan, "--json"]
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Build, measure and print."""
    parser = parser_of("indexes", __doc__, runs=5)
    parser.add_argument("--ranks", type=int, default=512, help="of the consolidation (default 512)")
    parser.add_argument("--tensors", type=int, default=1000, help="of it (default 1000)")
    parser.add_argument("--boxes", type=numbers, default="256,506", help="(default 256,506)")
    parser.add_argument("--model", default="405B", help="of training_plans (default 405B)")
    parser.add_argument("--saved-on", type=numbers, default="128,1024", help="(default 128,1024)")
    add = parser.add_argument
    add("--megatron-on", type=int, default=1024, help="ranks of DeepSeek-V3 (default 1024)")
    add("--expert-tensor", type=numbers, default="1,4", help="cuts of an expert (default 1,4)")
    add("--layers", type=int, default=61, help="of it (default 61)")
    given = parser.parse_args(argv)
    samples: dict[str, list[Sample]] = {}
    with tempfile.TemporaryDirectory(prefix="ckptctl-bench-", dir=given.where) as folder:
        many, few, hf = (Path(folder, name) for name in ("many", "few", "hf"))
        build = [PYTHON, "-m", "tests.benchmarks.build_ranks"]
        run([*build, str(many), str(given.ranks), str(given.tensors), ELEMENTS])
        run([*build, str(few), "8", "300", ELEMENTS])
        run([*build, str(hf)])
        complete = [*TOOL, "consolidate", "--metadata-only", "-q"]
        run([*complete, str(few)])
        verify = [*TOOL, "verify", "--level", "fast"]
        commands = {
            f"metadata-only, {given.tensors} tensors × {given.ranks} ranks": [*complete, str(many)],
            "verify --level fast (dcp)": [*verify, str(few)],
            "verify --level fast (hf)": [*verify, str(hf)],
        }
        for ranks in given.saved_on:
            commands |= of_ranks(Path(folder), given.model, ranks)
        commands |= of_megatron(Path(folder), given)
        for _ in range(given.runs):
            for name, command in commands.items():
                discard(many / ".metadata")
                samples.setdefault(name, []).append(run(command))
            for count in given.boxes:
                samples.setdefault(f"coverage of {count} × {count} boxes", []).append(tiled(count))
    print(startup.markdown(samples))
    if given.json:
        found = {name: [asdict(sample) for sample in runs] for name, runs in samples.items()}
        given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
