"""Saves and loads of tensors on a GPU, beside bare loops and safetensors.

::

    python -m tests.benchmarks.gpu                                # 8.4 GB, files in memory
    python -m tests.benchmarks.gpu --only load,cold --disk /data  # loads, also from a cold disk
    python -m tests.benchmarks.gpu --device cpu --size 20MB       # tries the code, without a GPU

A state of Llama shapes in bf16. All ways of a part take turns, in the reverse order in every other
round, after one in which plans are made and buffers pinned. ``background`` makes processes of its
own, because a first save is first only once; see :mod:`tests.benchmarks.background`. ``×`` says how
many times faster a way is than what stands beside it. Where there is no GPU nothing is measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import ckptctl
from tests.benchmarks import bare_gpu
from tests.benchmarks.build import spec_for
from tests.benchmarks.measure import in_turn
from tests.benchmarks.options import machine, names_of, numbers, parser_of, run_bench
from tests.benchmarks.report import spread, table
from tests.benchmarks.workspace import Workspace, discard, nbytes

PARTS = ("save", "load", "host", "cold", "background", "arithmetic")
HEAD = ("what", "GB", "way", "s: median (min–max)", "GB/s", "beside", "×", "to reach", "runs")
Ways = Mapping[str, Callable[[], object]]


@dataclass
class Row:
    """All samples of one way.

    Attributes:
        what: The part.
        nbytes: That move; 0: none do.
        way: How.
        seconds: One for each round.
        beside: Another way of the part that it is compared with.
        limit: How many times as fast it is to be.
    """

    what: str
    nbytes: int
    way: str
    seconds: list[float]
    beside: str = ""
    limit: str = ""


def lines(rows: Iterable[Row]) -> Iterator[Sequence[object]]:
    """Yield the table's lines."""
    rows = list(rows)
    medians = {row.way: statistics.median(row.seconds) for row in rows}
    for row in rows:
        rate = f"{row.nbytes / 1e9 / medians[row.way]:.2f}" if row.nbytes else "–"
        size = f"{row.nbytes / 1e9:.2f}" if row.nbytes else "–"
        compared = ("–", "–", "–")
        if row.beside in medians and row.beside != row.way:
            times = f"{medians[row.beside] / medians[row.way]:.2f}"
            compared = (row.beside, times, row.limit or "–")
        yield row.what, size, row.way, spread(row.seconds, 3), rate, *compared, len(row.seconds)


class Bench:
    """One run: a state on a device, and sources that it may come from."""

    def __init__(self, given: argparse.Namespace, scratch: Path) -> None:
        self.given = given
        self.space = Workspace(scratch, (str(given.size),))
        self.device = torch.device(given.device)
        self.shapes = spec_for(str(given.size)).shapes()
        self.rows: list[Row] = []

    def measure_all(self) -> None:
        """Measure what was asked for."""
        print(table(HEAD, []), flush=True)
        for part in self.given.only:
            for rows in getattr(self, f"_{part}")():
                self.rows += rows
                for line in lines(rows):
                    print("| " + " | ".join(map(str, line)) + " |", flush=True)

    def state(self, device: torch.device) -> dict[str, Any]:
        """Return tensors, every byte of which was written."""
        how: Any = {"dtype": torch.bfloat16, "device": device}
        return {name: torch.full(shape, 0.5, **how) for name, shape in self.shapes.items()}

    def times(self, ways: Ways, before: Callable[[], object] = lambda: None) -> dict[str, Any]:
        """Return the seconds of each way in each round; *before* is not among them."""
        found: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(self.given.runs + 1):
            for name in in_turn(ways, number):
                before()
                self._settle()
                start = time.perf_counter()
                ways[name]()
                self._settle()
                if number:
                    found[name].append(time.perf_counter() - start)
        return found

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _rows(self, what: str, size: int, ways: Ways, limit: str, **how: Any) -> list[Row]:
        """Return rows: ``jobs=4`` stands beside ``bare, 4``, what has no number beside the best."""
        seconds = self.times(ways, **how)
        bare = [name for name in ways if name.startswith("bare")]
        best = min(bare, key=lambda name: statistics.median(seconds[name]))
        rows = []
        for way, found in seconds.items():
            same = f"bare, {way.rpartition('=')[2]}"
            wanted = limit if way.startswith("ckptctl") else ""
            rows.append(Row(what, size, way, found, same if same in bare else best, wanted))
        return rows

    def _save(self) -> Iterator[list[Row]]:
        state = self.state(self.device)
        flat = [tensor.view(-1).view(torch.uint8) for tensor in state.values()]
        out = self.space.target
        ours = partial(ckptctl.save, state, out, sync=False)
        ways: dict[str, Callable[[], object]] = {"ckptctl.save": ours}
        for n in self.given.threads:
            ways[f"bare, {n}"] = partial(bare_gpu.save, flat, out, n)
            ways[f"ckptctl.save, files=jobs={n}"] = partial(ours, files=n, jobs=n)
        if self.given.peers:
            ways["dcp.save"] = partial(stock, "state_dict_saver", "save", state, out)
        size = sum(map(len, flat))
        yield self._rows("save", size, ways, "≥ 0.8", before=partial(discard, out))

    def _load(self) -> Iterator[list[Row]]:
        yield from self._loads("load", self.device, bare_gpu.load, "≥ 0.9")

    def _host(self) -> Iterator[list[Row]]:
        yield from self._loads("load into the CPU", torch.device("cpu"), bare_gpu.read, "")

    def _loads(
        self, what: str, device: torch.device, bare: Callable[..., None], limit: str
    ) -> Iterator[list[Row]]:
        state = self.state(device)
        for kind in ("dcp", "hf"):
            source = self.space.source(kind, self.space.sizes[0])
            size = nbytes(source)
            flat = torch.zeros(size, dtype=torch.uint8, device=device)
            ours = partial(ckptctl.load, state, source)
            ways: dict[str, Callable[[], object]] = {"ckptctl.load": ours}
            for n in self.given.threads:
                ways[f"bare, {n}"] = partial(bare, source, flat, n)
                ways[f"ckptctl.load, jobs={n}"] = partial(ours, jobs=n)
            if kind == "hf":
                ways["safetensors"] = partial(load_files, source, device)
                for package, load in LOADERS.items() if device.type == "cuda" else ():
                    if find_spec(package):
                        ways[package] = partial(load, source, device)
            elif self.given.peers:
                ways["dcp.load"] = partial(stock, "state_dict_loader", "load", state, source)
            yield self._rows(f"{what}, {kind}", size, ways, limit)

    def _cold(self) -> Iterator[list[Row]]:
        if self.given.disk is None:
            return
        with tempfile.TemporaryDirectory(dir=self.given.disk) as folder:
            space = Workspace(Path(folder), self.space.sizes)
            source = space.source("hf", space.sizes[0])
            files = sorted(map(str, source.glob("*.safetensors")))
            state = self.state(self.device)
            ours = partial(ckptctl.load, state, source)
            ways: Ways = {
                "bare: cat": partial(subprocess.run, ["cat", *files], stdout=subprocess.DEVNULL),
                "bare: 4 readers with O_DIRECT": partial(bare_gpu.read_direct, source, 4),
                "ckptctl.load": ours,
                "ckptctl.load, jobs=8": partial(ours, jobs=8),
                "safetensors": partial(load_files, source, self.device),
            }
            cold = partial(evict, files)
            yield self._rows("cold disk", nbytes(source), ways, "≥ 1.0", before=cold)

    def _arithmetic(self) -> Iterator[list[Row]]:
        """Yield rows for whole conversions that compute on the CPU and on the device."""
        source, out = self.space.source("hf", self.space.sizes[0]), self.space.target
        for scheme in ("fp8-block", "nvfp4"):
            ways = {
                f"ckptctl.convert, device={name}": partial(
                    ckptctl.convert, source, out, to="hf", quantize=scheme, device=name
                )
                for name in dict.fromkeys(("cpu", self.device.type))
            }
            seconds = self.times(ways, before=partial(discard, out))
            best = next(iter(ways))
            yield [
                Row(f"quantize {scheme}", nbytes(source), way, found, best)
                for way, found in seconds.items()
            ]

    def _background(self) -> Iterator[list[Row]]:
        from tests.benchmarks import background

        yield from background.rows(self.given, self.space.root)


def evict(files: Iterable[str]) -> None:
    """Have the page cache forget *files*."""
    for name in files:
        descriptor = os.open(name, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def load_files(source: Path, device: object) -> None:
    """Load by ``safetensors.torch.load_file``."""
    from safetensors.torch import load_file

    for path in sorted(source.glob("*.safetensors")):
        load_file(path, device=str(device))


def load_with_fastsafetensors(source: Path, device: object) -> None:
    """Load with fastsafetensors, without GPUDirect Storage."""
    library = import_module("fastsafetensors")
    files = sorted(map(str, source.glob("*.safetensors")))
    with library.fastsafe_open(files, nogds=True, device=str(device)) as opened:
        names = opened.keys()
        for name in names:
            opened.get_tensor(name)


def load_with_instanttensor(source: Path, device: object) -> None:
    """Load with InstantTensor."""
    library = import_module("instanttensor")
    files = sorted(map(str, source.glob("*.safetensors")))
    with library.safe_open(files, framework="pt", device=device) as opened:
        for _ in opened.tensors():
            pass


LOADERS = {"fastsafetensors": load_with_fastsafetensors, "instanttensor": load_with_instanttensor}
"""Functions that load hf files with packages that may not be installed, by package."""


def stock(module: str, function: str, state: dict[str, Any], path: Path) -> None:
    """Save or load by torch's own function."""
    found = import_module(f"torch.distributed.checkpoint.{module}")
    getattr(found, function)(state, checkpoint_id=path, no_dist=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the options ask for; return 1 if something failed."""
    options = _parser().parse_args(argv)
    warnings.simplefilter("ignore")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here: nothing is measured")
        return 0
    name = torch.cuda.get_device_name() if options.device == "cuda" else "no GPU"
    header = f"{machine(options.where)}; {name}; torch {torch.__version__}"
    return run_bench(options, Bench, header)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("gpu", __doc__, runs=3, size="8.4GB")
    add = parser.add_argument
    add("--only", type=names_of(PARTS), default=list(PARTS), help=f"of {', '.join(PARTS)}")
    add("--threads", type=numbers, default="1,2,4,8", help="how many (default 1,2,4,8)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="where tensors are")
    add("--disk", type=Path, help="a directory on a disk, for loads while nothing is cached")
    add("--peers", action="store_true", help="torch's own saves and loads as well")
    return parser


if __name__ == "__main__":
    sys.exit(main())
