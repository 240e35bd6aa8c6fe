"""Leaves that are no tensors: read from a checkpoint, put where the user has them."""

from __future__ import annotations

import io
import pathlib
import pickle
import pickletools
import re
import zipfile
from collections import deque
from collections.abc import Collection, MutableMapping, MutableSequence, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch

from ckptctl.catalog import Path as Keys
from ckptctl.errors import CkptError, DamagedError, UnsafePickleError, UsageError
from ckptctl.formats.shared.value_bytes import value_bytes
from ckptctl.ops.loading.leftovers import held_as, kept_apart
from ckptctl.ops.loading.state_mapping import StateMapping
from ckptctl.storage.files import SourceFiles

NUMBERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "float32", "float64", "complex64", "complex128")
TEXT_AND_TIMES = ("U1", "S1", "datetime64", "timedelta64")
FORBIDDEN = re.compile(r"(Unsupported global:|Trying to load unsupported) GLOBAL \S+")
BEFORE_ZIPS = 4
"""Pickles at the begin of what torch saved before it made zips: the last one is the object."""
PATH_MODULES = ("pathlib", "pathlib._local")
PATHS = (pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path()))


def read_values(
    mapping: StateMapping,
    values: Collection[str],
    rank: int,
    *,
    trusted: bool,
) -> dict[str, object]:
    """Return what the checkpoint has for each of the state's leaves that are no tensors.

    Args:
        mapping: How the checkpoint becomes the state.
        values: Names of the leaves of the state.
        rank: Whose value is preferred where every rank has its own.
        trusted: Whether they may run code when they are unpickled.

    Raises:
        UnsafePickleError: A leaf needs a class that is not known to be harmless.
        CkptError: One cannot be read; see :func:`unpickled`.
    """
    found: dict[str, object] = {}
    catalog = mapping.catalog
    with SourceFiles(catalog.root) as opened:
        for name, held in held_names(mapping, values, rank).items():
            blob = catalog.blobs[held]
            where = f"{catalog.root}/{blob.file}" if blob.file else catalog.path
            content = io.BytesIO(value_bytes(opened, blob))
            found[name] = unpickled(content, blob.name, where, trusted=trusted)
    return found


def held_names(mapping: StateMapping, values: Collection[str], rank: int) -> dict[str, str]:
    """Return the name in the checkpoint of each leaf of the state that it has.

    Args:
        mapping: See :func:`read_values`.
        values: See there.
        rank: See there.
    """
    apart = kept_apart(mapping.catalog) if values and rank else ()
    found = {name: held_as(mapping, name, rank, values, apart) for name in values}
    return {name: held for name, held in found.items() if held is not None}


def unpickled(content: io.BytesIO, name: str, where: str, *, trusted: bool) -> object:
    """Return a leaf that is no tensor.

    Args:
        content: As ``torch.save`` has written it.
        name: The leaf.
        where: Where it lies, for errors.
        trusted: Whether it may run code when it is unpickled.

    Raises:
        UnsafePickleError: It needs a class that is not known to be harmless.
        UsageError: It is trusted, and needs a class that is not installed.
        DamagedError: It cannot be read.
    """
    allowed = nullcontext() if trusted else torch.serialization.safe_globals(_harmless())
    try:
        with allowed:
            return torch.load(content, map_location="cpu", weights_only=not trusted)
    except Exception as error:  # damage, and with trust the leaf's own code, raise what they like
        raise _failure(error, content, name, where, trusted=trusted) from None


def _failure(
    error: Exception, content: io.BytesIO, name: str, where: str, *, trusted: bool
) -> CkptError:
    """Return what it means that a leaf cannot be unpickled."""
    said = str(error)
    whole = FORBIDDEN.search(said) is not None or _is_whole(content)
    if whole and not trusted and isinstance(error, pickle.UnpicklingError):
        return UnsafePickleError(
            f"`{name}` holds objects that are not known to be harmless",
            where=where,
            why=_reason(said),
            hint="`trusted=True` loads it all the same, which can run any code",
        )
    why = f"{type(error).__name__}: {_reason(said)}"
    if whole and isinstance(error, (ImportError, AttributeError)):
        return UsageError(
            f"`{name}` needs code that is not here",
            where=where,
            why=why,
            hint="install what defines it, or load a state without that leaf",
        )
    return DamagedError(f"`{name}` cannot be read", where=where, why=why)


def _is_whole(content: io.BytesIO) -> bool:
    """Return whether the pickle of a leaf can be read to its end, whatever it asks for."""
    content.seek(0)
    try:
        if zipfile.is_zipfile(content):
            with zipfile.ZipFile(content) as stored:
                (member,) = (one for one in stored.namelist() if one.endswith("/data.pkl"))
                pickles: Sequence[bytes | io.BytesIO] = [stored.read(member)]
        else:
            content.seek(0)
            pickles = [content] * BEFORE_ZIPS
        for one in pickles:
            deque(pickletools.genops(one), maxlen=0)
    except Exception:  # zipfile and pickletools raise what they like of damage
        return False
    return True


def _reason(message: str) -> str:
    """Return what torch says is wrong, without what it advises to do about that."""
    found = FORBIDDEN.search(message)
    return found[0] if found else message.partition("\n")[0]


def _harmless() -> list[Any]:
    """Return what paths are made of, and numpy's random-number states, numbers, texts and times.

    Structured dtypes are not among them: their pickled flags can pass pointers off as numbers.
    """
    import _codecs

    # Python 3.13 has these classes in `pathlib._local`, the others in `pathlib`.
    paths = [(one, f"{module}.{one.__name__}") for one in PATHS for module in PATH_MODULES]
    try:
        import numpy
    except ImportError:
        return paths
    core = cast(Any, getattr(numpy, "_core", None) or numpy.core).multiarray
    kinds = {type(numpy.dtype(name)) for name in (*NUMBERS, *FLOATS, *TEXT_AND_TIMES)}
    return [
        *paths,
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
