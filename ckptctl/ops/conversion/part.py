"""What is asked of which checkpoint, and the part of it that is converted: what is whole of that.

What is not whole is told by positive evidence, which ``--allow-missing`` goes by.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ckptctl.catalog import Box, Catalog, Finding, TensorEntry
from ckptctl.errors import (
    CkptError,
    CoverageError,
    DamagedError,
    MappingError,
    UnsupportedError,
    command,
    spell_option,
)
from ckptctl.formats.base import OutputTensor, WritableFormat
from ckptctl.notes import Notes
from ckptctl.ops.conversion.assets import Assets
from ckptctl.ops.conversion.options import ConversionOptions
from ckptctl.ops.conversion.training import name_parts
from ckptctl.ops.recognition.lacking import lacks
from ckptctl.ops.recognition.model import Model
from ckptctl.ops.recognition.quantized import glanced
from ckptctl.ops.recognition.roots import Selection, chosen, select, wanted
from ckptctl.ops.verification.items import resolved
from ckptctl.planner.balance import shard_limit
from ckptctl.planner.boxes import check_coverage
from ckptctl.planner.layouts import BASE, HF, is_base
from ckptctl.planner.mapping.adapters import is_adapter
from ckptctl.storage.files import source_files
from ckptctl.storage.zips.reader import read_archive
from ckptctl.units import parse_bytes
from ckptctl.verdict import drop_structure_claim

SETTINGS = "param_groups"
EXTRA_STATE = "._extra_state/"


@dataclass(frozen=True, slots=True)
class Task:
    """A recognized checkpoint with its side files, and what is asked of it.

    Attributes:
        notes: Collects what is said while it is planned.
    """

    catalog: Catalog
    assets: Assets
    recognition: Model
    options: ConversionOptions
    target: WritableFormat
    notes: Notes = field(default_factory=Notes)

    @property
    def root(self) -> str:
        """Prefix of the model's names."""
        return self.recognition.root

    @property
    def everything(self) -> bool:
        """Whether what surrounds the model travels, too; then the model keeps its prefix."""
        return self.options.only == "all"

    @property
    def kept_root(self) -> str:
        """Prefix of the model's names in the output."""
        return self.root if self.everything else ""

    @property
    def keeping(self) -> str:
        """What keeps that which surrounds the model, said to who did not ask for it."""
        if self.target.nested:
            return (
                f"pass {spell_option('--only all')}, or consolidate's "
                f"{spell_option('--optimizer')}, to keep it"
            )
        return (
            f"pass {spell_option('--to dcp', '--only all')}, or consolidate's "
            f"{spell_option('--optimizer')}, to keep it"
        )

    @property
    def layout(self) -> str | None:
        """Layout to write; None: that of the source.

        Transformers reads models without their head under either kind of names.
        """
        headless = is_base(self.recognition.layout) and self.target.layout == HF
        return self.options.to_layout or (BASE if headless else self._adapted or self.target.layout)

    @property
    def _adapted(self) -> str | None:
        """Layout of adapters in the target; None: it has none of their own, or this is none."""
        layouts, own = self.target.adapter_layouts, self.recognition.layout
        if not layouts or not is_adapter(self.catalog.tensors):
            return None
        return own if own in layouts else layouts[0]

    def shard_bytes(self, tensors: Sequence[OutputTensor]) -> int:
        """How many bytes of *tensors* go into a file."""
        if self.options.max_shard_size is not None:
            return parse_bytes(self.options.max_shard_size)
        # Who has several files in that format expects several.
        several = self.catalog.format == self.target.name and len(self.catalog.files) > 1
        sizes = [(tensor.name, tensor.nbytes) for tensor in tensors if tensor.alias_of is None]
        return shard_limit(sizes, 0 if several else self.target.one_file)

    def wants(self, name: str) -> bool:
        """Whether a leaf that is not there would be converted if it were."""
        options = self.options
        globs = options.include, options.exclude
        return wanted(self.catalog, name, self.root, *globs, self.everything)


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a checkpoint that is converted.

    Attributes:
        selection: Its leaves.
        whole: Names in the model of all tensors that it should have, chosen or not.
        missing: What would be converted if it were there and whole, and why it is not.
    """

    selection: Selection
    whole: tuple[str, ...]
    missing: Mapping[str, str]

    def without(self, parts: Mapping[str, str], task: Task) -> Part:
        """Take out *parts* of the model, by their names in it, and what is nothing without them.

        The task's notes say then what is missing of all that was chosen.
        """
        if not parts and not self.missing:
            return self
        gone = {**self.missing, **{task.root + name: why for name, why in parts.items()}}
        model = {task.root + name for name in (*self.selection.tensors, *parts)} | gone.keys()
        outside = self.selection.rest if task.everything else ()
        missing = {**dependent(gone, model, outside, task.root), **gone}
        task.notes.explain("missing", missing)
        return replace(self, selection=_without(self.selection, missing), missing=missing)


def choose(task: Task, gone: Missing) -> Part:
    """Choose what is converted, as options say, and of that what is whole."""
    catalog, options, root, notes = task.catalog, task.options, task.root, task.notes
    selection = select(catalog, root)
    if task.target.training:
        selection = _with_states_of_modules(selection, catalog)
    whole = tuple(selection.tensors)
    outside = () if task.everything else selection.rest
    notes.explain("skipped", dict.fromkeys(outside, f"not part of the model ({task.keeping})"))
    lost = (name for name in gone.names if name.startswith(root) and name not in catalog.blobs)
    there = dict.fromkeys((*whole, *(name.removeprefix(root) for name in lost)))
    lacking = lacks(task.recognition, there, task.layout)
    selection, unwanted = chosen(
        selection, options.include, options.exclude, task.everything, lacking.names
    )
    chosen_by = f"{spell_option('--include')}, {spell_option('--exclude')}"
    notes.explain("skipped", dict.fromkeys(unwanted, f"not selected ({chosen_by})"))
    nothing = not catalog.tensors and bool(gone)
    if not selection.tensors and not nothing and not (task.everything and selection.rest):
        raise MappingError(
            "no tensors to convert",
            where=catalog.path,
            why="the checkpoint contains training state but no model" if selection.rest else None,
            hint=task.keeping if selection.rest else None,
        )
    missing: dict[str, str] = {}
    if gone:
        unknown, missing = _not_whole(task, selection, gone)
        whole += unknown
        selection = _without(selection, missing)
        if not selection.tensors:
            reasons = missing or gone.names
            name, why = next(iter(reasons.items()))
            raise DamagedError(
                "no complete tensors to convert",
                where=catalog.path,
                why=f"`{name}`: {why} ({len(reasons):,} missing in total)",
                hint=f"run {command('verify', catalog.path)} to list everything that is missing",
            )
    lacking = lacking.only([name for name in lacking.names if task.wants(root + name)])
    if not options.allow_missing:
        lacking.require_whole(catalog.path)
    whole += lacking.names if lacking.certain else ()
    notes.add(*(drop_structure_claim(lacking.doubts) if missing else lacking.doubts))
    return Part(selection, whole, {**missing, **lacking.missing})


def _with_states_of_modules(selection: Selection, catalog: Catalog) -> Selection:
    """Return *selection* with what modules keep beside tensors, as Transformer Engine its scales.

    Only programs that write them ask for them.
    """
    found = {name: catalog.blobs[name] for name in selection.rest if EXTRA_STATE in name}
    rest = tuple(name for name in selection.rest if name not in found)
    return replace(selection, blobs={**selection.blobs, **found}, rest=rest)


def _not_whole(
    task: Task, selection: Selection, gone: Missing
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Names of the model's tensors that only *gone* tells of, and what is not written, and why."""
    catalog, root = task.catalog, task.root
    here = {root + name for name in (*selection.tensors, *selection.blobs)}
    outside = selection.rest if task.everything else ()
    there = {*here, *outside}
    absent = gone.names.keys() - catalog.tensors.keys() - catalog.blobs.keys()
    lacking = {
        name: why
        for name, why in gone.names.items()
        if name in there or (name in absent and task.wants(name))
    }
    own = {name for name in absent if wanted(catalog, name, root, (), (), False)}
    lacking = {**dependent(lacking, here | own, outside, root), **lacking}
    unknown = sorted(name.removeprefix(root) for name in own)
    return tuple(unknown), {**lacking, **gone.files}


def _without(selection: Selection, names: Collection[str]) -> Selection:
    """Return *selection* without the leaves called *names*, as the checkpoint calls them."""
    root = selection.root
    return replace(
        selection,
        tensors={n: entry for n, entry in selection.tensors.items() if root + n not in names},
        blobs={n: blob for n, blob in selection.blobs.items() if root + n not in names},
        rest=tuple(name for name in selection.rest if name not in names),
    )


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
            found[name] = f"it depends on `{states[_state_of(name)]}`, which is missing"
    return found


def _is_state(name: str) -> bool:
    parts = name.split(".")
    return "state" in parts and SETTINGS not in parts


def _state_of(name: str) -> str:
    return name.rpartition(".")[0]


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


def find_missing(catalog: Catalog) -> Missing:
    """What is not whole in a checkpoint read with ``partial``; looks at the header of each item."""
    _, wrong = resolved(replace(catalog, replicas={}))
    errors = [f for f in (*catalog.findings, *wrong) if f.severity != "warning"]
    names = {found.tensor: found.summary for found in errors if found.tensor}
    names = _in_mixed_files(catalog, wrong) | names
    for name, boxes in catalog.lost.items():
        if boxes:
            names.setdefault(name, _gone(boxes))
    for entry in catalog.tensors.values():
        if entry.name not in names and (why := _torn(entry)):
            names[entry.name] = why
    aliases = ((t.name, t.alias_of) for t in catalog.tensors.values() if t.alias_of)
    _spread(names, aliases, "it shares memory with")
    if names:
        together = (
            (weight.lead, name) for weight in glanced(catalog).weights for name in weight.names[1:]
        )
        _spread(names, together, "it is part of the same quantized tensor as")
    explained = {file for boxes in catalog.lost.values() for box, file in boxes if box.numel}
    explained |= {found.file for found in errors if found.tensor and found.file}
    unknown = [f for f in errors if not f.tensor and f.file not in explained]
    return Missing(names, {f.file or f.what: f.summary for f in unknown})


def _gone(boxes: Sequence[tuple[Box, str]]) -> str:
    """Say where what is missing is; an empty box stands for what may follow there."""
    known = next((file for box, file in boxes if box.numel), None)
    if known is None:
        return f"it may continue in `{boxes[0][1]}`, which cannot be used"
    return f"a part of it is in `{known}`, which cannot be used"


def _torn(entry: TensorEntry) -> str | None:
    try:
        check_coverage(entry)
    except (CoverageError, UnsupportedError) as error:
        return error.why or error.what
    return None


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


def _in_mixed_files(catalog: Catalog, wrong: Sequence[Finding]) -> dict[str, str]:
    """All that lies in files nothing of which can be trusted, and why.

    A file of another rank or another save holds some items of the right dtype and shape by
    chance, with other values. One item that cannot be read is a damaged item; several, or one that
    is sound but another than it should be, or one in a file of another length, are another file.
    """
    bad: dict[str, list[str]] = defaultdict(list)
    for finding in wrong:
        if finding.severity == "error" and finding.file and finding.tensor in catalog.tensors:
            bad[finding.file].append(finding.tensor or "")
    stored: dict[str, list[_StoredItem]] = defaultdict(list)
    for item in _items(catalog):
        if item.file in bad:
            stored[item.file].append(item)
    reasons: dict[str, str] = {}
    for file, items in stored.items():
        first, *others = bad[file]
        if (
            others
            or catalog.files.get(file) != max(item.offset + item.nbytes for item in items)
            or any(_sound(catalog.root, item) for item in items if item.name == first)
        ):
            more = f" and {len(others):,} more" if others else ""
            why = f"its file does not match the metadata: cannot read or verify `{first}`{more}"
            reasons |= {item.name: why for item in items}
    return reasons


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
