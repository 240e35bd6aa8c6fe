"""What of a checkpoint is converted, what of that is not whole, and what is nothing without it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, NoReturn

from ckptctl.catalog import Box, Catalog, Finding, TensorEntry
from ckptctl.errors import (
    CkptError,
    CoverageError,
    DamagedError,
    MappingError,
    UnsupportedError,
    command,
)
from ckptctl.ops.conversion.options import ConversionOptions
from ckptctl.ops.conversion.training import name_parts
from ckptctl.ops.recognition.lacking import lacks
from ckptctl.ops.recognition.quantised import pairs
from ckptctl.ops.recognition.recognise import Recognition
from ckptctl.ops.recognition.selection import Selection, chosen, select, wanted
from ckptctl.ops.verification.items import resolved
from ckptctl.planner.boxes import check_coverage
from ckptctl.storage.files import source_files
from ckptctl.storage.zips.reader import read_archive

SETTINGS = "param_groups"
KEPT = "`--only all`, or consolidate's `--optimizer`, keeps it"


@dataclass(frozen=True, slots=True)
class Missing:
    """What of a checkpoint is not whole.

    Attributes:
        names: Tensors and other leaves, by their names in the checkpoint, and why.
        files: Files that cannot be used and of which nothing tells what they hold, and why.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.names or self.files)


@dataclass(frozen=True, slots=True)
class Part:
    """What of a checkpoint is converted.

    Attributes:
        selection: Its leaves.
        whole: Names in the model of all tensors that it should have, chosen or not.
        left_out: Other leaves, and why they do not travel.
        missing: What would be converted if it were there and whole, and why it is not.
        doubts: What the user should know of what may be missing.
    """

    selection: Selection
    whole: tuple[str, ...]
    left_out: Mapping[str, str]
    missing: Mapping[str, str]
    doubts: Sequence[str]

    def without(self, parts: Mapping[str, str], options: ConversionOptions) -> Part:
        """Take out *parts* of the model, by their names in it, and what is nothing without them."""
        root = self.selection.root
        gone = {**self.missing, **{root + name: why for name, why in parts.items()}}
        model = {root + name for name in (*self.selection.tensors, *parts)} | gone.keys()
        outside = self.selection.rest if options.only == "all" else ()
        missing = {**dependent(gone, model, outside, root), **gone}
        return replace(self, selection=_without(self.selection, missing), missing=missing)


def choose(
    catalog: Catalog,
    recognition: Recognition,
    options: ConversionOptions,
    target_layout: str | None,
    gone: Missing,
) -> Part:
    """Choose what is converted, as options say, and of that what is not missing."""
    everything, root = options.only == "all", recognition.root
    selection = select(catalog, root)
    whole = tuple(selection.tensors)
    left_out = (
        {} if everything else dict.fromkeys(selection.rest, f"not part of the model ({KEPT})")
    )
    lost = (name for name in gone.names if name.startswith(root) and name not in catalog.blobs)
    there = dict.fromkeys((*whole, *(name.removeprefix(root) for name in lost)))
    lacking = lacks(recognition, there, options.sizes or {}, target_layout)
    selection, unwanted = chosen(
        selection, options.include, options.exclude, everything, lacking.names
    )
    left_out |= dict.fromkeys(unwanted, "not chosen (`--include`, `--exclude`)")
    nothing = not catalog.tensors and bool(gone)
    if not selection.tensors and not nothing and not (everything and selection.rest):
        raise MappingError(
            "no tensor is left to convert",
            where=catalog.path,
            why="it holds training state and no model" if selection.rest else None,
            hint=KEPT if selection.rest else None,
        )
    missing: dict[str, str] = {}
    if gone:
        whole, missing = _leave_out(catalog, selection, gone, whole, options)
        selection = _without(selection, missing)
        if not selection.tensors:
            _refuse_all_missing(catalog, missing or gone.names)
    patterns = options.include, options.exclude
    lacking = lacking.only(
        [
            name
            for name in lacking.names
            if wanted(catalog, root + name, root, *patterns, everything)
        ]
    )
    if not options.allow_missing:
        lacking.require_whole(catalog.path)
    whole += lacking.names if lacking.certain else ()
    return Part(selection, whole, left_out, {**missing, **lacking.missing}, lacking.doubts)


def _refuse_all_missing(catalog: Catalog, missing: Mapping[str, str]) -> NoReturn:
    name, why = next(iter(missing.items()))
    raise DamagedError(
        "nothing whole is left to convert",
        where=catalog.path,
        why=f"`{name}`: {why}; in all {len(missing):,} are missing",
        hint=f"{command('verify', catalog.path)} lists what is missing",
    )


def _leave_out(
    catalog: Catalog,
    selection: Selection,
    gone: Missing,
    model: Sequence[str],
    options: ConversionOptions,
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the names that the model should have, and what of the selection is not written."""
    everything, root = options.only == "all", selection.root
    here = {root + name for name in (*selection.tensors, *selection.blobs)}
    outside = selection.rest if everything else ()
    absent = gone.names.keys() - catalog.tensors.keys() - catalog.blobs.keys()
    lacking = {
        name: why
        for name, why in gone.names.items()
        if name in here
        or name in outside
        or (
            name in absent
            and wanted(catalog, name, root, options.include, options.exclude, everything)
        )
    }
    own = [name for name in absent if wanted(catalog, name, root, (), (), False)]
    lacking = {**dependent(lacking, here | set(own), outside, root), **lacking}
    inner = sorted(name.removeprefix(root) for name in own)
    return (*model, *inner), {**lacking, **gone.files}


def _without(selection: Selection, names: Collection[str]) -> Selection:
    """Return *selection* without the leaves called *names*, as the checkpoint calls them."""
    root = selection.root
    return replace(
        selection,
        tensors={n: entry for n, entry in selection.tensors.items() if root + n not in names},
        blobs={n: blob for n, blob in selection.blobs.items() if root + n not in names},
        rest=tuple(name for name in selection.rest if name not in names),
    )


def find_missing(catalog: Catalog) -> Missing:
    """What is not whole in a checkpoint read with ``partial``; looks at the header of each item."""
    _, wrong = resolved(replace(catalog, replicas={}))
    errors = [f for f in (*catalog.findings, *wrong) if f.severity != "warning"]
    names = {found.tensor: _reason(found) for found in errors if found.tensor}
    names = names_in(catalog, mixed_files(catalog, wrong)) | names
    for name, boxes in catalog.lost.items():
        if boxes:
            names.setdefault(name, _gone(boxes))
    for entry in catalog.tensors.values():
        if entry.name not in names and (why := _torn(entry)):
            names[entry.name] = why
    _spread(names, _sharing(catalog), "it shares its memory with")
    if names:
        together = ((pair.weight, pair.scale) for pair in pairs(catalog))
        _spread(names, together, "it belongs together with")
    explained = {file for boxes in catalog.lost.values() for box, file in boxes if box.numel}
    explained |= {found.file for found in errors if found.tensor and found.file}
    unknown = [f for f in errors if not f.tensor and f.file not in explained]
    return Missing(names, {f.file or f.what: _reason(f) for f in unknown})


def dependent(
    missing: Iterable[str], model: Iterable[str], outside: Sequence[str], root: str
) -> dict[str, str]:
    """Return the optimizer state that is nothing without what is missing, and why.

    The moments of a parameter go with it, and with each other; a parameter's settings stay.
    """
    own = set(model)
    missing = list(missing)
    parameters = {name.removeprefix(root) for name in own}
    lost = {name.removeprefix(root) for name in missing if name in own}
    states = {_state_of(name): name for name in missing if name not in own and _is_state(name)}
    found: dict[str, str] = {}
    for name in outside if lost or states else ():
        if not _is_state(name):
            continue
        owner = next((part for part in name_parts(name) if part in parameters), None)
        if owner in lost:
            found[name] = f"its parameter `{owner}` is missing"
        elif _state_of(name) in states:
            found[name] = f"it is nothing without `{states[_state_of(name)]}`, which is missing"
    return found


def _is_state(name: str) -> bool:
    parts = name.split(".")
    return "state" in parts and SETTINGS not in parts


def _state_of(name: str) -> str:
    return name.rpartition(".")[0]


def _reason(found: Finding) -> str:
    return ": ".join(filter(None, (found.what, found.why)))


def _gone(boxes: Sequence[tuple[Box, str]]) -> str:
    """Say where what is missing is; an empty box stands for what may follow there."""
    known = next((file for box, file in boxes if box.numel), None)
    if known is None:
        return f"it may go on in `{boxes[0][1]}`, which cannot be used"
    return f"a part of it is in `{known}`, which cannot be used"


def _torn(entry: TensorEntry) -> str | None:
    try:
        check_coverage(entry)
    except (CoverageError, UnsupportedError) as error:
        return error.why or error.what
    return None


def _sharing(catalog: Catalog) -> Iterable[tuple[str, str]]:
    return ((t.name, t.alias_of) for t in catalog.tensors.values() if t.alias_of)


def _spread(names: dict[str, str], couples: Iterable[tuple[str, str]], why: str) -> None:
    """Add what goes with what is missing, in either direction."""
    couples = list(couples)
    grown = True
    while grown:
        grown = False
        for one, other in (*couples, *((b, a) for a, b in couples)):
            if one in names and other not in names:
                names[other] = f"{why} `{one}`"
                grown = True


class _StoredItem(NamedTuple):
    name: str
    file: str
    offset: int
    nbytes: int


def mixed_files(catalog: Catalog, wrong: Sequence[Finding]) -> dict[str, str]:
    """Return the files nothing of which can be trusted, and why.

    A file of another rank or another save holds some items of the right dtype and shape by
    chance, with other values. One item that cannot be read is a damaged item; several, or one that
    is sound but another than it should be, or one in a file of another length, are another file.
    """
    bad: dict[str, list[str]] = defaultdict(list)
    for found in wrong:
        if found.severity == "error" and found.file and found.tensor in catalog.tensors:
            bad[found.file].append(found.tensor or "")
    items = [item for item in _items(catalog) if item.file in bad]
    ends: dict[str, int] = defaultdict(int)
    for item in items:
        ends[item.file] = max(ends[item.file], item.offset + item.nbytes)
    return {
        file: _why(names)
        for file, names in bad.items()
        if len(names) > 1
        or catalog.files.get(file) != ends[file]
        or any(_sound(catalog.root, i) for i in items if i.file == file and i.name in names)
    }


def names_in(catalog: Catalog, files: dict[str, str]) -> dict[str, str]:
    """Return the names of all that lies in *files*, and why it cannot be used."""
    return {item.name: files[item.file] for item in _items(catalog) if item.file in files}


def _items(catalog: Catalog) -> Iterator[_StoredItem]:
    for entry in catalog.tensors.values():
        for extent in entry.extents:
            yield _StoredItem(entry.name, extent.file, extent.offset, extent.nbytes)
    for blob in catalog.blobs.values():
        if blob.file is not None:
            yield _StoredItem(blob.name, blob.file, blob.offset, blob.nbytes)


def _sound(root: str, item: _StoredItem) -> bool:
    """Return whether the item can be read, so that not its bytes are wrong but what it is."""
    try:
        with source_files(root) as files:
            read_archive(files, item.file, item.offset, item.nbytes)
    except CkptError:
        return False
    return True


def _why(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1:,} more" if names[1:] else ""
    return (
        "it lies in a file that is not the one that the metadata speaks of: "
        f"`{names[0]}`{more} in it cannot be read or are something else"
    )
