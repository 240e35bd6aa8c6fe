"""What is asked of which checkpoint, and the part of it that is converted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ckptctl.catalog import Catalog
from ckptctl.errors import DamagedError, MappingError, command
from ckptctl.formats.base import WritableFormat
from ckptctl.ops.conversion.assets import Assets
from ckptctl.ops.conversion.missing import Missing
from ckptctl.ops.conversion.options import ConversionOptions
from ckptctl.ops.conversion.training import name_parts
from ckptctl.ops.recognition.lacking import lacks
from ckptctl.ops.recognition.recognise import Recognition
from ckptctl.ops.recognition.selection import Selection, chosen, select, wanted
from ckptctl.planner.layouts import BASE, HF
from ckptctl.records import dataclass

SETTINGS = "param_groups"
KEPT = "`--only all`, or consolidate's `--optimizer`, keeps it"


@dataclass(frozen=True, slots=True)
class Task:
    """A recognised checkpoint with its side files, and what is asked of it."""

    catalog: Catalog
    assets: Assets
    recognition: Recognition
    options: ConversionOptions
    target: WritableFormat

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
    def layout(self) -> str | None:
        """Layout to write; None: that of the source.

        Transformers reads models without their head under either kind of names.
        """
        headless = self.recognition.layout == BASE and self.target.layout == HF
        return self.options.to_layout or (BASE if headless else self.target.layout)

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
        left_out: Other leaves, and why they do not travel.
        missing: What would be converted if it were there and whole, and why it is not.
        doubts: What the user should know of what may be missing.
    """

    selection: Selection
    whole: tuple[str, ...]
    left_out: Mapping[str, str]
    missing: Mapping[str, str]
    doubts: Sequence[str]

    def without(self, parts: Mapping[str, str], task: Task) -> Part:
        """Take out *parts* of the model, by their names in it, and what is nothing without them."""
        if not parts and not self.missing:
            return self
        gone = {**self.missing, **{task.root + name: why for name, why in parts.items()}}
        model = {task.root + name for name in (*self.selection.tensors, *parts)} | gone.keys()
        outside = self.selection.rest if task.everything else ()
        missing = {**dependent(gone, model, outside, task.root), **gone}
        return replace(self, selection=_without(self.selection, missing), missing=missing)


def choose(task: Task, gone: Missing) -> Part:
    """Choose what is converted, as options say, and of that what is whole."""
    catalog, options, root = task.catalog, task.options, task.root
    selection = select(catalog, root)
    whole = tuple(selection.tensors)
    outside = () if task.everything else selection.rest
    left_out = dict.fromkeys(outside, f"not part of the model ({KEPT})")
    lost = (name for name in gone.names if name.startswith(root) and name not in catalog.blobs)
    there = dict.fromkeys((*whole, *(name.removeprefix(root) for name in lost)))
    lacking = lacks(task.recognition, there, options.sizes or {}, task.layout)
    selection, unwanted = chosen(
        selection, options.include, options.exclude, task.everything, lacking.names
    )
    left_out |= dict.fromkeys(unwanted, "not chosen (`--include`, `--exclude`)")
    nothing = not catalog.tensors and bool(gone)
    if not selection.tensors and not nothing and not (task.everything and selection.rest):
        raise MappingError(
            "no tensor is left to convert",
            where=catalog.path,
            why="it holds training state and no model" if selection.rest else None,
            hint=KEPT if selection.rest else None,
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
                "nothing whole is left to convert",
                where=catalog.path,
                why=f"`{name}`: {why}; in all {len(reasons):,} are missing",
                hint=f"{command('verify', catalog.path)} lists what is missing",
            )
    lacking = lacking.only([name for name in lacking.names if task.wants(root + name)])
    if not options.allow_missing:
        lacking.require_whole(catalog.path)
    whole += lacking.names if lacking.certain else ()
    return Part(selection, whole, left_out, {**missing, **lacking.missing}, lacking.doubts)


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
            found[name] = f"it is nothing without `{states[_state_of(name)]}`, which is missing"
    return found


def _is_state(name: str) -> bool:
    parts = name.split(".")
    return "state" in parts and SETTINGS not in parts


def _state_of(name: str) -> str:
    return name.rpartition(".")[0]
