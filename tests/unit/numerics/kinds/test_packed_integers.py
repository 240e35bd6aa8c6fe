"""Integers of every width, unpacked from words, beside arithmetic on whole numbers."""

from __future__ import annotations

import pytest
import torch

from ckptctl.numerics.kinds.packed_integers import unpack_integers


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 31, 32, 77, 96])
def test_integers_of_every_width_are_unpacked(bits: int, count: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, count), generator=torch.manual_seed(bits))
    rows = []
    for row in codes.tolist():
        whole = sum(code << (bits * place) for place, code in enumerate(row))
        data = bytearray(whole.to_bytes(4 * -(-count * bits // 32), "little"))
        rows.append(torch.frombuffer(data, dtype=torch.int32))
    words = torch.stack(rows)
    assert torch.equal(unpack_integers(words, bits, 1)[:, :count], codes)
    assert torch.equal(unpack_integers(words.T.contiguous(), bits, 0)[:count], codes.T)


def test_slice_of_wider_rows_is_unpacked() -> None:
    words = torch.randint(-(1 << 31), 1 << 31, (4, 12), generator=torch.manual_seed(0))
    words = words.to(torch.int32)
    for bits in (4, 8):
        whole = unpack_integers(words, bits, 1)
        each = 32 // bits
        assert torch.equal(unpack_integers(words[:, 4:8], bits, 1), whole[:, 4 * each : 8 * each])
