"""Registry of formats, discovered in this package and by ``ckptctl.formats`` entry points.

A module in this package that defines a :class:`~ckptctl.formats.base.Format` called ``FORMAT`` is
registered automatically.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING

from ckptctl import installed
from ckptctl.catalog import Catalog
from ckptctl.errors import (
    FormatError,
    SourceNotFoundError,
    UsageError,
    find_nearest,
    format_command,
    quote_names,
    spell_option,
)
from ckptctl.formats import checksums, foreign
from ckptctl.formats.base import AS_IT_IS, Format, Listing, ReadOptions, WritableFormat
from ckptctl.formats.shared.findings import of_error, weighed
from ckptctl.storage.paths import expand_home, path_hint, resolve_source_path
from ckptctl.storage.sources import raise_changed_if, read_identity, require_same_file
from ckptctl.storage.urls import to_path_text
from ckptctl.storage.writing import LOCK_NAME, find_unfinished_error
from ckptctl.tree import TreePath
from ckptctl.units import pluralize, to_natural_key

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "ckptctl.formats"
LOOKED_AT = 200
_DIGITS = re.compile("[0-9]+")
NO_MODEL = re.compile(r"optim(izer)?s?(_\d+)?|extra_state")
PART = re.compile(r"(pytorch_)?model(_fsdp)?(_\d+)?|optim(izer)?s?(_\d+)?")
"""Folders of accelerate, ByteCheckpoint and veScale, each with one part of a checkpoint."""


@cache
def builtin() -> dict[str, Format]:
    """Import this package's formats and return them by name."""
    found: dict[str, Format] = {}
    for module in pkgutil.iter_modules(__path__):
        name = f"{__name__}.{module.name}"
        try:
            candidate = getattr(importlib.import_module(name), "FORMAT", None)
        except Exception as error:
            raise UsageError(
                f"cannot load module `{name}`",
                why=f"{type(error).__name__}: {error}",
                hint="fix or remove the module",
            ) from error
        if isinstance(candidate, Format):
            found[candidate.name] = candidate
    return dict(sorted(found.items()))


@cache
def entry_points() -> dict[str, EntryPoint]:
    """Return entry points by format name, without loading them."""
    return installed.entry_points(ENTRY_POINTS)


@cache
def load_added(name: str) -> Format:
    """Load the format of the entry point called *name*."""
    return installed.load_entry_point(entry_points()[name], Format)  # type: ignore[type-abstract]


def package_of(name: str) -> str | None:
    """Return the package whose entry point defines the format *name*, or None."""
    point = entry_points().get(name)
    return installed.find_package(point) if point else None


def added() -> dict[str, Format]:
    """Load the formats of installed packages, by name. Built-in names take precedence."""
    known = builtin()
    return {n: load_added(n) for n in sorted(entry_points()) if n not in known}


def registered() -> dict[str, Format]:
    """Return all formats by name, with built-in ones first."""
    return {**builtin(), **added()}


def names() -> tuple[str, ...]:
    """Return the names of the built-in formats, which are all readable."""
    return tuple(builtin())


def other_names() -> dict[str, str]:
    """Map other names of formats, and of programs that use them, to the built-in formats."""
    return {other: name for name, known in builtin().items() for other in known.other_names}


def writable() -> tuple[str, ...]:
    """Return the names of the built-in formats that can be written."""
    return tuple(name for name, found in builtin().items() if isinstance(found, WritableFormat))


def get(name: str) -> Format:
    """Return the format called *name*, or raise UsageError."""
    found = builtin().get(name) or registered().get(name)
    if found is None:
        close = find_nearest(name.lower(), names())
        raise UsageError(
            f"unknown format `{name}`",
            why=f"none of the {len(names())} known formats has this name",
            hint=(f"did you mean `{close}`? " if close else "") + "see `ckptctl formats`",
        )
    return found


def target(name: str) -> WritableFormat:
    """Return the format called *name*, or raise UsageError if it cannot be written."""
    found = get(name)
    if not isinstance(found, WritableFormat):
        raise UsageError(
            f"`{name}` cannot be written", why=f"writable formats: {', '.join(writable())}"
        )
    return found


def sniff(path: TreePath) -> dict[str, str]:
    """Return all formats that match *path*, each with its evidence."""
    listing = Listing(path)
    for known in (builtin, added) if listing.is_folder or path.is_file() else ():
        asked = {
            name: candidate
            for name, candidate in known().items()
            if not candidate.marks or any(map(candidate.marks.match, listing.names))
        }
        if sniffed := recognizing(asked, listing):
            return sniffed
    return {}


def recognizing(asked: Mapping[str, Format], listing: Listing) -> dict[str, str]:
    """Run the sniffers of *asked*, each after those of the formats that it yields to."""
    signs: dict[str, str | None] = {}

    def sign_of(name: str) -> str | None:
        if name not in signs:
            signs[name] = None  # in case two formats yield to each other
            yields_to = asked[name].yields_to
            rivals = [o for o in asked if o in yields_to or name in asked[o].specializes]
            if not any(map(sign_of, rivals)):
                signs[name] = asked[name].sniff(listing)
        return signs[name]

    return {name: sign for name in asked if (sign := sign_of(name))}


def interrupted(path: TreePath) -> Format | None:
    """Return the format of a save interrupted before it could be recognized, or None."""
    with suppress(PermissionError):
        listing = Listing(path)
        return next((one for one in builtin().values() if one.is_interrupted(listing)), None)
    return None


def detect(path: str | TreePath) -> Format:
    """Detect the format of *path*, or raise if there is not exactly one."""
    path = existing(path)
    return only_format(path, sniff(path))


def only_format(path: TreePath, sniffed: Mapping[str, str]) -> Format:
    """Return the only matching format, or raise an error that describes *path*."""
    part = any(one.part_names and one.part_names.fullmatch(path.name) for one in builtin().values())
    if part and path.is_file():
        what = f"`{path.name}` is one file of a checkpoint"
        raise FormatError(what, where=str(path), hint=f"pass its folder, `{path.parent}`")
    if len(sniffed) == 1:
        return get(next(iter(sniffed)))
    if sniffed:
        both = " and ".join(f"{name} ({evidence})" for name, evidence in sniffed.items())
        raise FormatError(
            "the format is ambiguous",
            where=str(path),
            why=both,
            hint=f"set the format, for example {spell_option(f'--from {next(iter(sniffed))}')}",
        )
    inside = list_run(path)
    if inside:
        raise FormatError(
            f"this is a folder of {pluralize(len(inside), 'checkpoint')}, not a checkpoint",
            where=str(path),
            why=quote_names([item.name for item in inside]),
            hint=f"pass one of them; {format_command('inspect', path)} shows which are complete",
        )
    problem = find_unfinished_error(path)
    if problem is None and (begun := interrupted(path)):
        return begun  # its reader reports the missing files
    raise problem or foreign.unrecognized(path, names(), below(path))


def open_checkpoint(
    path: str | TreePath,
    format: str | None = None,
    asked: ReadOptions = AS_IT_IS,
    *,
    manifest: bool | None = True,
) -> Catalog:
    """Detect the format of *path* and read its index.

    *manifest* controls whether checksums are read from the manifest next to it; with None, they are
    read only if this takes no remote request.
    """
    path = existing(path)
    opened = path, read_identity(path)
    with raise_changed_if(lambda: require_same_file(opened)):
        sniffed = {} if format else sniff(path)
        inside = None if format or sniffed else only_inside(path)
        problem = find_unfinished_error(path)
        if problem and not asked.partial:
            raise problem
        if inside:
            path, sniffed = inside, sniff(inside)
        known = get(format) if format else only_format(path, sniffed)
        strange = [
            name
            for name in ("weights", "tag", "rules", "ranks")
            if getattr(asked, name) and name not in known.choices
        ]
        if strange:
            raise UsageError(
                f"{spell_option(f'--{strange[0]}')} is not supported for `{known.name}`",
                where=str(path),
                hint=f"see `ckptctl formats {known.name}` for the options of this format",
            )
        try:
            found = known.read(path, asked)
            for special in builtin().values():
                if known.name in special.specializes:
                    found = special.refine(found, asked)
        except FormatError as error:
            if format and not error.hint:
                error.hint = "omit the format to detect it automatically"
            raise
        if manifest is not False:
            found = checksums.attach(found, needed=manifest is True)
        if problem:
            found = replace(found, findings=(of_error(problem, file=LOCK_NAME), *found.findings))
        if found.findings:
            found = replace(found, findings=weighed(found.findings))
        if inside:
            note = f"read from `{inside.name}`, the only model checkpoint in this folder"
            found = replace(found, notes=(note, *found.notes))
        return replace(found, opened=opened)


def merged_parameters(catalog: Catalog, names: Sequence[str]) -> dict[str, str]:
    """Map optimizer state of a part to the parameter in *catalog* that the part was merged into.

    The format that read the catalog is asked, and those that refined it.
    """
    found: dict[str, str] = {}
    for known in builtin().values():
        if catalog.format in (known.name, *known.specializes):
            found |= known.merged_parameters(names)
    return found


def resolve(catalog: Catalog) -> Catalog:
    """Locate the element bytes of all extents in *catalog*."""
    with raise_changed_if(lambda: require_same_file(catalog.opened)):
        return get(catalog.format).resolve(catalog)


def list_run(path: TreePath) -> list[TreePath]:
    """Return the checkpoints directly inside a folder, in natural order.

    These are directories or Lightning's ``*.ckpt`` files.
    """
    if not path.is_dir():
        return []
    shown = (item for item in path.iterdir() if not item.name.startswith("."))
    members = (item for item in shown if item.is_dir() or item.suffix == ".ckpt")
    return sorted(
        (item for item in members if sniff(item)), key=lambda item: to_natural_key(item.name)
    )


def below(path: TreePath) -> list[TreePath]:
    """Search two levels below a folder for model checkpoints, among a limited number of folders."""

    def folders(folder: TreePath) -> list[TreePath]:
        with suppress(OSError):
            inside = [item for item in folder.iterdir() if item.is_dir() and item.name[0] != "."]
            return sorted(inside, key=lambda item: to_natural_key(item.name))
        return []

    found: list[TreePath] = []
    deeper = (item for one in folders(path)[:LOOKED_AT] for item in folders(one))
    for item in islice(deeper, LOOKED_AT):
        with suppress(OSError):
            if not NO_MODEL.fullmatch(item.name) and sniff(item):
                found.append(item)
    return found


def only_inside(path: TreePath) -> TreePath | None:
    """Return the only model checkpoint directly inside a folder, or None.

    Separate optimizer directories next to it are allowed, as accelerate and ByteCheckpoint write
    them: ``pytorch_model_fsdp_0/`` and ``optimizer_0/``, ``model/`` and ``optimizer/``.
    """
    models = [item for item in list_run(path) if not NO_MODEL.fullmatch(item.name)]
    if len(models) != 1:
        return None
    torn = _newer_than(models[0])
    if torn is None:
        return models[0]
    raise FormatError(
        "the newest checkpoint in this folder is not complete",
        where=str(path),
        why=f"`{torn.name}` is not recognized as a checkpoint, and `{models[0].name}` is older",
        hint=f"pass the checkpoint to read; {format_command('ls', path)} shows the problem",
    )


def _newer_than(one: TreePath) -> TreePath | None:
    """Return the newest sibling with the same name pattern and a higher number, or None."""
    kind, number = _DIGITS.sub("N", one.name), to_natural_key(one.name)
    others = (item for item in one.parent.iterdir() if _DIGITS.sub("N", item.name) == kind)
    newer = [
        item
        for item in others
        if to_natural_key(item.name) > number and (item.is_dir() or item.suffix == ".ckpt")
    ]
    return max(newer, key=lambda item: to_natural_key(item.name), default=None)


def existing(path: str | TreePath) -> TreePath:
    """Return *path* as an absolute path, or raise if it does not exist."""
    if not to_path_text(path):
        raise UsageError("the path is empty", hint="use `.` for the working directory")
    absolute = expand_home(resolve_source_path(path)).absolute()
    if not absolute.exists():
        raise SourceNotFoundError(
            "no such file or directory", where=str(path), hint=path_hint(resolve_source_path(path))
        )
    return absolute
