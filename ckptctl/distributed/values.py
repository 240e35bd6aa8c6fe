"""Leaves that are no tensors: read from a checkpoint, put where the user has them."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, MutableMapping, MutableSequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ckptctl.catalog import Path as Keys
from ckptctl.distributed.leaves.records import require_positions
from ckptctl.distributed.leaves.safe_reader import read_leaf
from ckptctl.errors import (
    CkptError,
    DamagedError,
    FormatError,
    RefusedError,
    UnsupportedError,
    UsageError,
    listed,
)
from ckptctl.formats.shared.unknown_classes import value_bytes
from ckptctl.ops.loading.key_comparison import held_as, kept_apart
from ckptctl.ops.loading.state_mapping import StateMapping
from ckptctl.storage.files import MemoryFiles, source_files
from ckptctl.storage.zips.reader import LEGACY, read_archive

TRUST = "`trusted=True` loads it all the same, which can run any code"
LEAVE_OUT = "`strict=False` loads the rest"


class ReadValues(NamedTuple):
    """Leaves that are no tensors, by their names in the state."""

    values: Mapping[str, object]
    refused: Mapping[str, str]


def read_values(
    mapping: StateMapping,
    values: Collection[str],
    rank: int,
    *,
    trusted: bool,
    strict: bool = True,
) -> ReadValues:
    """Return the checkpoint's values of the state's leaves that are no tensors."""
    found: dict[str, object] = {}
    refused: dict[str, UnsupportedError] = {}
    catalog = mapping.catalog
    with source_files(catalog.root) as opened:
        for name, held in held_names(mapping, values, rank).items():
            blob = catalog.blobs[held]
            where = f"{catalog.root}/{blob.file}" if blob.file else catalog.path
            try:
                content = value_bytes(opened, blob)
                found[name] = unpickled(content, blob.name, where, trusted=trusted)
            except RefusedError as error:  # it lies among others, and cannot be taken out
                refused[name] = UnsupportedError(error.what, where=where, hint=LEAVE_OUT)
            except UnsupportedError as error:
                refused[name] = error
    if not trusted:
        refused |= outside(found, catalog.path)
    if strict and refused:
        raise _joined(refused, catalog.path)
    kept = {name: value for name, value in found.items() if name not in refused}
    return ReadValues(kept, {name: one.why or one.what for name, one in refused.items()})


def outside(found: Mapping[str, object], where: str) -> dict[str, UnsupportedError]:
    """Return which leaves are parts of generators' states with positions outside of them."""
    states: dict[str, dict[object, object]] = {}
    for name, value in found.items():
        state, _, part = name.rpartition(".")
        states.setdefault(state, {})[part] = value
    refused: dict[str, UnsupportedError] = {}
    for state, parts in states.items():
        try:
            require_positions(parts)
        except UnsupportedError as error:
            names = (f"{state}.{part}" if state else f"{part}" for part in parts)
            refused |= {name: _untrusted(error, name, where) for name in names}
    return refused


def _joined(refused: Mapping[str, UnsupportedError], where: str) -> UnsupportedError:
    """Return one error for all leaves that are refused."""
    errors = list(refused.values())
    if len(errors) == 1:
        return errors[0]
    reasons = dict.fromkeys(error.why or error.what for error in errors)
    return type(errors[0])(
        f"{len(errors):,} leaves are not known to be harmless: {listed(list(refused))}",
        where=where,
        why="; ".join(list(reasons)[:5]),
        hint=f"{TRUST}; {LEAVE_OUT}",
    )


def left_out_note(refused: Mapping[str, str]) -> str:
    """Return the message on leaves that stay as they were."""
    names = listed([f"{name}: {why}" for name, why in refused.items()])
    return f"leaves that are not known to be harmless were left out: {names}"


def held_names(mapping: StateMapping, values: Collection[str], rank: int) -> dict[str, str]:
    """Return the name in the checkpoint of each leaf of the state that it has."""
    apart = kept_apart(mapping.catalog) if values and rank else ()
    found = {name: held_as(mapping, name, rank, values, apart) for name in values}
    return {name: held for name, held in found.items() if held is not None}


def unpickled(content: bytes, name: str, where: str, *, trusted: bool) -> object:
    """Return a leaf that is no tensor.

    Raises:
        UnsafePickleError: It is not trusted, and holds an object of a class that is not known to
            be harmless.
        UnsupportedError: It is not trusted, and is not as known classes write it.
        UsageError: It needs code that is not installed.
        DamagedError: It cannot be read.
    """
    try:
        if trusted:
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
        if content.startswith(LEGACY):
            raise UnsupportedError("it was saved by torch before 1.6, or as torch then did")
        return read_leaf(content, where)
    except UsageError:
        raise
    except (UnsupportedError, FormatError) as error:
        raise _untrusted(error, name, where) from None
    except Exception as error:  # damage, and with trust the leaf's own code, raise what they like
        raise _failure(error, content, name, where) from None


def _untrusted(error: CkptError, name: str, where: str) -> UnsupportedError:
    """Return why a leaf is not read unless it is trusted."""
    kind = type(error) if isinstance(error, UnsupportedError) else UnsupportedError
    return kind(
        f"`{name}` is not known to be harmless",
        where=where,
        why=_said(error),
        hint=f"{TRUST}; {LEAVE_OUT}",
    )


def _said(error: Exception) -> str:
    if isinstance(error, CkptError):
        return error.what + (f": {error.why}" if error.why else "")
    return f"{type(error).__name__}: " + str(error).partition("\n")[0]


def _failure(error: Exception, content: bytes, name: str, where: str) -> CkptError:
    """Return the error for a leaf that cannot be unpickled."""
    why = _said(error)
    if isinstance(error, (ImportError, AttributeError)) and _is_whole(content):
        return UsageError(
            f"`{name}` needs code that is not here",
            where=where,
            why=why,
            hint="install what defines it, or load a state without that leaf",
        )
    return DamagedError(f"`{name}` cannot be read", where=where, why=why)


def _is_whole(content: bytes) -> bool:
    """Return whether the pickle of a leaf can be read to its end, whatever it asks for."""
    try:
        read_archive(MemoryFiles(content, Path()), "", 0, len(content), unknown="inert")
    except CkptError:
        return content.startswith(LEGACY)
    return True


def put(root: MutableMapping[str, Any], keys: Keys, value: object) -> None:
    """Replace the leaf at *keys*; containers stay the ones that they are."""
    place: Any = root
    for key in keys[:-1]:
        place = place[_own(place, key)]
    place[_own(place, keys[-1])] = value


def _own(place: MutableMapping[Any, Any] | MutableSequence[Any], key: str | int) -> Any:
    """Return the container's own key for one that paths spell as text."""
    if isinstance(place, MutableSequence) or key in place:
        return key
    return next((own for own in place if str(own) == str(key)), key)
