"""Combined checksums against zlib's own."""

import random
import zlib

from hypothesis import given
from hypothesis import strategies as st

from ckptctl.storage.crc import combine_crcs


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_combine_matches_crc_of_concatenation(first, second):
    assert combine_crcs(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(
        first + second
    )


def test_combine_matches_crc_of_long_blocks():
    first, second = random.Random(0).randbytes(100_001), bytes(3_000_000)
    assert combine_crcs(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(
        first + second
    )


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 1 << 40), min_size=2, max_size=2))
def test_combine_adds_lengths_beyond_memory(crc, lengths):
    a, b = lengths
    assert combine_crcs(combine_crcs(crc, 0, a), 0, b) == combine_crcs(crc, 0, a + b)
