"""What a trainer keeps beside the model: of the first rank, and of others where they differ.

Source: ``deepspeed/runtime/engine.py`` (``save_checkpoint``): at stage 3 every rank writes model
states with the ``client_state`` that it was given.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckptctl.catalog import Blob, TensorEntry
from ckptctl.formats.deepspeed.states import INDEX, ModelState
from ckptctl.formats.shared.rank_merge import same_value
from ckptctl.formats.shared.structure import below_rank, join, kept_apart
from ckptctl.formats.torch_file import Leaves
from ckptctl.storage.compare import WINDOW, equal
from ckptctl.storage.files import SourceFiles

OPTIMIZER = "optimizer"
_COUNTERS = {"float32": "<f", "int64": "<q", "int32": "<i"}


def rest_of(model: ModelState) -> dict[str, object]:
    """Return what model states hold besides the model; no optimizer where it is elsewhere."""
    rest = {key: value for key, value in model.content.items() if key not in INDEX}
    if rest.get(OPTIMIZER, model) is None:
        del rest[OPTIMIZER]
    return rest


def add_other_ranks(
    found: Leaves, models: Sequence[ModelState], model: ModelState, files: SourceFiles
) -> None:
    """Add leaves of other ranks that are not what *found* has, under names of their own.

    Args:
        found: Leaves of *model*.
        models: Model states of all ranks.
        model: Those of the first.
        files: The checkpoint's files.

    Raises:
        DamagedError: Two leaves have one name.
    """
    differing: list[str] = []
    for rank, other in enumerate(models):
        if other is model or other.absent:
            continue
        theirs = Leaves()
        theirs.add(rest_of(other), (), other.file, str(files.root / other.file))
        for leaf in _own(found, theirs, files):
            path = below_rank(rank, leaf.path)
            found.put(replace(leaf, name=join(path), path=path))
            differing.append(leaf.name)
    found.notes += kept_apart(differing)


def _own(found: Leaves, theirs: Leaves, files: SourceFiles) -> Iterator[TensorEntry | Blob]:
    for name, blob in theirs.blobs.items():
        known = found.blobs.get(name)
        if known is None or not same_value(known.value, blob.value):
            yield blob
    for name, entry in theirs.tensors.items():
        first = found.tensors.get(name)
        if first is None or not _same(first, entry, files):
            yield entry


def _same(one: TensorEntry, other: TensorEntry, files: SourceFiles) -> bool:
    """Whether two tensors are equal; large ones only by checksums."""
    crcs = one.extents[0].crc32, other.extents[0].crc32
    if None not in crcs:
        return (one.dtype, one.shape, crcs[0]) == (other.dtype, other.shape, crcs[1])
    return max(one.nbytes, other.nbytes) <= WINDOW and equal(files, one, other)


def other_steps(found: Leaves, files: SourceFiles) -> Iterator[str]:
    """Yield a note where the optimizer has done another number of steps than the model's file says.

    That is one save's file beside another's, or an optimizer that was started anew.
    """
    done, skipped = (_counted(found, name) for name in ("global_steps", "skipped_steps"))
    if done is None:
        return
    expected = done - (skipped or 0)
    for name, entry in found.tensors.items():
        if not name.endswith(".step") or entry.shape or entry.dtype not in _COUNTERS:
            continue
        extent = entry.extents[0]
        stored = files.read(extent.file, extent.offset, extent.nbytes)
        (steps,) = struct.unpack(_COUNTERS[entry.dtype], stored)
        if steps != expected:
            yield (
                f"the optimizer has done {steps:g} steps, the model's file says {expected}: "
                "they are of different saves unless the optimizer was started anew"
            )
        return


def _counted(found: Leaves, name: str) -> int | None:
    blob = found.blobs.get(name)
    return blob.value if blob and type(blob.value) is int else None
