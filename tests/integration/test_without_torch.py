"""Where torch is not installed: what works all the same, and what says how to install it.

The page ``docs/how-to/install.md`` has the list of command lines, and this runs it. Nothing here
imports torch: ``nox -s bare`` runs the file where there is none. Where there is one it is hidden.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import ckptctl
from ckptctl.cli.app import app
from ckptctl.errors import MissingPackageError
from ckptctl.formats.delta import TensorChange, TensorRecord
from ckptctl.numerics.kinds.delta import BlockKind, encode_table
from ckptctl.verbs.deltas.delta_files import DeltaWriter
from ckptctl.verbs.deltas.make import build_manifest
from tests.conftest import DATA
from tests.runs import save_step

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "install.md"
ROW = re.compile(r"^\| `ckptctl (?P<line>.+?)` \| (?P<answer>works|refused)", re.MULTILINE)
BLOCK = re.compile(r"^```text\n\$ ckptctl ([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HINT = "hint: install it with `pip install torch`"
HIDDEN = "import sys; sys.modules['torch'] = None\n"
PROGRAM = f"{HIDDEN}from ckptctl.__main__ import main\nsys.exit(main())"
TRAINING = f"""{HIDDEN}import ckptctl, pickle, pydoc
help = pydoc.render_doc
help(ckptctl)
for name in ckptctl.__all__:
    assert hasattr(ckptctl, name)
    found = getattr(ckptctl, name)
    if not (found.__doc__ or "").startswith("Not available: "):
        continue
    try:
        found({{}}, "out")
    except ImportError as error:
        assert pickle.loads(pickle.dumps(error)).hint == error.hint
        print(name, error.code, error.hint)
import ckptctl.integrations.lightning
"""


@pytest.fixture(autouse=True)
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide torch, whether it is there or not."""
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder, the current one, with the checkpoints that the page names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    copy(DATA / "tiny-llama3-hf", tmp_path / "model")
    copy(DATA / "dcp-rank-local" / "w2" / "ckpt", tmp_path / "ranks")
    for step in (9, 10):
        save_step(tmp_path / "runs" / f"step-{step}")
    write_other(tmp_path / "other")
    write_quantized(tmp_path / "quantized")
    write_adapter(tmp_path / "adapter")
    write_delta(tmp_path / "other.delta", tmp_path / "model", tmp_path / "other")
    return tmp_path


def copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def write(file: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """Write a safetensors file of names, dtypes, shapes and bytes."""
    header: dict[str, object] = {}
    data = b""
    for name, (dtype, shape, held) in tensors.items():
        ends = [len(data), len(data) + len(held)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": ends}
        data += held
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_other(folder: Path) -> None:
    """Write the model with two elements of one tensor changed."""
    copy(DATA / "tiny-llama3-hf", folder)
    file = folder / "model-00001-of-00003.safetensors"
    data = bytearray(file.read_bytes())
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    start = 8 + length + header["model.embed_tokens.weight"]["data_offsets"][0]
    for element in (3, 64):
        data[start + 2 * element] ^= 1
    file.write_bytes(data)


def write_quantized(folder: Path) -> None:
    """Write one float8 matrix with the scale of its block."""
    name = "model.layers.0.mlp.up_proj.weight"
    scale = ("F32", [1, 1], struct.pack("<f", 0.5))
    matrix = ("F8_E4M3", [4, 4], bytes(16))
    write(folder / "model.safetensors", {name: matrix, f"{name}_scale_inv": scale})
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))


def write_adapter(folder: Path) -> None:
    """Write a LoRA adapter of rank 1 for one projection of the model, which is ``[64, 64]``."""
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {
        f"{module}.lora_A.weight": ("F32", [1, 64], bytes(4 * 64)),
        f"{module}.lora_B.weight": ("F32", [64, 1], bytes(4 * 64)),
    }
    write(folder / "adapter_model.safetensors", factors)
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def write_delta(folder: Path, base: Path, new: Path) -> None:
    """Write the delta of one tensor, with its new elements as they are."""
    catalogs = [ckptctl.plan_conversion(path, folder / "x", to="hf").source for path in (base, new)]
    changes: dict[str, TensorChange] = {}
    folder.mkdir()
    writer = DeltaWriter(folder)
    for name, entry in catalogs[0].tensors.items():
        contents = []
        for path, catalog in zip((base, new), catalogs, strict=True):
            (extent,) = catalog.tensors[name].extents
            data = (path / extent.file).read_bytes()
            contents.append(data[extent.offset : extent.offset + extent.nbytes])
        before, after = (
            TensorRecord(entry.dtype, entry.shape, hashlib.sha256(content).hexdigest())
            for content in contents
        )
        file = None
        if before != after:
            blocks = [(BlockKind.RAW, len(contents[1]))]
            file = writer.add_payload(name, [encode_table(blocks), contents[1]])
        changes[name] = TensorChange(before, after, file)
    writer.finish_payloads()
    writer.finish(build_manifest(changes, writer, "deflate", "llama3", "hf", {}))


def run(line: str) -> Result:
    return CliRunner().invoke(app, shlex.split(line), prog_name="ckptctl")


def rows() -> Iterator[tuple[str, str]]:
    for row in ROW.finditer(PAGE.read_text()):
        yield row["line"].replace("\\|", "|"), row["answer"]


def entries(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def test_documented_commands_work_or_require_torch(place: Path) -> None:
    """In their order: some need what an earlier one wrote. What is refused begins nothing."""
    for line, answer in rows():
        before = entries(place)
        done = run(line)
        assert not done.exception or isinstance(done.exception, SystemExit), line
        if answer == "works":
            differ = line.startswith("diff model other")
            assert done.exit_code == (1 if differ else 0), (line, done.output)
        else:
            assert done.exit_code == MissingPackageError.exit_code == 2, (line, done.output)
            assert "requires torch, which is not installed" in done.stderr, line
            # What the executor says, if nobody asked before it began.
            assert "arithmetic on elements" not in done.stderr, line
            assert HINT in done.stderr, line
            assert entries(place) == before, line


def test_documented_refusal_matches_output(place: Path) -> None:
    ((line, shown),) = BLOCK.findall(PAGE.read_text())
    assert run(line).output == shown


def test_every_command_is_documented() -> None:
    lines = [f"{line} " for line, _ in rows()]
    registered = {str(info.name) for info in app.registered_commands}
    assert {n for n in registered if any(line.startswith(f"{n} ") for line in lines)} == registered
    assert all(any(line.startswith(f"{name} ") for name in registered) for line in lines)


def test_diff_without_torch_compares_bits(place: Path) -> None:
    done = run("diff model other --json")
    found = json.loads(done.stdout)
    (wrong,) = found["tensors"]
    assert found["bitwise"] and wrong["name"] == "model.embed_tokens.weight"
    values = wrong["values"]
    assert (values["differing"], values["count"], values["worst"]) == (2, 128 * 64, [0, 3])
    assert values["max_abs"] is None
    assert any("pip install torch" in note for note in found["notes"])


def test_diff_of_different_dtypes_requires_torch(place: Path) -> None:
    tensor = {"w": ("F32", [2], bytes(8))}
    write(place / "a" / "model.safetensors", tensor)
    write(place / "b" / "model.safetensors", {"w": ("BF16", [2], bytes(4))})
    done = run("diff a b --json")
    error = json.loads(done.stderr)["error"]
    assert (done.exit_code, error["code"]) == (2, "missing-package")
    assert error["why"] == "`w` is float32 in A and bfloat16 in B"
    assert run("diff a b --structure").exit_code == 1


def test_extract_of_float8_without_torch_is_refused(place: Path) -> None:
    done = run("extract quantized model.layers.0.mlp.up_proj.weight")
    assert done.exit_code == 2 and "float8_e4m3fn" in done.stderr


def test_dry_run_warns_that_torch_is_missing(place: Path) -> None:
    done = run("convert model out --to hf --dtype fp32 --dry-run")
    assert done.exit_code == 0
    assert "warning: torch is not installed; the conversion would be refused" in done.stderr


def python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_subprocess_without_torch_shows_install_hint(place: Path) -> None:
    done = python(PROGRAM, "convert", "model", "processed", "--to", "hf", "--dtype", "fp32")
    assert done.returncode == 2 and HINT in done.stderr and not Path("processed").exists()


def test_training_api_without_torch_is_an_import_error() -> None:
    done = python(TRAINING)
    assert "MissingPackageError: a trainer's plugin requires torch" in done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines()]
    training = {n for n, home in ckptctl._HOME.items() if home.startswith("ckptctl.distributed.")}
    assert set(names) == training >= {"AsyncSaver", "CheckpointManager", "load", "save"}
    assert "missing-package install it with `pip install torch`" in done.stdout


def test_python_api_without_torch_raises_missing_package_error(place: Path) -> None:
    with pytest.raises(MissingPackageError, match="`stats=True` requires torch"):
        ckptctl.inspect("model", stats=True)
    with pytest.raises(ImportError, match="conversion requires torch"):
        ckptctl.convert("model", "fp32", to="hf", dtype="fp32")
    assert ckptctl.convert("model", "dcp", to="dcp").verified is False
