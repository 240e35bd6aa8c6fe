"""``ckptctl.manifest.json``: what an output holds, with a checksum for every box of every tensor.

The schema is published in ``docs/reference/manifest.md``. It names no machine, user or time, so
that equal inputs and options give equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from ckptctl import __version__, dtypes
from ckptctl.errors import RefusedError
from ckptctl.formats.base import OutputTensor, Place
from ckptctl.formats.checksums import MANIFEST, SCHEMA
from ckptctl.planner.plan import CrcOf, OutputFile, Record


def manifest(
    head: Mapping[str, object],
    tensors: Sequence[OutputTensor],
    boxes: Mapping[str, Sequence[Place]],
    records: Sequence[Record],
) -> OutputFile:
    """Return the manifest as an output file whose checksums are filled in at the end.

    Args:
        head: Provenance: source, plan digest, ...
        tensors: What was written.
        boxes: For each tensor its boxes and records.
        records: All records.
    """

    def content(crc_of: CrcOf) -> Iterator[bytes]:
        whole = {"schema": SCHEMA, "ckptctl": __version__, **head, "tensors": {}}
        before, _, after = json.dumps(whole, indent=1, ensure_ascii=False).rpartition("{}")
        listed = {t.name: t for t in tensors}.values()
        begin = before + "{"
        for tensor in listed:
            found = _tensor(tensor, boxes.get(tensor.name, ()), records, crc_of)
            yield _encoded(f"{begin}\n  {_text(tensor.name)}: {found}", tensor.name)
            begin = ","
        yield (("\n }" if listed else begin + "}") + after + "\n").encode()

    def frame(crc_of: CrcOf) -> Iterator[tuple[int, bytes]]:
        yield 0, b"".join(content(crc_of))

    return OutputFile(MANIFEST, sum(map(len, content(lambda _: 0))), frame)


def _encoded(text: str, name: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise RefusedError(
            "a name is no text",
            where=f"tensor `{name}`",
            why="it holds half of a surrogate pair, which no manifest can hold",
            hint="`--no-checksum` writes none; `--exclude` leaves the tensor out",
        ) from None


def _tensor(
    tensor: OutputTensor,
    boxes: Sequence[Place],
    records: Sequence[Record],
    crc_of: CrcOf,
) -> str:
    members = {
        "dtype": _text(tensor.dtype),
        "shape": _numbers(tensor.shape, 4),
        **({"alias_of": _text(tensor.alias_of)} if tensor.alias_of else {}),
        "chunks": _indented(
            "[",
            [
                _chunk(place, records[place.record], dtypes.itemsize(tensor.dtype), crc_of)
                for place in boxes
            ],
            "]",
            4,
        ),
    }
    return _members(members, 3)


def _chunk(place: Place, record: Record, itemsize: int, crc_of: CrcOf) -> str:
    """Describe one box; where a record holds several, its checksum is that of none of them."""
    box = place.box
    whole = record.nbytes == box.numel * itemsize
    members = {
        "offsets": _numbers(box.offsets, 6),
        "sizes": _numbers(box.sizes, 6),
        "file": _text(record.file),
        "offset": str(record.offset + place.start * itemsize),
        **({"crc32": f'"{crc_of(place.record):08x}"'} if whole else {}),
    }
    return _members(members, 5)


# The text is that of ``json.dumps(indent=1)``, which takes ten times as long.


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


@lru_cache(maxsize=4096)
def _numbers(values: tuple[int, ...], depth: int) -> str:
    return _indented("[", [str(value) for value in values], "]", depth)


def _members(found: Mapping[str, str], depth: int) -> str:
    return _indented("{", [f'"{name}": {value}' for name, value in found.items()], "}", depth)


def _indented(begin: str, items: Sequence[str], end: str, depth: int) -> str:
    if not items:
        return begin + end
    line = "\n" + " " * depth
    return begin + line + f",{line}".join(items) + line[:-1] + end
