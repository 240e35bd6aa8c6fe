"""What counts as proven by checksums, and what does not."""

import hashlib
import random
import shutil
from itertools import pairwise

import pytest
import torch
from safetensors.torch import save_file

import ckptctl
from ckptctl import formats
from ckptctl.catalog import Box, Extent, TensorEntry
from ckptctl.errors import RefusedError
from ckptctl.verbs.verification.data import VerifiedBytes
from tests.conftest import DATA


def entry(offset: int, nbytes: int) -> TensorEntry:
    extent = Extent(Box((0,), (nbytes,)), "a", offset, nbytes)
    return TensorEntry("w", "uint8", (nbytes,), (extent,), ("w",))


def span(one: int, other: int) -> tuple[str, int, int]:
    return "a", min(one, other), max(one, other)


@pytest.mark.parametrize("seed", range(50))
def test_verified_bytes_exclude_ranges_with_wrong_checksum(seed: int) -> None:
    draw = random.Random(seed)
    right, wrong = (
        [span(draw.randrange(40), draw.randrange(40)) for _ in range(draw.randrange(6))]
        for _ in range(2)
    )
    proof = VerifiedBytes(right, wrong)
    byte = {n for _, a, b in right for n in range(a, b)} - {
        n for _, a, b in wrong for n in range(a, b)
    }
    assert proof.count_bytes_by_file().get("a", 0) == len(byte)
    for start, end in pairwise(sorted(draw.sample(range(40), 8))):
        assert proof.count_verified_tensors([entry(start, end - start)]) == (
            {*range(start, end)} <= byte
        )


def test_unreadable_tensor_is_not_verified() -> None:
    proof = VerifiedBytes([("a", 0, 9)], [])
    assert (
        proof.count_verified_tensors(
            [TensorEntry.build_unreadable("w", "f", (2,), ("w",), "it is sparse")]
        )
        == 0
    )
    assert proof.count_verified_tensors([entry(0, 9), entry(0, 10)]) == 1
    assert VerifiedBytes([], []).count_verified_tensors([entry(3, 0)]) == 1


@pytest.mark.parametrize("listed", [False, True])
def test_tensor_with_wrong_checksum_is_not_verified(tiny_llama3_hf, tmp_path, listed) -> None:
    """Not even where a later list of digests took the file as it was by then."""
    ckptctl.convert(tiny_llama3_hf, tmp_path / "hf", to="hf")
    whole = ckptctl.verify(tmp_path / "hf", level="full")
    assert (whole.verified_tensors, whole.tensors) == (21, 21)
    assert whole.checksum_lists == ("ckptctl.manifest.json",)
    (extent,) = formats.open_checkpoint(tmp_path / "hf").tensors["model.norm.weight"].extents
    file = tmp_path / "hf" / extent.file
    content = bytearray(file.read_bytes())
    content[extent.offset] ^= 1
    file.write_bytes(content)
    if listed:
        digest = hashlib.sha256(content).hexdigest()
        (tmp_path / "hf" / "SHA256SUMS").write_text(f"{digest}  {extent.file}\n")
    found = ckptctl.verify(tmp_path / "hf", level="full")
    assert (found.verdict, found.verified_tensors) == ("damaged", 20)
    assert found.verified_bytes is not None and whole.verified_bytes is not None
    most = found.nbytes if listed else whole.verified_bytes
    assert found.verified_bytes == most - extent.nbytes
    assert len(found.checksum_lists) == 1 + listed


def test_file_with_wrong_sha256_is_not_verified(tiny_llama3_hf, tmp_path) -> None:
    ckptctl.convert(tiny_llama3_hf, tmp_path / "hf", to="hf")
    (tmp_path / "hf" / "SHA256SUMS").write_text(f"{'0' * 64}  model.safetensors\n")
    found = ckptctl.verify(tmp_path / "hf", level="full")
    assert (found.verdict, found.verified_tensors, found.verified_bytes) == ("damaged", 0, 0)
    assert found.data == "not verified", "checksums are recorded"


def test_unreadable_checkpoint_has_no_verified_tensors(tmp_path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "__0_0.distcp").write_bytes(b"x")
    found = ckptctl.verify(tmp_path / "c", level="full")
    assert (found.verdict, found.verified_tensors, found.verified_bytes) == ("damaged", 0, 0)
    assert found.data == "not read"


def test_tensors_with_missing_elements_are_not_verified(tmp_path) -> None:
    shutil.copytree(DATA / "deepspeed" / "z1_bf16" / "ckpt", tmp_path / "c")
    whole = ckptctl.verify(tmp_path / "c", level="full")
    assert whole.verified_tensors == whole.tensors
    next(tmp_path.rglob("bf16_zero_pp_rank_1_*")).unlink()
    found = ckptctl.verify(tmp_path / "c", level="full")
    torn = {one.tensor for one in found.errors if one.tensor}
    assert torn
    assert found.verified_tensors == whole.tensors - len(torn)


def test_data_without_checksums_is_not_verifiable(tmp_path) -> None:
    """A list that names other files than those with data covers none."""
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    digest = hashlib.sha256(b"{}").hexdigest()
    for listed in (None, f"{digest}  config.json\n"):
        if listed:
            (tmp_path / "SHA256SUMS").write_text(listed)
        found = ckptctl.verify(tmp_path, level="full")
        assert (found.verdict, found.data) == ("complete", "not verifiable")


def test_nan_search_reads_data_without_comparing(tmp_path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "a.safetensors")
    for level in ("fast", "headers"):
        found = ckptctl.verify(tmp_path / "a.safetensors", level=level, nan=True)
        assert (found.data, found.bytes_read) == ("not compared", 12)
        found = ckptctl.verify(tmp_path / "a.safetensors", level=level)
        assert (found.data, found.bytes_read) == ("not read", 0)
    found = ckptctl.verify(tmp_path / "a.safetensors", level="full", nan=True)
    assert found.data == "not verifiable"


@pytest.mark.parametrize("name", ["SHA256SUMS", "a.safetensors.sha256"])
def test_checksum_lists_apply_only_to_verified_file(tmp_path, name) -> None:
    """What they say of a file beside it is nothing against this one."""
    for file in ("a", "b"):
        save_file({"w": torch.ones(3)}, tmp_path / f"{file}.safetensors")
    digest = hashlib.sha256((tmp_path / "a.safetensors").read_bytes()).hexdigest()
    (tmp_path / name).write_text(f"{digest}  a.safetensors\n{'0' * 64}  b.safetensors\n")
    found = ckptctl.verify(tmp_path / "a.safetensors", level="full")
    assert (found.verdict, found.verified_tensors) == ("complete", 1)
    assert found.checksum_lists == (name,)
    (tmp_path / name).write_text(f"{'0' * 64}  a.safetensors\n")
    found = ckptctl.verify(tmp_path / "a.safetensors", level="full")
    assert (found.verdict, found.verified_tensors, found.verified_bytes) == ("damaged", 0, 0)


def test_added_checksum_list_is_compared_with_file(tmp_path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "a.safetensors")
    ckptctl.verify(tmp_path / "a.safetensors", level="full", manifest=True)
    assert ckptctl.verify(tmp_path / "a.safetensors", level="full").verified_tensors == 1
    with pytest.raises(RefusedError) as refused:
        ckptctl.verify(tmp_path / "a.safetensors", level="full", manifest=True)
    assert "a.safetensors --level full`" in str(refused.value.hint)
    list_ = tmp_path / "a.safetensors.sha256"
    list_.write_text(f"SHA256 (a.safetensors) = {list_.read_text()[:64]}\n")
    found = ckptctl.verify(tmp_path / "a.safetensors", level="full")
    assert (found.verdict, found.verified_tensors, len(found.warnings)) == ("complete", 0, 1)
