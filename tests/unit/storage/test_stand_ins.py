"""What downloads leave in place of a file is called by its name."""

from pathlib import Path

import pytest

import ckptctl
from ckptctl.errors import CkptError, DamagedError

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
def test_instead_of_a_file(tmp_path: Path, name: str, content: bytes, kind: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DamagedError, match=f"this is .*{kind}") as caught:
        ckptctl.inspect(tmp_path)
    assert caught.value.where == str(tmp_path / name) and caught.value.hint
    found = ckptctl.verify(tmp_path)
    assert found.errors and kind in str(found.findings)


@pytest.mark.parametrize("content", [b"", b"PK", b"\0" * 100, b"version 1", b"<?xml?><svg/>"])
def test_other_contents_are_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CkptError, match="safetensors"):
        ckptctl.inspect(tmp_path)


def test_a_file_that_is_no_format_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").write_bytes(POINTER)
    with pytest.raises(CkptError, match="Git LFS") as caught:
        ckptctl.inspect(tmp_path / "last.ckpt")
    assert "git lfs pull" in str(caught.value.hint)
