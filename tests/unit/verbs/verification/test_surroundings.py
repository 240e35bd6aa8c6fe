"""Downloads as huggingface_hub leaves them, checked against what the Hub said of each file."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from pathlib import Path

import pytest
from huggingface_hub._local_folder import read_download_metadata, write_download_metadata
from huggingface_hub.file_download import _create_symlink
from huggingface_hub.utils._shared_blobs import publish_blob_to_shared_store
from huggingface_hub.utils.sha import git_hash

import ckptctl
from ckptctl.errors import CkptError

SOURCE = Path("tests/data/tiny-llama3-hf")
COMMIT = "0123456789" * 4
LATER = 1_000


def etag(path: Path) -> str:
    """Return the ETag that the Hub sends: of what is in LFS the SHA-256, else git's digest."""
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        return hashlib.sha256(content).hexdigest()
    return git_hash(content)


def flip(path: Path, position: int = -3) -> None:
    """Change a byte, as a disk does: nobody notes the time."""
    before, content = path.stat(), bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def names() -> list[str]:
    return sorted(item.name for item in SOURCE.iterdir() if item.is_file())


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A folder as ``hf download --local-dir`` leaves it."""
    folder = tmp_path / "local"
    shutil.copytree(SOURCE, folder)
    for name in names():
        write_download_metadata(folder, name, COMMIT, etag(folder / name))
        assert read_download_metadata(folder, name)
    return folder


def cached(root: Path, shared: bool) -> Path:
    """Return a snapshot as ``hf download`` leaves it in its cache."""
    repository = root / "cache" / "models--some--llama"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for name in names():
        blob = repository / "blobs" / etag(SOURCE / name)
        shutil.copy(SOURCE / name, blob)
        _create_symlink(str(blob), str(snapshot / name), new_blob=True)
        if shared and name.endswith(".safetensors"):
            assert publish_blob_to_shared_store(
                blob_path=str(blob),
                xet_hash=hashlib.blake2s(name.encode()).hexdigest(),
                cache_dir=root / "cache",
                expected_size=blob.stat().st_size,
            )
            assert blob.is_symlink()
    assert all((snapshot / name).is_symlink() for name in names())
    return snapshot


@pytest.mark.parametrize("kind", ["local", "cache", "shared"])
def test_hub_download_is_verified_completely(tmp_path: Path, local: Path, kind: str) -> None:
    path = local if kind == "local" else cached(tmp_path, kind == "shared")
    found = ckptctl.verify(path, level="full")
    assert found.verdict == "complete" and not found.findings
    assert found.verified_bytes == found.nbytes > 0
    assert ckptctl.verify(path).verified_bytes is None


@pytest.mark.parametrize("kind", ["local", "cache", "shared"])
def test_changed_byte_in_hub_download_is_an_error(tmp_path: Path, local: Path, kind: str) -> None:
    path = local if kind == "local" else cached(tmp_path, kind == "shared")
    shards = [name for name in names() if name.endswith(".safetensors")]
    for name in (shards[1], "generation_config.json"):
        real = (path / name).resolve()
        real.chmod(0o600)
        flip(real)
        assert ckptctl.verify(path).verdict == "complete"
        found = ckptctl.verify(path, level="full")
        (error,) = found.errors
        assert error.file == name
        assert etag(SOURCE / name) in str(error.why)
        assert found.verified.get(name, 0) == 0
        flip(real)


def test_edited_small_files_are_warnings(local: Path) -> None:
    """A configuration is edited by hand, weights never are."""
    for name in names():
        if name.endswith(".safetensors"):
            flip(local / name)
        else:
            (local / name).write_bytes((local / name).read_bytes() + b"\n")
        os.utime(local / name, (time.time() + LATER,) * 2)
        assert not read_download_metadata(local, name)
    found = ckptctl.verify(local, level="full")
    errors = {error.file for error in found.errors}
    warnings = {finding.file for finding in found.findings} - errors
    assert errors == {name for name in names() if name.endswith(".safetensors")}
    assert warnings == set(names()) - errors


@pytest.mark.parametrize("inner", ["original", "a/b"])
def test_repository_subfolder_is_verified_by_top_level_records(tmp_path: Path, inner: str) -> None:
    """What lies in a folder of a repository is recorded at the repository's top."""
    top = tmp_path / "local"
    shutil.copytree(SOURCE, top / inner)
    for name in names():
        write_download_metadata(top, f"{inner}/{name}", COMMIT, etag(SOURCE / name))
    found = ckptctl.verify(top / inner, level="full")
    assert found.verdict == "complete"
    assert found.verified_bytes == found.nbytes
    shard = next((top / inner).glob("*.safetensors"))
    flip(shard)
    assert [error.file for error in ckptctl.verify(top / inner, level="full").errors] == [
        shard.name
    ]


@pytest.mark.parametrize("content", [b"", b"x\n", b"\xff\n\n\n", b"a\nb\nc\n"])
def test_malformed_download_record_is_a_warning(local: Path, content: bytes) -> None:
    record = local / ".cache/huggingface/download/config.json.metadata"
    record.write_bytes(content)
    found = ckptctl.verify(local, level="full")
    assert found.verdict == "complete"
    (warning,) = found.findings
    assert str(warning.file).endswith(record.name)


def test_foreign_etags_verify_nothing(local: Path) -> None:
    """A proxy may send its own."""
    for name in names():
        write_download_metadata(local, name, COMMIT, "0-16")
    found = ckptctl.verify(local, level="full")
    assert found.verdict == "complete" and not found.findings
    assert found.verified_bytes == 0


def test_removed_sidecar_file_is_not_reported(local: Path) -> None:
    (local / "generation_config.json").unlink()
    assert ckptctl.verify(local, level="full").verdict == "complete"


@pytest.mark.parametrize("kind", ["local", "cache"])
def test_unfinished_download_is_a_warning(tmp_path: Path, local: Path, kind: str) -> None:
    path = local if kind == "local" else cached(tmp_path, shared=False)
    folder = path / ".cache/huggingface/download" if kind == "local" else path.parents[1] / "blobs"
    (folder / f"{'0' * 64}.incomplete").write_bytes(b"1")
    (warning,) = ckptctl.verify(path).findings
    assert warning.severity == "warning"
    assert str(warning.file).endswith(".incomplete")


def test_links_outside_hub_cache_are_refused(tmp_path: Path) -> None:
    """The shared store lies beside the repositories, and its files have names of one kind."""
    snapshot = cached(tmp_path, shared=True)
    shard = sorted(snapshot.glob("*.safetensors"))[0]
    blob = shard.parent / shard.readlink()
    stored = blob.resolve()
    for target in (tmp_path / "elsewhere", stored.with_name("passwords")):
        shutil.copy(stored, target)
        blob.unlink()
        blob.symlink_to(target)
        with pytest.raises(CkptError, match="points outside"):
            ckptctl.convert(snapshot, tmp_path / "out", to="hf")
