"""Checkpoints that every rank wrote for itself: the samples, and every way to damage them."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl import formats
from ckptctl.errors import CkptError, DamagedError, UsageError
from ckptctl.verbs.verification.verify_options import Level
from ckptctl.verdict import UNKNOWN_MODEL
from tests.checkpoints import differences, load_any_reference, save_torch, tiny_llama
from tests.contract.support import message, refused
from tests.sweeps import one_in

SAMPLES = {
    "dcp-rank-local/w2/ckpt": "dcp-rank-local",
    "hf-rank-shards/hf_sharded/ckpt": "hf-rank-shards",
    "hf-rank-shards/hf_consolidated/ckpt/sharded": "hf-rank-shards",
    "hf-rank-shards/transformers/ckpt": "hf-rank-shards",
}
FIRST, SECOND = (f"shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2))

UNKNOWABLE = ("hf-rank-shards/hf_sharded/ckpt", f"{SECOND} missing")
"""No shard records the size of the whole: without its last ranks a checkpoint looks like one."""


def expected(data: Path, sample: str) -> Path:
    """Return the file with what *sample* holds."""
    return data.joinpath(*sample.split("/")[:2], "expected.safetensors")


def copied(data: Path, sample: str, folder: Path) -> Path:
    """Return a copy of *sample*, with room for outputs beside its parent."""
    (folder / "outputs").mkdir(exist_ok=True)
    source = data / sample
    return Path(shutil.copytree(source.parent, folder / "in")) / source.name


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("to", ["hf", "torch"])
def test_rank_shard_samples_convert_bit_exactly(
    tmp_path: Path, data: Path, sample: str, to: str
) -> None:
    assert list(formats.sniff_formats(data / sample)) == [SAMPLES[sample]]
    target = tmp_path / ("out.pt" if to == "torch" else "out")
    ckptctl.convert(data / sample, target, to=to)
    truth = load_any_reference(expected(data, sample))
    assert not differences(load_any_reference(target), truth)


def test_single_rank_shard_is_refused(tmp_path: Path, data: Path) -> None:
    source = copied(data, "hf-rank-shards/hf_sharded/ckpt", tmp_path) / FIRST
    assert not formats.sniff_formats(source)
    for known in (None, "hf"):
        with pytest.raises(CkptError) as caught:
            ckptctl.convert(source, tmp_path / "out", to="hf", from_format=known)
        assert caught.value.exit_code == 3


def test_possibly_missing_last_ranks_are_noted(tmp_path: Path, data: Path) -> None:
    source = copied(data, "hf-rank-shards/hf_sharded/ckpt", tmp_path)
    (source / SECOND).unlink()
    assert any("last ranks" in note for note in ckptctl.inspect(source).notes)


def test_ranks_option_detects_missing_last_rank(tmp_path: Path, data: Path) -> None:
    source = copied(data, "hf-rank-shards/hf_sharded/ckpt", tmp_path)
    found = ckptctl.verify(source, ranks=2)
    assert found.verdict == "complete" and found.notes == (UNKNOWN_MODEL,)
    with pytest.raises(UsageError, match=r"`ranks=1`, but there are shards of rank 2"):
        ckptctl.inspect(source, ranks=1)
    (source / SECOND).unlink()
    assert "set `ranks=N` to check" in ckptctl.inspect(source).notes[0]
    found = ckptctl.verify(source, ranks=2)
    assert found.verdict == "damaged" and {one.file for one in found.errors} == {SECOND}
    with pytest.raises(DamagedError, match="1 of 2 shards are missing"):
        ckptctl.convert(source, tmp_path / "out", to="dcp", ranks=2)
    with pytest.raises(UsageError, match="is not supported for `torch`"):
        ckptctl.verify(save_torch(tmp_path / "a.pt", {"w": torch.ones(2)}), ranks=2)


def test_config_shapes_reveal_missing_last_rank(tmp_path: Path) -> None:
    state, config = tiny_llama("llama3")
    for rank in range(2):
        parts = {name: whole.chunk(2)[rank].contiguous() for name, whole in state.items()}
        begins = {name: [rank * len(one)] + [0] * (one.ndim - 1) for name, one in parts.items()}
        offsets = {name: {"saved_offsets": begin} for name, begin in begins.items()}
        name = f"shard-0000{rank + 1}-model-00001-of-00001.safetensors"
        save_file(parts, tmp_path / name, {"DCP_SHARDING_INFO": json.dumps(offsets)})
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ckptctl.verify(tmp_path).verdict == "complete"
    (tmp_path / SECOND).unlink()
    (found,) = ckptctl.verify(tmp_path).unknown
    assert found.what.startswith("the last ranks' shards may be missing")
    assert found.why and "v = 128 (from `vocab_size`)" in found.why


def test_shards_contradicting_consolidated_file_are_warned_about(
    tmp_path: Path, data: Path
) -> None:
    source = copied(data, "hf-rank-shards/hf_consolidated/ckpt", tmp_path)

    def said(level: Level = "headers") -> list[tuple[str, str | None]]:
        found = ckptctl.verify(source, level=level)
        assert found.verdict == "complete" and all(one.file == "sharded" for one in found.findings)
        return [(one.what, one.why) for one in found.findings]

    assert said() == []
    (file,) = source.glob("*.safetensors")
    state = load_file(file)
    save_file(state | {"emb.weight": torch.ones(2, 3), "new": torch.ones(4)}, file)
    what = "the shards in `sharded` do not match this checkpoint"
    assert said() == [
        (
            what,
            "`emb.weight` is float32 [37, 13] in `sharded`, but float32 [2, 3] in this checkpoint",
        ),
        (what, "`new` is missing in `sharded`, but float32 [4] in this checkpoint"),
    ]
    save_file({**state, "emb.weight": state["emb.weight"] + 1}, file)
    assert said() == []
    assert said("full") == [(what, "the elements of `emb.weight` differ")]
    save_file(state, file)
    (source / "sharded" / SECOND).unlink()
    assert said() == [
        ("the shards in `sharded` are incomplete", "the last ranks' shards are missing")
    ]
    file.write_bytes(bytes(file.stat().st_size))  # what is damaged is not compared
    assert all(one.severity != "warning" for one in ckptctl.verify(source).findings)


def damages(source: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield every change to the files of *source*, with a name."""
    files = sorted(item for item in source.iterdir() if item.is_file())
    for file in files:
        content = file.read_bytes()
        yield f"{file.name} missing", file.unlink
        for length in (0, 1, len(content) // 2, len(content) - 1):
            yield f"{file.name} cut to {length}", partial(file.write_bytes, content[:length])
    for one, other in itertools.permutations(files, 2):
        yield f"{one.name} is {other.name}", partial(shutil.copy, other, one)
    for one, other in itertools.combinations(files, 2):
        yield f"{one.name} and {other.name} swapped", partial(_swap, one, other)


def _lose(path: Path, *names: str) -> None:
    for name in names:
        (path / name).unlink()


def _announce(path: Path, *names: str) -> None:
    """Rename shards as if each rank had written two files."""
    for name in names:
        (path / name).rename(path / name.replace("of-00001", "of-00002"))


def _swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


@pytest.mark.parametrize("sample", one_in(3, SAMPLES))
def test_damaged_rank_shards_are_refused_or_read_exactly(
    tmp_path: Path, data: Path, sample: str
) -> None:
    """An error that names what is wrong, or the same tensors (what a shard holds tells where)."""
    truth = load_any_reference(expected(data, sample))
    refusals = 0
    for number in itertools.count():
        folder = tmp_path / str(number)
        folder.mkdir()
        source = copied(data, sample, folder)
        changes = list(damages(source))
        if number == len(changes):
            break
        what, change = changes[number]
        change()
        if (sample, what) == UNKNOWABLE:
            continue
        refusals += _refused_or_right(source, folder, truth, what)
        shutil.rmtree(folder)
    assert refusals >= 20 if "dcp" in sample else refusals >= 8


def _refused_or_right(source: Path, folder: Path, truth: dict[str, object], what: str) -> bool:
    target = folder / "outputs" / "out.pt"
    try:
        ckptctl.convert(source, target, to="torch")
    except CkptError as error:
        described = (source / "config.json").exists()  # then shapes contradict it
        codes = (3, 4, 5, 9) if described else (3, 4, 9)
        assert error.exit_code in codes, (what, error.to_json())
        assert not target.exists()
        return True
    assert not differences(load_any_reference(target), truth), what
    return False


@pytest.mark.slow
@pytest.mark.parametrize("sample", one_in(3, SAMPLES))
def test_flipped_index_byte_is_readable_or_refused(tmp_path: Path, data: Path, sample: str) -> None:
    source = copied(data, sample, tmp_path)
    index = source / ("__1.metadata" if "dcp" in sample else SECOND)
    whole = index.read_bytes()
    length = len(whole) if "dcp" in sample else 8 + int.from_bytes(whole[:8], "little")
    for at in range(0, length, 61):
        index.write_bytes(whole[:at] + bytes([whole[at] ^ 0x24]) + whole[at + 1 :])
        try:
            catalog = formats.resolve_codecs(formats.open_checkpoint(source))
        except CkptError as error:
            assert error.exit_code in (3, 4, 9), at
        else:
            assert catalog.tensors, at


NAMED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "rank missing": (
        "dcp-rank-local/w2/ckpt",
        lambda path: _lose(path, "__0.metadata"),
        "__0.metadata",
    ),
    "last rank missing, its data there": (
        "dcp-rank-local/w2/ckpt",
        lambda path: _lose(path, "__1.metadata"),
        "__1.metadata",
    ),
    "last rank missing altogether": (
        "dcp-rank-local/w2/ckpt",
        lambda path: _lose(path, "__1.metadata", "__1_0.distcp"),
        "rank 0",
    ),
    "unfinished rank": (
        "dcp-rank-local/w2/ckpt",
        lambda path: (path / "__2.metadata.tmp").touch(),
        "__2.metadata",
    ),
    "data missing": (
        "dcp-rank-local/w2/ckpt",
        lambda path: _lose(path, "__1_0.distcp"),
        "__1_0.distcp",
    ),
    "rank copied": (
        "dcp-rank-local/w2/ckpt",
        lambda path: shutil.copy(path / "__1.metadata", path / "__2.metadata"),
        "__2.metadata",
    ),
    "ranks swapped": (
        "dcp-rank-local/w2/ckpt",
        lambda path: _swap(path / "__0.metadata", path / "__1.metadata"),
        "__0.metadata",
    ),
    "first shard missing": (
        "hf-rank-shards/hf_sharded/ckpt",
        lambda path: _lose(path, FIRST),
        FIRST,
    ),
    "last shard missing, an index beside": (
        "hf-rank-shards/hf_consolidated/ckpt/sharded",
        lambda path: _lose(path, SECOND),
        "last ranks' shards",
    ),
    "shard copied": (
        "hf-rank-shards/hf_sharded/ckpt",
        lambda path: shutil.copy(path / SECOND, path / SECOND.replace("2", "3", 1)),
        "two shards",
    ),
    "a file of each rank missing": (
        "hf-rank-shards/hf_sharded/ckpt",
        lambda path: _announce(path, FIRST, SECOND),
        "shard-00001-model-00002-of-00002.safetensors",
    ),
    "different saves": (
        "hf-rank-shards/hf_sharded/ckpt",
        lambda path: _announce(path, SECOND),
        "different saves",
    ),
}


@pytest.mark.parametrize("case", NAMED)
def test_damaged_rank_shard_error_names_cause(tmp_path: Path, data: Path, case: str) -> None:
    sample, change, word = NAMED[case]
    source = copied(data, sample, tmp_path)
    change(source)
    with refused(source, tmp_path / "outputs" / "out", 4, 9) as caught:
        ckptctl.convert(source, tmp_path / "outputs" / "out", to="hf")
    assert word in message(caught.value), message(caught.value)
