"""Registry of the built-in formats, and of formats from ``ckptctl.formats`` entry points.

Every module in this package that defines ``FORMAT``, an instance of
:class:`~ckptctl.formats.base.Format`, is registered automatically, and so is ``OTHER_FOLDER``, a
:class:`~ckptctl.formats.base.OtherFolder` that is not a checkpoint.
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
from types import ModuleType
from typing import TYPE_CHECKING

from ckptctl import installed
from ckptctl.catalog import Catalog
from ckptctl.errors import (
    FormatError,
    SourceNotFoundError,
    UsageError,
    find_nearest,
    format_command,
    format_option,
    quote_names,
)
from ckptctl.formats import checksums, foreign
from ckptctl.formats.base import (
    DEFAULT_READ_OPTIONS,
    Format,
    Listing,
    OtherFolder,
    ReadOptions,
    RecordedFacts,
    WritableFormat,
)
from ckptctl.formats.shared.findings import downgrade_unproven_findings, finding_from_error
from ckptctl.formats.sidecar_files import list_trainer_files
from ckptctl.storage.paths import build_path_hint, expand_home, resolve_source_path
from ckptctl.storage.sources import raise_changed_if, read_identity, require_same_file
from ckptctl.storage.urls import to_path_text
from ckptctl.storage.writing import LOCK_NAME, find_unfinished_error
from ckptctl.tree import TreePath
from ckptctl.units import pluralize, to_natural_key

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "ckptctl.formats"
MAX_FOLDERS_SCANNED = 200
_DIGITS = re.compile("[0-9]+")
NON_MODEL_FOLDER = re.compile(r"optim(izer)?s?(_\d+)?|extra_state")
PART_FOLDER = re.compile(r"(pytorch_)?model(_fsdp)?(_\d+)?|optim(izer)?s?(_\d+)?")
"""Names of model and optimizer folders of accelerate, ByteCheckpoint and veScale."""


@cache
def load_builtin_formats() -> dict[str, Format]:
    """Import all modules of this package, and map format names to the formats they define."""
    candidates = (getattr(module, "FORMAT", None) for module in _import_modules())
    formats = {item.name: item for item in candidates if isinstance(item, Format)}
    return dict(sorted(formats.items()))


@cache
def load_other_folders() -> tuple[OtherFolder, ...]:
    """Import all modules of this package, and return the kinds of folders that they define."""
    candidates = (getattr(module, "OTHER_FOLDER", None) for module in _import_modules())
    return tuple(item for item in candidates if isinstance(item, OtherFolder))


@cache
def _import_modules() -> tuple[ModuleType, ...]:
    modules: list[ModuleType] = []
    for module in pkgutil.iter_modules(__path__):
        name = f"{__name__}.{module.name}"
        try:
            modules.append(importlib.import_module(name))
        except Exception as error:
            raise UsageError(
                f"cannot load module `{name}`",
                why=f"{type(error).__name__}: {error}",
                hint="fix or remove the module",
            ) from error
    return tuple(modules)


def require_checkpoint(path: TreePath) -> None:
    """Raise if *path* is a folder of another kind that ckptctl writes, or a file in one."""
    listing = Listing(path)
    for kind in load_other_folders():
        if kind.matches(listing):
            raise kind.build_error(path)


@cache
def get_entry_points_by_name() -> dict[str, EntryPoint]:
    """Map format names to the entry points that define them, without loading these."""
    return installed.find_entry_points(ENTRY_POINTS)


@cache
def load_plugin_format(name: str) -> Format:
    """Load the format that an installed package registers under the entry point *name*."""
    return installed.load_entry_point(get_entry_points_by_name()[name], Format)  # type: ignore[type-abstract]


def find_plugin_package(name: str) -> str | None:
    """Return the installed package that provides the format *name*, or None if there is none."""
    point = get_entry_points_by_name().get(name)
    return installed.get_package_name(point) if point else None


def load_plugin_formats() -> dict[str, Format]:
    """Load the formats that installed packages provide, and map their names to them.

    A format that has the name of a built-in format is ignored.
    """
    builtin_formats = load_builtin_formats()
    return {
        n: load_plugin_format(n)
        for n in sorted(get_entry_points_by_name())
        if n not in builtin_formats
    }


def load_all_formats() -> dict[str, Format]:
    """Map names to all formats, the built-in ones first and then those of plug-ins."""
    return {**load_builtin_formats(), **load_plugin_formats()}


def list_format_names() -> tuple[str, ...]:
    """Return the names of the built-in formats. ckptctl can read all of them."""
    return tuple(load_builtin_formats())


def map_other_names() -> dict[str, str]:
    """Map each alias, such as the name of a training framework, to the name of its format."""
    return {
        other: name
        for name, candidate in load_builtin_formats().items()
        for other in candidate.other_names
    }


def list_writable_names() -> tuple[str, ...]:
    """Return the names of the built-in formats that ckptctl can write."""
    return tuple(
        name
        for name, candidate in load_builtin_formats().items()
        if isinstance(candidate, WritableFormat)
    )


def get_format(name: str) -> Format:
    """Return the format called *name*, or raise UsageError if it does not exist."""
    candidate = load_builtin_formats().get(name) or load_all_formats().get(name)
    if candidate is None:
        close = find_nearest(name.lower(), list_format_names())
        raise UsageError(
            f"unknown format `{name}`",
            why=f"none of the {len(list_format_names())} known formats has this name",
            hint=(f"did you mean `{close}`? " if close else "") + "see `ckptctl formats`",
        )
    return candidate


def get_writable_format(name: str) -> WritableFormat:
    """Return the format called *name*, or raise UsageError if ckptctl cannot write it."""
    candidate = get_format(name)
    if not isinstance(candidate, WritableFormat):
        raise UsageError(
            f"`{name}` cannot be written",
            why=f"writable formats: {', '.join(list_writable_names())}",
        )
    return candidate


def sniff_formats(path: TreePath) -> dict[str, str]:
    """Map the name of every format that matches *path* to the evidence found.

    Plug-in formats are only tried if no built-in format matches.
    """
    listing = Listing(path)
    if any(kind.matches(listing) for kind in load_other_folders()):
        return {}
    for load_formats in (
        (load_builtin_formats, load_plugin_formats) if listing.is_folder or path.is_file() else ()
    ):
        candidates = {
            name: candidate
            for name, candidate in load_formats().items()
            if not candidate.marks or any(map(candidate.marks.match, listing.names))
        }
        if sniffed := sniff_by_precedence(candidates, listing):
            return sniffed
    return {}


def sniff_by_precedence(candidates: Mapping[str, Format], listing: Listing) -> dict[str, str]:
    """Map the names of the *candidates* that match *listing* to the evidence found.

    A candidate is skipped if another candidate matches that takes precedence over it.
    """
    evidence_by_name: dict[str, str | None] = {}

    def find_evidence(name: str) -> str | None:
        if name not in evidence_by_name:
            evidence_by_name[name] = None  # in case two formats yield to each other
            yields_to = candidates[name].yields_to
            rivals = [o for o in candidates if o in yields_to or name in candidates[o].specializes]
            if not any(map(find_evidence, rivals)):
                evidence_by_name[name] = candidates[name].sniff(listing)
        return evidence_by_name[name]

    return {name: evidence for name in candidates if (evidence := find_evidence(name))}


def find_interrupted_format(path: TreePath) -> Format | None:
    """Return the format of the interrupted save in *path*, or None if no save was interrupted.

    The files by which formats are usually recognized are missing in such a save.
    """
    with suppress(PermissionError):
        listing = Listing(path)
        return next(
            (
                candidate
                for candidate in load_builtin_formats().values()
                if candidate.is_interrupted(listing)
            ),
            None,
        )
    return None


def detect_format(path: str | TreePath) -> Format:
    """Detect the format of *path*, or raise FormatError unless exactly one format matches."""
    path = to_existing_path(path)
    return select_format(path, sniff_formats(path))


def select_format(path: TreePath, sniffed: Mapping[str, str]) -> Format:
    """Return the only format in *sniffed*, or raise an error that describes the content of *path*.

    Args:
        path: Path of the checkpoint.
        sniffed: Evidence for each format that matches *path*, by name of the format.
    """
    if not sniffed:
        require_checkpoint(path)
    is_part = any(
        candidate.part_names and candidate.part_names.fullmatch(path.name)
        for candidate in load_builtin_formats().values()
    )
    if is_part and path.is_file():
        message = f"`{path.name}` is one file of a checkpoint"
        raise FormatError(message, where=str(path), hint=f"pass its folder, `{path.parent}`")
    if len(sniffed) == 1:
        return get_format(next(iter(sniffed)))
    if sniffed:
        alternatives = " and ".join(f"{name} ({evidence})" for name, evidence in sniffed.items())
        raise FormatError(
            "the format is ambiguous",
            where=str(path),
            why=alternatives,
            hint=f"set the format, for example {format_option(f'--from {next(iter(sniffed))}')}",
        )
    checkpoints = list_checkpoints(path)
    if checkpoints:
        raise FormatError(
            f"this is a folder of {pluralize(len(checkpoints), 'checkpoint')}, not a checkpoint",
            where=str(path),
            why=quote_names([item.name for item in checkpoints]),
            hint=f"pass one of them; {format_command('inspect', path)} shows which are complete",
        )
    unfinished_error = find_unfinished_error(path)
    if unfinished_error is None and (interrupted_format := find_interrupted_format(path)):
        return interrupted_format  # its reader reports the missing files
    raise unfinished_error or foreign.unrecognized_format_error(
        path, list_format_names(), find_nested_checkpoints(path)
    )


def open_checkpoint(
    path: str | TreePath,
    format: str | None = None,
    options: ReadOptions = DEFAULT_READ_OPTIONS,
    *,
    manifest: bool | None = True,
) -> Catalog:
    """Read the catalog of the checkpoint at *path*, whose format is detected if *format* is None.

    *manifest* determines whether checksums are read from the manifest next to the checkpoint. If it
    is None, they are read unless this takes a remote request.
    """
    path = to_existing_path(path)
    opened = path, read_identity(path)
    with raise_changed_if(lambda: require_same_file(opened)):
        sniffed = {} if format else sniff_formats(path)
        if not sniffed:
            require_checkpoint(path)
        inner = None if format or sniffed else find_only_model_checkpoint(path)
        unfinished_error = find_unfinished_error(path)
        if unfinished_error and not options.partial:
            raise unfinished_error
        if inner:
            path, sniffed = inner, sniff_formats(inner)
        found_format = get_format(format) if format else select_format(path, sniffed)
        unsupported = [
            name
            for name in ("weights", "tag", "rules", "ranks")
            if getattr(options, name) and name not in found_format.read_options
        ]
        if unsupported:
            raise UsageError(
                f"{format_option(f'--{unsupported[0]}')} is not supported for "
                f"`{found_format.name}`",
                where=str(path),
                hint=f"see `ckptctl formats {found_format.name}` for the options of this format",
            )
        try:
            catalog = found_format.read(path, options)
            for specialized in load_builtin_formats().values():
                if found_format.name in specialized.specializes:
                    catalog = specialized.refine(catalog, options)
        except FormatError as error:
            if format and not error.hint:
                error.hint = "omit the format to detect it automatically"
            raise
        if manifest is not False:
            catalog = checksums.attach_manifest_checksums(catalog, allow_remote=manifest is True)
        if unfinished_error:
            catalog = replace(
                catalog,
                findings=(finding_from_error(unfinished_error, file=LOCK_NAME), *catalog.findings),
            )
        if catalog.findings:
            catalog = replace(catalog, findings=downgrade_unproven_findings(catalog.findings))
        if inner:
            note = f"read from `{inner.name}`, the only model checkpoint in this folder"
            catalog = replace(catalog, notes=(note, *catalog.notes))
        return replace(catalog, opened=opened)


def map_merged_parameters(catalog: Catalog, names: Sequence[str]) -> dict[str, str]:
    """Map names of optimizer state of split parameters to the merged parameters in *catalog*.

    Args:
        catalog: Catalog that contains the merged parameters.
        names: Tensor names. Names of tensors that are not such optimizer state are ignored.
    """
    parameter_by_name: dict[str, str] = {}
    for candidate in load_builtin_formats().values():
        if catalog.format in (candidate.name, *candidate.specializes):
            parameter_by_name |= candidate.map_merged_parameters(names)
    return parameter_by_name


def parse_recorded_facts(catalog: Catalog) -> RecordedFacts | None:
    """Parse the model facts that a trainer recorded, or return None if it recorded none."""
    facts = get_format(catalog.format).parse_recorded_facts(catalog)
    special = (f for f in load_builtin_formats().values() if catalog.format in f.specializes)
    return facts or next(filter(None, (f.parse_recorded_facts(catalog) for f in special)), None)


def resolve_codecs(catalog: Catalog) -> Catalog:
    """Locate the raw tensor bytes of every extent in *catalog*, so that each codec is ``raw``."""
    with raise_changed_if(lambda: require_same_file(catalog.opened)):
        return get_format(catalog.format).resolve_codecs(catalog)


def list_checkpoints(path: TreePath) -> list[TreePath]:
    """Return the checkpoints directly inside a folder, in natural order.

    Only subfolders and Lightning's ``*.ckpt`` files count as checkpoints.
    """
    if not path.is_dir():
        return []
    shown = (item for item in path.iterdir() if not item.name.startswith("."))
    candidates = (item for item in shown if item.is_dir() or item.suffix == ".ckpt")
    return sorted(
        (item for item in candidates if sniff_formats(item)),
        key=lambda item: to_natural_key(item.name),
    )


def find_nested_checkpoints(path: TreePath) -> list[TreePath]:
    """Return the model checkpoints two levels below a folder, such as ``run/epoch_1/model``.

    At most ``MAX_FOLDERS_SCANNED`` folders of each level are searched.
    """

    def list_subfolders(folder: TreePath) -> list[TreePath]:
        with suppress(OSError):
            children = [item for item in folder.iterdir() if item.is_dir() and item.name[0] != "."]
            return sorted(children, key=lambda item: to_natural_key(item.name))
        return []

    checkpoints: list[TreePath] = []
    nested = (
        item
        for subfolder in list_subfolders(path)[:MAX_FOLDERS_SCANNED]
        for item in list_subfolders(subfolder)
    )
    for item in islice(nested, MAX_FOLDERS_SCANNED):
        with suppress(OSError):
            if not NON_MODEL_FOLDER.fullmatch(item.name) and sniff_formats(item):
                checkpoints.append(item)
    return checkpoints


def find_only_model_checkpoint(path: TreePath) -> TreePath | None:
    """Return the only model checkpoint directly inside a folder, or None if not exactly one exists.

    Optimizer checkpoints are ignored, because accelerate writes ``pytorch_model_fsdp_0/`` and
    ``optimizer_0/``, and ByteCheckpoint writes ``model/`` and ``optimizer/``.

    Raises:
        FormatError: A sibling with a higher number in its name is not a recognized checkpoint.
    """
    models = [item for item in list_checkpoints(path) if not NON_MODEL_FOLDER.fullmatch(item.name)]
    if len(models) != 1:
        return None
    newer = _find_newer_sibling(models[0])
    if newer is None:
        return models[0]
    raise FormatError(
        "the newest checkpoint in this folder is not complete",
        where=str(path),
        why=f"`{newer.name}` is not recognized as a checkpoint, and `{models[0].name}` is older",
        hint=f"pass the checkpoint to read; {format_command('ls', path)} shows the problem",
    )


def list_sibling_parts(path: TreePath, model: TreePath) -> list[TreePath]:
    """List the parts of the checkpoint in *path*, such as ``optimizer_0/``, except *model*.

    The list is empty unless *model*, which was read instead of *path*, is such a part. Folders with
    names of parts are included even if they are not recognized.
    """
    if model.parent != path or not PART_FOLDER.fullmatch(model.name):
        return []
    return [
        item
        for item in sorted(path.iterdir(), key=lambda item: to_natural_key(item.name))
        if item != model
        and item.is_dir()
        and (
            PART_FOLDER.fullmatch(item.name)
            or (NON_MODEL_FOLDER.fullmatch(item.name) and sniff_formats(item))
        )
    ]


def list_unread_parts(catalog: Catalog) -> list[str]:
    """List the names of the parts next to the model of *catalog*, which it does not contain."""
    path = catalog.opened[0] if catalog.opened else catalog.path
    return [part.name for part in list_sibling_parts(path, catalog.path)]


def list_unread_trainer_files(catalog: Catalog) -> list[str]:
    """List the files with training state next to the model of *catalog* that are not part of it."""
    folder = catalog.opened[0] if catalog.opened else catalog.path
    if not folder.is_dir():
        return []
    names = (item.name for item in list_trainer_files(folder))
    return [name for name in names if folder != catalog.root or name not in catalog.files]


def _find_newer_sibling(checkpoint: TreePath) -> TreePath | None:
    """Return the sibling of *checkpoint* with the highest step number, or None if none is newer.

    Only siblings whose names differ from *checkpoint* in nothing but numbers are considered.
    """
    name_pattern, number = _DIGITS.sub("N", checkpoint.name), to_natural_key(checkpoint.name)
    siblings = (
        item for item in checkpoint.parent.iterdir() if _DIGITS.sub("N", item.name) == name_pattern
    )
    newer = [
        item
        for item in siblings
        if to_natural_key(item.name) > number and (item.is_dir() or item.suffix == ".ckpt")
    ]
    return max(newer, key=lambda item: to_natural_key(item.name), default=None)


def to_existing_path(path: str | TreePath) -> TreePath:
    """Return *path* as an absolute path, or raise SourceNotFoundError if it does not exist."""
    if not to_path_text(path):
        raise UsageError("the path is empty", hint="use `.` for the working directory")
    absolute = expand_home(resolve_source_path(path)).absolute()
    if not absolute.exists():
        raise SourceNotFoundError(
            "no such file or directory",
            where=str(path),
            hint=build_path_hint(resolve_source_path(path)),
        )
    return absolute
