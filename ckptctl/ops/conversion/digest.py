"""One number for a plan: equal digests, of equal sources, mean equal outputs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from ckptctl.catalog import Computed
from ckptctl.planner.plan import Check, OutputFile, RawCopy, Record, Transfer


def digest_of(
    checksum: bool,
    files: Sequence[OutputFile],
    records: Sequence[Record],
    transfers: Sequence[Transfer],
    raw_copies: Sequence[RawCopy],
    contents: Mapping[str, bytes],
    computed: Mapping[str, Computed],
    checks: Sequence[Check] = (),
) -> str:
    """Return the hexadecimal SHA-256 of what decides an output's bytes, the sources' own apart.

    Args:
        checksum: Whether records carry checksums.
        files: Names and sizes.
        records: Where each box goes.
        transfers: What each box is made of.
        raw_copies: What is copied unchanged; the directories that it comes from do not count.
        contents: Files that are written from memory.
        computed: The virtual files that transfers read; directories do not count here either.
        checks: What is read for its checksum alone; the same holds for its directories.
    """
    found = hashlib.sha256(repr(checksum).encode())
    for file in files:
        found.update(repr((file.path, file.size)).encode())
    for item in (*records, *transfers):
        found.update(repr(item).encode())
    for raw in raw_copies:
        place = (raw.source, raw.offset, raw.nbytes, raw.target, raw.target_offset)
        found.update(repr(place).encode())
    for name, content in contents.items():
        found.update(repr((name, len(content))).encode() + content)
    for virtual, one in computed.items():
        inputs = [(key, made_of.entry) for key, made_of in one.inputs.items()]
        how = (virtual, one.kind, one.dtype, one.shape, inputs, list(one.parameters.items()))
        found.update(repr(how).encode())
    for check in checks:
        found.update(repr((check.file, check.offset, check.nbytes, check.crc32)).encode())
    return found.hexdigest()
