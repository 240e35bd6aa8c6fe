"""Pickling and unpickling of the non-tensor values of a state dict."""

from __future__ import annotations

import datetime
import io
import pickle
from collections.abc import Collection, Mapping, MutableMapping, MutableSequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
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
    quote_names,
)
from ckptctl.formats.shared.leaves import read_value_bytes
from ckptctl.save_load.loading.key_comparison import find_stored_name, list_rank_keys
from ckptctl.save_load.loading.state_mapping import StateMapping
from ckptctl.storage.files import MemoryFiles, source_files
from ckptctl.storage.zips.zip_reader import LEGACY_MAGIC, read_archive
from ckptctl.storage.zstd import MemoryBudget
from ckptctl.units import pluralize

TRUST_HINT = "pass `trusted=True` to load it anyway, which can run any code"
SKIP_HINT = "pass `strict=False` to load the rest"
MAX_SHOWN = 100
CACHED_VALUE_BYTES = 1 << 12
"""Maximum size in bytes of a pickled value for which the result of the check is cached."""
_ALWAYS_READABLE = frozenset({type(None), bool, int, float, str})


def pickle_values(values: Mapping[str, object], *, trusted: bool) -> dict[str, bytes]:
    """Serialize non-tensor values with ``torch.save``, as DCP stores them.

    Raises:
        RefusedError: Values cannot be pickled, or could not be loaded without ``trusted=True``.
    """
    contents: dict[str, bytes] = {}
    refused: dict[str, str] = {}
    has_pickle_errors = False
    for name, value in values.items():
        try:
            contents[name] = serialize_value(value)
        except Exception as error:  # raised by the value's own code
            refused[name] = f"{type(error).__name__}: {error}"
            has_pickle_errors = True
            continue
        why = None if trusted else _explain_untrusted_failure(value, contents[name])
        if why is not None:
            refused[name] = f"it could not be loaded: {why}"
    if refused:
        raise _cannot_save_error(values, refused, has_pickle_errors=has_pickle_errors)
    return contents


def serialize_value(value: object) -> bytes:
    """Serialize one value with ``torch.save``, including the ``fold`` attribute of times."""
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=_PICKLE_MODULE)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Pickler that preserves the ``fold`` attribute of times.

    ``fold`` distinguishes the two occurrences of a time when daylight saving time ends.
    """

    def reducer_override(self, value: Any) -> Any:
        """See :class:`pickle.Pickler`."""
        folded = type(value) in (datetime.datetime, datetime.time) and value.fold
        return value.__reduce_ex__(pickle.DEFAULT_PROTOCOL) if folded else NotImplemented


_PICKLE_MODULE = SimpleNamespace(Pickler=_Pickler, __name__="pickle")
"""Pickle module for ``torch.save``, which uses :class:`_Pickler`."""


def _explain_untrusted_failure(value: object, content: bytes) -> str | None:
    """Explain why *content* cannot be loaded without ``trusted=True``, or return None if it can."""
    if type(value) in _ALWAYS_READABLE:
        return None
    explain = (
        _explain_unreadable
        if len(content) <= CACHED_VALUE_BYTES
        else _explain_unreadable.__wrapped__
    )
    kind: Any = type(value)
    return explain(kind, content)


@lru_cache(maxsize=1 << 12)
def _explain_unreadable(kind: type, content: bytes) -> str | None:
    """Explain why *content* cannot be read as an instance of *kind*, or return None if it can.

    The cache avoids reading values such as hyperparameters again at every save.
    """
    try:
        value = read_leaf(content, "the value")
    except CkptError as error:
        return _format_error(error)
    return None if type(value) is kind else f"it would be loaded as a `{type(value).__name__}`"


def _cannot_save_error(
    values: Mapping[str, object], refused: Mapping[str, str], *, has_pickle_errors: bool
) -> RefusedError:
    kinds = {name: type(values[name]) for name in refused}
    descriptions = [
        f"{name}: " + f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        for name, kind in kinds.items()
    ]
    hint = "omit them, or store their contents as numbers, strings, lists, dicts or tensors"
    if not has_pickle_errors:
        hint += "; or pass `trusted=True`, and load them with `load(trusted=True)`"
    return RefusedError(
        (quote_names(list(refused)) if len(refused) == 1 else f"{pluralize(len(refused), 'value')}")
        + " cannot be saved",
        where=quote_names(descriptions, MAX_SHOWN),
        why="; ".join(list(dict.fromkeys(refused.values()))[:MAX_SHOWN]),
        hint=hint,
    )


class LoadedValues(NamedTuple):
    """Loaded non-tensor values, and the reasons why other values were refused.

    Both are keyed by the names in the state.
    """

    values: Mapping[str, object]
    refused: Mapping[str, str]


def read_values(
    mapping: StateMapping,
    values: Collection[str],
    rank: int,
    *,
    trusted: bool,
    strict: bool = True,
) -> LoadedValues:
    """Read the non-tensor values that a rank's state requires.

    Args:
        mapping: Mapping of the checkpoint to the state.
        values: Names of the values in the state.
        rank: Rank whose values are preferred if the values of ranks differ.
        trusted: Whether unpickling may run any code.
        strict: Whether a value that is not known to be harmless is an error instead of being
            skipped.

    Raises:
        UnsupportedError: Values are not known to be harmless, and *strict* is set.
        CkptError: A value is damaged or requires code that is not installed.
    """
    loaded: dict[str, object] = {}
    refused: dict[str, UnsupportedError] = {}
    catalog, budget = mapping.catalog, MemoryBudget()
    with source_files(catalog.root) as files:
        for name, stored_name in map_to_stored_names(mapping, values, rank).items():
            blob = catalog.blobs[stored_name]
            where = f"{catalog.root}/{blob.file}" if blob.file else catalog.path
            # Decompression errors propagate, because ``trusted=True`` does not help.
            unpacked = read_value_bytes(files, blob, budget) if blob.extension else None
            try:
                content = unpacked or read_value_bytes(files, blob, budget)
                loaded[name] = unpickle_value(content, blob.name, str(where), trusted=trusted)
            except RefusedError as error:  # it is stored with other values and cannot be extracted
                refused[name] = UnsupportedError(error.what, where=where, hint=SKIP_HINT)
            except UnsupportedError as error:
                refused[name] = error
    if not trusted:
        refused |= find_invalid_positions(loaded, str(catalog.path))
    if strict and refused:
        raise _combined_error(refused, str(catalog.path))
    accepted = {name: value for name, value in loaded.items() if name not in refused}
    return LoadedValues(
        accepted, {name: failure.why or failure.what for name, failure in refused.items()}
    )


def find_invalid_positions(values: Mapping[str, object], where: str) -> dict[str, UnsupportedError]:
    """Find entries of RNG states whose position is out of range, with the error for each."""
    states: dict[str, dict[object, object]] = {}
    for name, value in values.items():
        state, _, part = name.rpartition(".")
        states.setdefault(state, {})[part] = value
    refused: dict[str, UnsupportedError] = {}
    for state, parts in states.items():
        try:
            require_positions(parts)
        except UnsupportedError as error:
            names = (f"{state}.{part}" if state else f"{part}" for part in parts)
            refused |= {name: _untrusted_value_error(error, name, where) for name in names}
    return refused


def _combined_error(refused: Mapping[str, UnsupportedError], where: str) -> UnsupportedError:
    """Combine the errors of all refused values into one."""
    errors = list(refused.values())
    if len(errors) == 1:
        return errors[0]
    reasons = dict.fromkeys(error.why or error.what for error in errors)
    return type(errors[0])(
        f"{pluralize(len(errors), 'value is', 'values are')} not known to be harmless: "
        f"{quote_names(list(refused))}",
        where=where,
        why="; ".join(list(reasons)[:5]),
        hint=f"{TRUST_HINT}; or {SKIP_HINT}",
    )


def format_skipped_values(refused: Mapping[str, str]) -> str:
    """Format the warning about skipped values, which stay unchanged in the state."""
    names = quote_names([f"{name}: {why}" for name, why in refused.items()])
    return f"skipped values that are not known to be harmless: {names}"


def map_to_stored_names(
    mapping: StateMapping, values: Collection[str], rank: int
) -> dict[str, str]:
    """Map names of non-tensor values in the state to their names in the checkpoint."""
    separate_names = list_rank_keys(mapping.catalog) if values and rank else ()
    stored_names = {
        name: find_stored_name(mapping, name, rank, values, separate_names) for name in values
    }
    return {
        name: stored_name for name, stored_name in stored_names.items() if stored_name is not None
    }


def unpickle_value(content: bytes, name: str, where: str, *, trusted: bool) -> object:
    """Unpickle a non-tensor value.

    Raises:
        UnsafePickleError: The value is not trusted, and contains an object of a class that is not
            known to be harmless.
        UnsupportedError: The value is not trusted, and contains an object of a known class that was
            pickled in a way that this class never uses.
        UsageError: The value requires code that is not installed.
        DamagedError: The value cannot be read.
    """
    try:
        if trusted:
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
        if content.startswith(LEGACY_MAGIC):
            raise UnsupportedError("it was saved in the format of torch before 1.6")
        return read_leaf(content, where)
    except UsageError:
        raise
    except (UnsupportedError, FormatError) as error:
        raise _untrusted_value_error(error, name, where) from None
    except Exception as error:  # damage and trusted code can raise anything
        raise _unpickling_error(error, content, name, where) from None


def _untrusted_value_error(error: CkptError, name: str, where: str) -> UnsupportedError:
    """Build the error for a value that is only loaded with ``trusted=True``."""
    kind = type(error) if isinstance(error, UnsupportedError) else UnsupportedError
    return kind(
        f"`{name}` is not known to be harmless",
        where=where,
        why=_format_error(error),
        hint=f"{TRUST_HINT}; or {SKIP_HINT}",
    )


def _format_error(error: Exception) -> str:
    if isinstance(error, CkptError):
        return error.summary
    return f"{type(error).__name__}: " + str(error).partition("\n")[0]


def _unpickling_error(error: Exception, content: bytes, name: str, where: str) -> CkptError:
    """Build the error for a value that cannot be unpickled."""
    why = _format_error(error)
    if isinstance(error, (ImportError, AttributeError)) and _is_complete_pickle(content):
        return UsageError(
            f"`{name}` requires code that is not installed",
            where=where,
            why=why,
            hint="install the package that defines it, or load a state without that value",
        )
    return DamagedError(f"`{name}` cannot be read", where=where, why=why)


def _is_complete_pickle(content: bytes) -> bool:
    """Return whether the pickle of a value can be parsed to its end.

    The classes that the pickle refers to need not be installed.
    """
    try:
        read_archive(MemoryFiles(content, Path()), "", 0, len(content), unknown="inert")
    except CkptError:
        return content.startswith(LEGACY_MAGIC)
    return True


def replace_leaf(root: MutableMapping[str, Any], keys: Keys, value: object) -> None:
    """Replace the leaf at *keys* in place, without replacing the containers on the path to it."""
    container: Any = root
    for key in keys[:-1]:
        container = container[_find_container_key(container, key)]
    container[_find_container_key(container, keys[-1])] = value


def _find_container_key(
    container: MutableMapping[Any, Any] | MutableSequence[Any], key: str | int
) -> Any:
    """Return the existing key of *container* that equals *key*, if necessary as a string.

    Return *key* itself if there is no such key.
    """
    if isinstance(container, MutableSequence) or key in container:
        return key
    return next((existing_key for existing_key in container if str(existing_key) == str(key)), key)
