"""CRC-32 checksums, their combination for adjacent blocks, and digests of git and the Hub.

Intel's ISA-L computes CRC-32 ten times faster than most builds of zlib (54 and 4 GB/s on one core),
which makes it cheap enough to checksum every tensor.

Appending *n* zero bytes multiplies the CRC's polynomial by x^(8n) modulo the CRC polynomial, a
linear map on 32 bits; zlib's ``crc32_combine`` (``crc32.c``) does the same.

The digests by which git and the Hugging Face Hub identify files are the SHA-1 of ``blob``, the size
and the content (gitglossary(7), "object identifier"), and the SHA-256 of the content (git-lfs,
``docs/spec.md``). ``huggingface_hub/utils/_verification.py`` distinguishes them in the same way.
"""

from __future__ import annotations

import re
import threading
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

from ckptctl.storage.files import SourceFiles
from ckptctl.storage.threads import Advance

if TYPE_CHECKING:
    from hashlib import _Hash

WINDOW_BYTES = 1 << 20
_local = threading.local()
GIT_PREFIX = "git-"
ALGORITHMS = {64: "sha256", 40: f"{GIT_PREFIX}sha1"}
_HEXADECIMAL = re.compile(r"[0-9a-f]+")

try:
    from isal.isal_zlib import crc32 as _fast
except ImportError:
    _fast = zlib.crc32

crc32: Callable[..., int] = _fast
"""Fastest available CRC-32 function, called as ``crc32(data, value=0)`` like :func:`zlib.crc32`."""

POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def combine_crcs(crc1: int, crc2: int, len2: int) -> int:
    """Return the CRC-32 of two adjacent blocks, given their CRCs and the size of the second."""
    t0, t1, t2, t3, t4, t5, t6, t7 = _build_tables(len2)
    return (
        t0[crc1 & 15]
        ^ t1[crc1 >> 4 & 15]
        ^ t2[crc1 >> 8 & 15]
        ^ t3[crc1 >> 12 & 15]
        ^ t4[crc1 >> 16 & 15]
        ^ t5[crc1 >> 20 & 15]
        ^ t6[crc1 >> 24 & 15]
        ^ t7[crc1 >> 28]
        ^ crc2
    )


def _multiply_polynomials(a: int, b: int) -> int:
    """Multiply two polynomials modulo the CRC polynomial (bit 31 is the coefficient of x^0)."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ POLYNOMIAL if b & 1 else b >> 1
    return product


_POWERS = tuple(
    accumulate(range(63), lambda power, _: _multiply_polynomials(power, power), initial=1 << 23)
)
"""Powers x^(8·2^k) modulo the CRC polynomial for k = 0 .. 63, which append 2^k zero bytes."""


@lru_cache(maxsize=4096)
def _build_tables(nbytes: int) -> tuple[tuple[int, ...], ...]:
    """Build one lookup table per hex digit of a CRC, to append *nbytes* zero bytes to the data."""
    operator = _ONE
    for bit, power in enumerate(_POWERS):
        if nbytes >> bit & 1:
            operator = _multiply_polynomials(power, operator)
    columns = [0] * 32
    for bit in range(31, -1, -1):
        columns[bit] = operator
        operator = operator >> 1 ^ POLYNOMIAL if operator & 1 else operator >> 1
    tables = []
    for first in range(0, 32, 4):
        sums = [0]
        for column in columns[first : first + 4]:
            sums += [value ^ column for value in sums]
        tables.append(tuple(sums))
    return tuple(tables)


def find_digest_algorithm(digest: str) -> str | None:
    """Guess the hash algorithm of a hex digest from its length, or return None if unknown."""
    return ALGORITHMS.get(len(digest)) if _HEXADECIMAL.fullmatch(digest) else None


def create_hasher(algorithm: str, size: int) -> _Hash:
    """Create a hash object of ``git-sha1`` or a :mod:`hashlib` algorithm.

    *size* is the size of the file in bytes, which ``git-sha1`` hashes first.
    """
    import hashlib  # with OpenSSL, which `ckptctl inspect` should not wait for

    hash_object = hashlib.new(algorithm.removeprefix(GIT_PREFIX), usedforsecurity=False)
    if algorithm.startswith(GIT_PREFIX):
        hash_object.update(b"blob %d\0" % size)
    return hash_object


def is_digest_of(digest: str, content: bytes) -> bool:
    """Return whether *digest* is the SHA-256 or git blob SHA-1 of *content*."""
    algorithm = find_digest_algorithm(digest)
    if algorithm is None:
        return False
    hash_object = create_hasher(algorithm, len(content))
    hash_object.update(content)
    return hash_object.hexdigest() == digest


def iterate_windows(
    files: SourceFiles, file: str, offset: int, nbytes: int, advance: Advance | None = None
) -> Iterator[memoryview]:
    """Yield the bytes of a file range in windows. A window is valid until the next one.

    *advance* is called with the number of bytes of each window.
    """
    buffer: memoryview | None = getattr(_local, "buffer", None)
    if buffer is None or len(buffer) != WINDOW_BYTES:
        buffer = _local.buffer = memoryview(bytearray(WINDOW_BYTES))
    for start in range(0, nbytes, len(buffer)):
        view = buffer[: nbytes - start]
        files.readv(file, [view], offset + start)
        yield view
        if advance:
            advance(len(view))


def compute_crc(
    files: SourceFiles, file: str, offset: int, nbytes: int, advance: Advance | None = None
) -> int:
    """Compute the CRC-32 of a byte range of a file.

    *advance* is called with the number of bytes read since the last call.
    """
    crc = 0
    for view in iterate_windows(files, file, offset, nbytes, advance):
        crc = crc32(view, crc)
    return crc
