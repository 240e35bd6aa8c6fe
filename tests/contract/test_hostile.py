"""Hostile input through the whole program: refused, and nothing of it runs."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl.errors import CkptError, UnsupportedError
from tests import hostile
from tests.checkpoints import save_dcp, save_hf, tiny_llama
from tests.contract.support import message
from tests.sweeps import one_in

MARKER = "/tmp/ckptctl-hostile-marker"
CODE = hostile.code_pickles(MARKER)
PLACES = ("dcp", "pth", "pt", "bin")


@pytest.fixture(autouse=True)
def no_marker() -> Any:
    Path(MARKER).unlink(missing_ok=True)
    yield
    assert not Path(MARKER).exists()


def both_refuse(source: Path, folder: Path, *codes: int, **options: Any) -> str:
    """Return what is said; neither command may succeed or leave anything."""
    said = ""
    calls: list[Callable[[], object]] = [
        lambda: ckptctl.convert(source, folder / "out", to="dcp", **options)
    ]
    if not options:
        calls.append(lambda: ckptctl.inspect(source))
    for call in calls:
        with pytest.raises(CkptError) as caught:
            call()
        assert caught.value.exit_code in (codes or (4, 9)), message(caught.value)
        said = message(caught.value)
        assert not [item for item in folder.iterdir() if "out" in item.name]
    return said


def put(place: str, folder: Path, pickled: bytes, storages: dict[str, bytes]) -> Path:
    """Write *pickled* where a checkpoint of that kind has a pickle."""
    if place == "dcp":
        source = folder / "dcp"
        source.mkdir()
        (source / ".metadata").write_bytes(pickled)
        (source / "__0_0.distcp").write_bytes(b"")
        return source
    content = hostile.zip_of(hostile.torch_entries(pickled, storages))
    return put_zip(place, folder, content)


def put_zip(place: str, folder: Path, content: bytes) -> Path:
    if place == "pt":
        (folder / "model.pt").write_bytes(content)
        return folder / "model.pt"
    name = "consolidated.00.pth" if place == "pth" else "pytorch_model.bin"
    source = folder / place
    source.mkdir()
    (source / name).write_bytes(content)
    if place == "pth":
        (source / "params.json").write_text("{}")
    return source


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", CODE)
def test_code_executing_pickles_are_refused(tmp_path: Path, place: str, case: str) -> None:
    source = put(place, tmp_path, CODE[case], {})
    assert source.name in both_refuse(source, tmp_path)


@pytest.mark.parametrize("case", ["eval", "exec", "os-system", "posix-system", "real-reduce"])
def test_hostile_pickles_execute_under_plain_pickle(case: str) -> None:
    pickle.loads(CODE[case])
    assert Path(MARKER).exists()
    Path(MARKER).unlink()


@pytest.mark.parametrize("place", ["dcp", "pt"])
@pytest.mark.parametrize("case", one_in(7, hostile.exhausting_pickles()))
def test_exhausting_pickles_fail_cleanly(tmp_path: Path, place: str, case: str) -> None:
    """Some are only empty to a reader that is not careless."""
    source = put(place, tmp_path, hostile.exhausting_pickles()[case], {})
    with pytest.raises(CkptError) as caught:
        ckptctl.convert(source, tmp_path / "out", to="dcp")
    assert caught.value.exit_code in (4, 5, 9)
    assert not (tmp_path / "out").exists()
    if caught.value.exit_code != 5:
        with pytest.raises(CkptError):
            ckptctl.inspect(source)
    else:
        assert ckptctl.inspect(source).verdict == "unknown"


@pytest.mark.parametrize("case", one_in(7, CODE))
@pytest.mark.parametrize("only", ["all", "model"])
def test_hostile_dcp_byte_items_are_refused(tmp_path: Path, case: str, only: Any) -> None:
    """A leaf beside the model travels with ``all`` only; one inside the model always."""
    source = save_dcp(tmp_path / "dcp", {"model": {"w": torch.ones(4), "n": 1}, "step": 7})
    with (source / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    key = "step" if only == "all" else "model.n"
    index = next(index for index in metadata.storage_data if index.fqn == key)
    info = metadata.storage_data[index]
    content = hostile.zip_of(hostile.torch_entries(CODE[case], {}))
    data = source / info.relative_path
    info.offset, info.length = data.stat().st_size, len(content)
    data.write_bytes(data.read_bytes() + content)
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    said = both_refuse(source, tmp_path, only=only)
    assert info.relative_path in said
    # inspect reads the index only, and runs nothing
    assert ckptctl.inspect(source).verdict == "complete"


def honest_parts(folder: Path) -> tuple[bytes, dict[str, bytes]]:
    """Return the pickle and the storages of an honest ``torch.save`` file."""
    import zipfile

    torch.save({"a": torch.arange(8.0), "b": torch.ones(4)}, folder / "honest.pt")
    with zipfile.ZipFile(folder / "honest.pt") as archive:
        names = {name.partition("/")[2]: name for name in archive.namelist()}
        parts = {short: archive.read(name) for short, name in names.items()}
    (folder / "honest.pt").unlink()
    data = {name[5:]: value for name, value in parts.items() if name.startswith("data/")}
    return parts["data.pkl"], data


def test_harmless_zip_converts(tmp_path: Path) -> None:
    pickled, storages = honest_parts(tmp_path)
    source = put("pt", tmp_path, pickled, storages)
    assert ckptctl.inspect(source).verdict == "complete"
    ckptctl.convert(source, tmp_path / "out", to="dcp")


def _zips() -> list[str]:
    return list(hostile.evil_zips(b"", {"0": b"1234", "1": b"5678"}))


@pytest.mark.parametrize("case", _zips())
def test_malformed_zips_are_refused(tmp_path: Path, case: str) -> None:
    pickled, storages = honest_parts(tmp_path)
    content = hostile.evil_zips(pickled, storages)[case]
    source = put_zip("pt", tmp_path, content)
    both_refuse(source, tmp_path, 3, 4, 9)


@pytest.mark.parametrize("case", one_in(7, hostile.evil_headers()))
def test_malformed_safetensors_headers_are_refused(tmp_path: Path, case: str) -> None:
    source = tmp_path / "hf"
    source.mkdir()
    (source / "model.safetensors").write_bytes(hostile.evil_headers()[case])
    if case in ("unknown-dtype", "f6"):
        assert any(tensor.unsupported for tensor in ckptctl.inspect(source).tensors)
        assert ckptctl.verify(source).verdict == "unknown"
        with pytest.raises(UnsupportedError, match="cannot be read"):
            ckptctl.convert(source, tmp_path / "out", to="dcp")
        return
    said = both_refuse(source, tmp_path, 3, 4, 9)
    assert "model.safetensors" in said


JSON = {
    "deep": b'{"a":' * 100_000,
    "list": b"[]",
    "nan": b'{"hidden_size": NaN}',
    "not-utf8": b'{"a": "\xff"}',
    "twice": b'{"hidden_size": 1, "hidden_size": 2}',
    "digits": b'{"hidden_size": ' + b"9" * 5000 + b"}",
    "cut": b'{"hidden_size": 1',
    "empty": b"",
}


TRICKS = [(case, name) for case in JSON for name in ("config.json", "model.safetensors.index.json")]
TRICKS.remove(("nan", "config.json"))  # Python writes such constants, and Mamba-2 has them


@pytest.mark.parametrize(("case", "name"), TRICKS)
def test_malformed_json_files_are_refused_by_name(tmp_path: Path, case: str, name: str) -> None:
    state, config = tiny_llama("llama3", layers=1)
    source = save_hf(tmp_path / "hf", state, config, shards=2)
    (source / name).write_bytes(JSON[case])
    said = both_refuse(source, tmp_path)
    assert name in said


def test_escape_codes_in_tensor_names_are_not_printed(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from ckptctl.cli.app import app

    source = save_hf(tmp_path / "hf", {"a\x1b[31mred\n[bold]x[/bold]": torch.ones(1)})
    for arguments in (["--tensors"], ["--json"], ["--markdown"], []):
        result = CliRunner().invoke(app, ["inspect", str(source), *arguments])
        assert result.exit_code == 0, result.output
        assert "\x1b" not in result.output
        if arguments == ["--json"]:
            json.loads(result.stdout)
        else:
            assert "[bold]" in result.stdout.replace("\\[", "[")


def test_auto_map_code_is_not_imported(tmp_path: Path) -> None:
    state, config = tiny_llama("llama3", layers=1)
    config |= {"auto_map": {"AutoModel": "modeling_evil.Evil"}, "torch_dtype": "__import__('os')"}
    source = save_hf(tmp_path / "hf", state, config)
    (source / "modeling_evil.py").write_text(f"open({MARKER!r}, 'w')")
    ckptctl.inspect(source)
    ckptctl.convert(source, tmp_path / "out", to="meta")
