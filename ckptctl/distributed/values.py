"""Leaves that are no tensors: read from a checkpoint, put where the user has them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, MutableMapping, MutableSequence
from contextlib import nullcontext
from typing import Any, cast

import torch

from ckptctl.catalog import Blob, Catalog
from ckptctl.catalog import Path as Keys
from ckptctl.distributed.state import Value
from ckptctl.errors import UnsafePickleError
from ckptctl.formats.value_bytes import value_bytes
from ckptctl.ops.leftovers import held_as
from ckptctl.ops.state_mapping import StateMapping
from ckptctl.storage.files import SourceFiles

NUMBERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "float32", "float64")


def read_values(
    mapping: StateMapping, values: Mapping[str, Value], rank: int, *, trusted: bool
) -> dict[str, object]:
    """Return what the checkpoint has for each of the state's leaves that are no tensors.

    Args:
        mapping: How the checkpoint becomes the state.
        values: The leaves of the state, by name.
        rank: Whose value is preferred where every rank has its own.
        trusted: Whether they may run code when they are unpickled.

    Raises:
        UnsafePickleError: A leaf needs a class that is not known to be harmless.
    """
    found: dict[str, object] = {}
    catalog = mapping.catalog
    with SourceFiles(catalog.root) as files:
        for name in values:
            held = held_as(mapping, name, rank)
            if held is not None:
                found[name] = _value(catalog, files, catalog.blobs[held], trusted)
    return found


def _value(catalog: Catalog, files: SourceFiles, blob: Blob, trusted: bool) -> object:
    content = io.BytesIO(value_bytes(files, blob))
    allowed = nullcontext() if trusted else torch.serialization.safe_globals(_harmless())
    try:
        with allowed:
            return torch.load(content, map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:
        raise UnsafePickleError(
            f"`{blob.name}` holds objects that are not known to be harmless",
            where=f"{catalog.root}/{blob.file}" if blob.file else catalog.path,
            why=str(error).partition("\n")[0],
            hint="`trusted=True` loads it all the same, which can run any code",
        ) from None


def _harmless() -> list[Any]:
    """Return what numpy's random-number states and numbers are made of."""
    import _codecs

    try:
        import numpy
    except ImportError:
        return []
    core = cast(Any, getattr(numpy, "_core", None) or numpy.core).multiarray
    kinds = {type(numpy.dtype(name)) for name in (*NUMBERS, *FLOATS)}
    return [
        core._reconstruct,
        core.scalar,
        numpy.ndarray,
        numpy.dtype,
        _codecs.encode,
        *kinds,
    ]


def put(root: MutableMapping[str, Any], keys: Keys, value: object) -> None:
    """Replace the leaf at *keys*; containers stay the ones that they are.

    Args:
        root: A nested state dict.
        keys: Keys as text, and positions in lists, from the root down to the leaf.
        value: The new leaf.
    """
    place: Any = root
    for key in keys[:-1]:
        place = place[_own(place, key)]
    place[_own(place, keys[-1])] = value


def _own(place: MutableMapping[Any, Any] | MutableSequence[Any], key: str | int) -> Any:
    """Return the key that a container itself has for what paths spell as text."""
    if isinstance(place, MutableSequence) or key in place:
        return key
    return next((own for own in place if str(own) == str(key)), key)
