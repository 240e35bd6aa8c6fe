"""An answer about data is made from data: one flipped bit is never "the same".

The control is ours alone in one thing: where elements lie, which the index says.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from typer.testing import CliRunner

import ckptctl
from ckptctl import formats
from ckptctl.catalog import Catalog, is_computed
from ckptctl.cli.app import app
from ckptctl.errors import DamagedError
from tests import remote_reads
from tests.checkpoints import save_meta, tiny_llama
from tests.contract.samples import SAMPLES
from tests.contract.support import WRITABLE, build
from tests.sweeps import one_in

LIMITED = "recorded checksums match; data not read"
STRUCTURE = "the same structure; data not read"
DIFFERENT = 1


def located(path: Path) -> Catalog:
    """Return the index of a checkpoint, with the place of every element."""
    return formats.resolve_codecs(formats.open_checkpoint(path))


def places(catalog: Catalog) -> dict[str, tuple[int, str]]:
    """Return a byte of the largest part of a tensor in each file, and the tensor."""
    found: dict[str, tuple[int, int, str]] = {}
    for name, entry in catalog.tensors.items():
        for extent in entry.extents:
            if is_computed(extent.file) or not extent.nbytes or entry.alias_of:
                continue
            place = (extent.nbytes, extent.offset + extent.nbytes // 2, name)
            found[extent.file] = max(found.get(extent.file, place), place)
    return {file: (offset, name) for file, (_, offset, name) in found.items()}


def flipped(path: Path, target: Path) -> Iterator[tuple[Path, str]]:
    """Yield copies of a checkpoint with one bit flipped in one file each, and that tensor."""
    catalog = located(path)
    inside = Path(catalog.root).relative_to(path.absolute()) if path.is_dir() else Path()
    for file, (offset, name) in places(catalog).items():
        shutil.rmtree(target, ignore_errors=True)
        target.unlink(missing_ok=True) if target.is_file() else None
        copy = shutil.copytree if path.is_dir() else shutil.copyfile
        copy(path, target)
        with (target / inside / file if path.is_dir() else target).open("r+b") as data:
            data.seek(offset)
            byte = data.read(1)[0]
            data.seek(offset)
            data.write(bytes([byte ^ 1]))
        yield target, name


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, Path]:
    """One model: as others write it, and as `convert` writes it, with checksums in a manifest."""
    state, config = tiny_llama("llama3", dtype="float32")
    folder = tmp_path_factory.mktemp("written")
    found = {name: build(name, folder, state, config) for name in WRITABLE}
    for name in WRITABLE:
        target = folder / f"converted-{name}{found[name].suffix}"
        ckptctl.convert(found["hf"], target, to=name, model_type="llama3")
        found[f"converted {name}"] = target
    return found


CASES = [*WRITABLE, *(f"converted {name}" for name in WRITABLE)]
SLOW_DCP = pytest.param("dcp", marks=pytest.mark.slow)
"""It has a file for each tensor, and tests flip a bit in each file."""


@pytest.mark.parametrize("name", one_in(3, [SLOW_DCP if name == "dcp" else name for name in CASES]))
def test_diff_never_reports_flipped_bit_as_same(written, tmp_path, name):
    source = Path(written[name])
    target = tmp_path / f"flipped{source.suffix}"
    for copy, _ in flipped(source, target):
        for a, b in ((source, copy), (copy, source), (written["hf"], copy)):
            found = ckptctl.diff(a, b, only="model", model_type="llama3")
            assert found.same is False and found.verdict == "different", (a, b)
            assert len(found.tensors) == 1 and found.evidence == "data"
            quick = ckptctl.diff(a, b, only="model", model_type="llama3", quick=True)
            assert quick.same is not True
            if quick.same is None:
                assert quick.verdict == LIMITED and quick.by_checksum > 0
            structure = ckptctl.diff(a, b, only="model", model_type="llama3", structure=True)
            assert (structure.same, structure.verdict) == (None, STRUCTURE)


@pytest.mark.parametrize("name", one_in(15, [n for n, one in SAMPLES.items() if not one.refused]))
def test_diff_of_sample_with_flipped_bit_differs_or_fails(data, tmp_path, name):
    sample = SAMPLES[name]
    source = sample.path(data)
    target = tmp_path / ("flipped" + source.suffix)
    for copy, tensor in flipped(source, target):
        for a, b in ((source, copy), (copy, source)):
            try:
                found = ckptctl.diff(a, b)
            except DamagedError:
                continue
            assert found.same is False, (a, b, tensor)
            assert tensor in {one.name for one in found.tensors} | {*found.a.only, *found.b.only}
            try:
                assert ckptctl.diff(a, b, quick=True).same is not True
            except DamagedError:
                continue


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    return result.exit_code, result.stdout


@pytest.mark.parametrize("kind", ["converted hf", SLOW_DCP, "torch"])
def test_every_diff_output_states_its_evidence(written, tmp_path, kind):
    source = Path(written[kind])
    target = tmp_path / f"flipped{source.suffix}"
    for copy, _ in flipped(source, target):
        for a, b in ((source, copy), (copy, source)):
            code, text = run("diff", a, b, "--json")
            found = json.loads(text)
            assert code == DIFFERENT
            assert (found["same"], found["verdict"], found["evidence"]) == (
                False,
                "different",
                "data",
            )
            code, text = run("diff", a, b, "-q")
            assert code == DIFFERENT and text
            code, text = run("diff", a, b)
            assert code == DIFFERENT and "verdict\tdifferent\n" in text and "same\tno\n" in text

            code, text = run("diff", a, b, "--quick", "--json")
            found = json.loads(text)
            assert code == 0
            assert (found["same"], found["verdict"], found["evidence"]) == (
                None,
                LIMITED,
                "checksums",
            )
            assert found["by_checksum"] == found["compared"] > 0
            assert found["a"]["bytes_read"] == found["b"]["bytes_read"] == 0
            assert run("diff", a, b, "--quick", "-q") == (0, "")
            code, text = run("diff", a, b, "--quick")
            assert code == 0 and f"verdict\t{LIMITED}\n" in text and "same\tunknown\n" in text

            code, text = run("diff", a, b, "--structure")
            assert code == 0 and f"verdict\t{STRUCTURE}\n" in text and "same\tunknown\n" in text


def test_report_states_its_evidence(written, tmp_path):
    source = Path(written["converted hf"])
    for copy, _ in flipped(source, tmp_path / "flipped"):
        for a, b in ((source, copy), (copy, source)):
            found = json.loads(run("report", a, b, "--json")[1])["difference"]
            assert found["same"] is False and found["verdict"] == "different"
            found = json.loads(run("report", a, b, "--json", "--quick")[1])["difference"]
            assert (found["same"], found["verdict"]) == (None, LIMITED)
            page = tmp_path / "page.html"
            assert run("report", a, b, "-o", page, "--quick", "--overwrite")[0] == 0
            assert f'"verdict":"{LIMITED}"' in page.read_text().replace('": "', '":"')


def test_shards_with_same_recorded_checksums_are_not_called_equal(tmp_path):
    """One shard is a copy of the other, but for a flipped bit that no checksum shows."""
    state, config = tiny_llama("llama3")
    folder = save_meta(tmp_path / "meta", state, config, mp=2)
    first, second = (folder / f"consolidated.{rank:02d}.pth" for rank in range(2))
    content = bytearray(first.read_bytes())
    entry = located(folder).tensors["layers.0.attention.wq.weight"]
    extent = next(one for one in entry.extents if one.file == first.name)
    content[extent.offset] ^= 1
    second.write_bytes(content)
    notes = " ".join(formats.open_checkpoint(folder).notes)
    assert "records the same checksums as" in notes and "holds the same" not in notes


# ----------------------------------------------------------------------------- bytes that are read


class ReadBytes:
    """Counts what the system is asked for, by file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        pread, preadv = os.pread, os.preadv

        def count(descriptor: int, nbytes: int) -> None:
            self.counts[str(Path(f"/proc/self/fd/{descriptor}").readlink())] += nbytes

        def counted(descriptor: int, nbytes: int, offset: int) -> bytes:
            found = pread(descriptor, nbytes, offset)
            count(descriptor, len(found))
            return found

        def scattered(descriptor, buffers, offset, flags=0):
            found = preadv(descriptor, buffers, offset, flags)
            count(descriptor, found)
            return found

        monkeypatch.setattr(os, "pread", counted)
        monkeypatch.setattr(os, "preadv", scattered)

    def below(self, path: Path) -> int:
        """Return the bytes that were read of the files at *path*."""
        real = str(path.resolve())
        files = (f for f in self.counts if f == real or f.startswith(f"{real}/"))
        return sum(self.counts[file] for file in files)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("pair", [("hf", "dcp"), ("converted hf", "meta"), ("torch", "dcp")])
def test_diff_bytes_read_match_actual_reads(written, monkeypatch, pair, quick):
    """What an index takes is counted by the control: the same pair, of which no data is read."""
    a, b = (Path(written[name]) for name in pair)
    how = {"only": "model", "model_type": "llama3"}
    ckptctl.diff(a, b, **how)  # the first in a process learns how torch's zips are laid out
    control = ReadBytes(monkeypatch)
    ckptctl.diff(a, b, **how, structure=True)
    monkeypatch.undo()
    seen = ReadBytes(monkeypatch)
    found = ckptctl.diff(a, b, **how, quick=quick)
    for side, path in ((found.a, a), (found.b, b)):
        # Where items of torch's zips are located, their headers are read as well.
        extra = seen.below(path) - control.below(path) - side.bytes_read
        assert 0 <= extra <= 4096 * len(located(path).tensors)
        if not quick:
            assert side.bytes_read >= sum(e.nbytes for e in located(path).tensors.values())


def test_diff_of_url_fetches_at_least_bytes_counted(written, tmp_path, monkeypatch):
    """Whole blocks are fetched: no less than what is counted, and the index beside it."""
    memory = fsspec.filesystem("memory")
    memory.put(str(written["converted hf"]), f"/{tmp_path.name}", recursive=True)
    url = f"memory://{tmp_path.name}"
    fetched = remote_reads.counted(monkeypatch)
    quick = ckptctl.diff(written["hf"], url, structure=True)
    index = sum(fetched)
    found = ckptctl.diff(written["hf"], url)
    data = sum(entry.nbytes for entry in located(Path(written["hf"])).tensors.values())
    assert (quick.b.bytes_read, found.b.bytes_read) == (0, data)
    assert index < data <= sum(fetched) <= 2 * data


def test_diff_counts_source_bytes_of_dequantized_tensors(tmp_path, monkeypatch):
    source = tmp_path / "hf"
    ckptctl.convert("tests/data/tiny-llama3-hf", source, to="hf", quantize="fp8-block")
    control = ReadBytes(monkeypatch)
    ckptctl.diff(source, source, dequantize="bf16", structure=True)
    monkeypatch.undo()
    seen = ReadBytes(monkeypatch)
    found = ckptctl.diff(source, source, dequantize="bf16")
    assert found.same is True
    extra = seen.below(source) - control.below(source)
    assert found.a.bytes_read + found.b.bytes_read == extra
