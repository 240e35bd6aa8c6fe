"""``ckptctl.manifest.json``: what an output holds, with a checksum for every box of every tensor.

The schema is published in ``docs/reference/manifest.md``. It names no machine, user or time, so
that equal inputs and options give equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from ckptctl import __version__, dtypes
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

    def content(crc_of: CrcOf) -> bytes:
        listed = {t.name: _tensor(t, boxes.get(t.name, ()), records, crc_of) for t in tensors}
        whole = {"schema": SCHEMA, "ckptctl": __version__, **head, "tensors": listed}
        return json.dumps(whole, indent=1, ensure_ascii=False).encode() + b"\n"

    def frame(crc_of: CrcOf) -> Iterator[tuple[int, bytes]]:
        yield 0, content(crc_of)

    return OutputFile(MANIFEST, len(content(lambda _: 0)), frame)


def _tensor(
    tensor: OutputTensor,
    boxes: Sequence[Place],
    records: Sequence[Record],
    crc_of: CrcOf,
) -> dict[str, object]:
    return {
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        **({"alias_of": tensor.alias_of} if tensor.alias_of else {}),
        "chunks": [
            _chunk(place, records[place.record], dtypes.itemsize(tensor.dtype), crc_of)
            for place in boxes
        ],
    }


def _chunk(place: Place, record: Record, itemsize: int, crc_of: CrcOf) -> dict[str, object]:
    """Describe one box; where a record holds several, its checksum is that of none of them."""
    box = place.box
    whole = record.nbytes == box.numel * itemsize
    return {
        "offsets": list(box.offsets),
        "sizes": list(box.sizes),
        "file": record.file,
        "offset": record.offset + place.start * itemsize,
        **({"crc32": f"{crc_of(place.record):08x}"} if whole else {}),
    }
