"""Where the items of leaves lie, and in which boxes: columns of what ``.metadata`` lists."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from operator import lt

from ckptctl.columns import BoxColumns, ExtentColumns, Vector
from ckptctl.errors import UnsupportedError, listed
from ckptctl.formats.dcp.metadata_scan import Chunks, Places
from ckptctl.formats.shared.indexes import integers
from ckptctl.storage.paths import contained
from ckptctl.storage.pickles.inert import Inert

Range = tuple[str, int, int]
"""File, first byte and number of bytes."""
Place = tuple[str, Vector | None, str, int, int]
"""Name, offsets and range of an item."""
Boxes = dict[tuple[tuple[Vector, ...], tuple[Vector, ...]], BoxColumns]
"""The boxes of tensors by their offsets and sizes: most tensors are cut like others."""


class StoredItem:
    """Where the items of one leaf lie, in the order of the pickle.

    Attributes:
        offsets: Of the boxes of those that have one.
        files: Of these.
        starts: Of these.
        lengths: Of these.
        first: The first item, with a box or without.
        extension: What all of them went through, as torch names it; empty: nothing.
    """

    __slots__ = ("extension", "files", "first", "lengths", "offsets", "starts")

    def __init__(self, first: Range, extension: str) -> None:
        self.first = first
        self.extension = extension
        self.offsets: list[Vector] = []
        self.files: list[str] = []
        self.starts: list[int] = []
        self.lengths: list[int] = []

    @property
    def columns(self) -> tuple[list[Vector], list[str], list[int], list[int]]:
        """Return all columns."""
        return self.offsets, self.files, self.starts, self.lengths


def state_of(record: object) -> Mapping[str, object]:
    """Return the attributes of a record of the metadata."""
    state = record.state if isinstance(record, Inert) else None
    if not isinstance(state, dict):
        raise TypeError(f"expected a metadata record, found {type(record).__name__}")
    return state


def chunk(fields: Mapping[str, object]) -> Chunks:
    """Return a ``ChunkStorageMetadata``."""
    return Chunks((integers(fields["offsets"]),), (integers(fields["sizes"]),))


def joined(runs: Sequence[Chunks], known: Boxes) -> BoxColumns:
    """Return the boxes of a tensor; those of one that is cut alike if there is one in *known*."""
    offsets = tuple(chain.from_iterable(run.offsets for run in runs))
    sizes = tuple(chain.from_iterable(run.sizes for run in runs))
    return known.setdefault((offsets, sizes), BoxColumns(offsets, sizes))


def located(name: str, boxes: BoxColumns, stored: StoredItem | None, where: str) -> ExtentColumns:
    """Return the extents of a tensor: its *boxes*, and where the item of each lies."""
    offsets, files, starts, lengths = stored.columns if stored else ([], [], [], [])
    if offsets == list(boxes.offsets):
        return ExtentColumns(boxes, files, starts, lengths)
    order = sorted(range(len(offsets)), key=offsets.__getitem__)
    ordered = [offsets[at] for at in order]
    places = [bisect_left(ordered, wanted) for wanted in boxes.offsets]
    missing = [
        str(box)
        for box, place in zip(boxes, places, strict=True)
        if ordered[place : place + 1] != [box.offsets]
    ]
    if missing:
        raise UnsupportedError(
            f"chunks of `{name}` are not stored in any file", where=where, why=listed(missing)
        )
    rows = [order[place] for place in places]
    return ExtentColumns(
        boxes, [files[at] for at in rows], [starts[at] for at in rows], [lengths[at] for at in rows]
    )


def stored_items(
    data: Mapping[object, object], where: str, used: list[Chunks | Places]
) -> dict[str, StoredItem]:
    """Return where the items of each leaf lie, by ``storage_data``; add its runs to *used*."""
    stored: dict[str, StoredItem] = {}
    checked: dict[str, str] = {}
    whole: list[str] = []
    for index, info in data.items():
        through = ""
        if type(info) is Places:
            used.append(info)
            places: Iterable[Place] = zip(*info, strict=True)
        else:
            place, through = _place(state_of(index), state_of(info))
            places = (place,)
        for name, offsets, file, start, length in places:
            if (own_file := checked.get(file)) is None:
                own_file = checked[file] = contained(file, where)
            if (own := stored.get(name)) is None:
                own = stored[name] = StoredItem((own_file, start, length), through)
            if own.extension != through:
                raise UnsupportedError(
                    f"the chunks of `{name}` are stored in different ways",
                    where=where,
                    why=f"some were written with the extension {through or own.extension}",
                )
            if offsets is None:
                whole.append(name)
            else:
                own.offsets.append(offsets)
                own.files.append(own_file)
                own.starts.append(start)
                own.lengths.append(length)
    apart = (_rising(own.offsets) or _rising(sorted(own.offsets)) for own in stored.values())
    if len({*whole}) < len(whole) or not all(apart):
        raise UnsupportedError("the metadata lists the storage of a chunk twice", where=where)
    return stored


def _place(key: Mapping[str, object], value: Mapping[str, object]) -> tuple[Place, str]:
    """Return where an item lies, and the extension that it went through."""
    file, offset, nbytes = value["relative_path"], value["offset"], value["length"]
    if type(file) is not str or type(offset) is not int or type(nbytes) is not int:
        raise TypeError(f"the storage of `{key['fqn']}` is not a file range")
    if offset < 0 or nbytes < 0:
        raise ValueError(f"the storage of `{key['fqn']}` has a negative range")
    offsets = None if key.get("offset") is None else integers(key["offset"])
    through = value.get("transform_descriptors")
    descriptors = through if isinstance(through, list | tuple) else ()
    if any(type(one) is not str for one in descriptors):
        raise TypeError(f"an extension of `{key['fqn']}` has no name")
    return (str(key["fqn"]), offsets, file, offset, nbytes), ", ".join(map(str, descriptors))


def _rising(offsets: Sequence[Vector]) -> bool:
    return all(map(lt, offsets, islice(offsets, 1, None)))
