"""What downloads leave in place of a file is called by its name."""

from pathlib import Path

import pytest

import ckptctl
from ckptctl.errors import CkptError, DamagedError, UnsupportedError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PAGE = b"<!DOCTYPE html>\n<html><body>Sign in</body></html>"
DENIED = b'<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code></Error>'
FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "consolidated.00.pth",
)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("content", "kind"), [(POINTER, "Git LFS"), (PAGE, "web page"), (DENIED, "object store")]
)
def test_placeholder_download_is_damaged_and_named(
    tmp_path: Path, name: str, content: bytes, kind: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DamagedError, match=f"this is .*{kind}") as caught:
        ckptctl.inspect(tmp_path)
    assert caught.value.where == str(tmp_path / name) and caught.value.hint
    found = ckptctl.verify(tmp_path)
    assert found.errors and kind in str(found.findings)


@pytest.mark.parametrize("content", [b"", b"PK", b"\0" * 100, b"version 1", b"<?xml?><svg/>"])
def test_other_invalid_contents_are_not_placeholders(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CkptError, match="safetensors"):
        ckptctl.inspect(tmp_path)


def test_git_lfs_pointer_file_hints_at_lfs_pull(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").write_bytes(POINTER)
    with pytest.raises(CkptError, match="Git LFS") as caught:
        ckptctl.inspect(tmp_path / "last.ckpt")
    assert "git lfs pull" in str(caught.value.hint)


KINDS = {
    "text": (b"This is not a checkpoint\n", "text"),
    "json": (b'{"error": "not found"}', "JSON"),
    "torch": (b"PK\3\4" + bytes(40), "a zip"),
    "pickle": (b"\x80\x04\x95" + bytes(range(100, 140)), "a pickle"),
    "legacy": (bytes.fromhex("80028a0a6cfc9c46f9206aa850192e80024de903"), "a legacy torch file"),
    "gguf": (b"GGUF\3\0\0\0" + bytes(40), "GGUF"),
    "gzip": (b"\x1f\x8b\x08\0\0\0\0\xff" + bytes(40), "gzip"),
    "umlauts": ("ü".encode() * 3000, "text"),
}


@pytest.mark.parametrize("name", KINDS)
def test_other_file_kind_named_safetensors_is_unsupported(tmp_path: Path, name: str) -> None:
    content, kind = KINDS[name]
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    # A zip called so may be a file of `torch.save` if it is named by itself.
    for path in (tmp_path, *([file] if name != "torch" else [])):
        with pytest.raises(UnsupportedError, match="not a safetensors file: the first 8") as caught:
            ckptctl.inspect(path)
        assert caught.value.where == str(file)
        assert str(caught.value.why).startswith(f"it looks like {kind}")
        assert caught.value.hint


def test_unknown_safetensors_header_shows_encoded_length(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 8 + b"{" + bytes(range(1, 99)))
    with pytest.raises(UnsupportedError, match="not a safetensors file") as caught:
        ckptctl.inspect(tmp_path)
    assert caught.value.why == f"they encode {2**64 - 1:,} bytes"


def test_empty_safetensors_file_is_damaged_and_called_empty(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(DamagedError, match="truncated") as caught:
        ckptctl.inspect(tmp_path)
    assert caught.value.why == "the file is empty"
