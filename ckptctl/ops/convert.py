"""Turn a checkpoint into another format, layout, dtype or sharding.

:func:`plan_conversion` decides everything and writes nothing; :func:`run_conversion` carries out
exactly that plan and publishes the result in one step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ckptctl import formats
from ckptctl.catalog import Blob, Box, Catalog, TensorEntry
from ckptctl.errors import MappingError, listed
from ckptctl.formats.base import GB, Output, OutputRequest, OutputTensor, WritableFormat
from ckptctl.ops import checks
from ckptctl.ops.digest import digest_of
from ckptctl.ops.documents import Assets, Papers, gather, papers
from ckptctl.ops.layout_change import Change, change_layout
from ckptctl.ops.manifest import manifest
from ckptctl.ops.output_tensors import in_checkpoint, main_dtype, output_tensors, paths, unrooted
from ckptctl.ops.recognise import Recognition, recognise
from ckptctl.ops.reference import reference, require_same_keys
from ckptctl.ops.selection import Selection, chosen, select
from ckptctl.ops.training import Rest, follow
from ckptctl.ops.transfers import transfers
from ckptctl.planner.boxes import check_coverage
from ckptctl.planner.mapping import MappedTensor
from ckptctl.planner.parallel import split
from ckptctl.planner.plan import FileIdentity, Plan, RawCopy, Transfer
from ckptctl.storage.compare import equal
from ckptctl.storage.executor import ExecutionOptions, execute
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.publish import free_space, staging
from ckptctl.units import format_bytes

Progress = Callable[[int], None]
START_UP = 45 << 20
TORCH = 260 << 20


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """What a conversion is asked to do; see ``ckptctl convert --help``.

    Attributes:
        to: Format to write.
        from_format: Format of the source; None: detect.
        model_type: Family; None: detect.
        from_layout: Layout of the source; None: detect.
        to_layout: Layout to write; None: what the target format implies, else the source's.
        dtype: torch's name of the dtype that floating tensors are cast to; None: keep.
        include: Globs of names in the model; none: all.
        exclude: Globs of names that are left out.
        only: The model, or all that the checkpoint holds.
        root: The model's prefix in the source; None: find it.
        max_shard_size: Bytes of tensors per output file.
        mp: Number of Meta shards.
        assets: Directory with configuration and tokenizer.
        like: Checkpoint whose distribution of keys over files is copied.
        overwrite: Replace an existing checkpoint.
        resume: Go on from the journal of an interrupted run.
        verify: Read the published output again and compare its checksums.
        checksum: Compute checksums on the way.
        jobs: Threads; None: one per core, at most four.
        memory: Bytes of buffers; None: 64 MiB.
        untie: Keep both of two tied tensors.
    """

    to: str
    from_format: str | None = None
    model_type: str | None = None
    from_layout: str | None = None
    to_layout: str | None = None
    dtype: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    only: Literal["model", "all"] = "model"
    root: str | None = None
    max_shard_size: int = 5 * GB
    mp: int = 1
    assets: Path | None = None
    like: Path | None = None
    overwrite: bool = False
    resume: bool = False
    verify: bool = False
    checksum: bool = True
    jobs: int | None = None
    memory: int | None = None
    untie: bool = False

    def execution(self) -> ExecutionOptions:
        """Return how the plan is to be carried out."""
        default = ExecutionOptions()
        return ExecutionOptions(
            jobs=self.jobs or default.jobs,
            memory=self.memory or default.memory,
            checksum=self.checksum,
            resume=self.resume,
        )


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """What a conversion will do, complete before a byte moves.

    Attributes:
        source: The source's catalog, resolved.
        recognition: What it was recognised as.
        options: What was asked for.
        change: How the layout changes.
        output: The tensors that will be written, in order.
        plan: What the executor does.
        dropped: Source keys that are left out by a rule of the family, and why.
        left_out: Other leaves that do not travel, and why.
        notes: What the user should know.
        free_bytes: Free space where the output will be.
    """

    source: Catalog
    recognition: Recognition
    options: ConversionOptions
    change: Change
    output: tuple[OutputTensor, ...]
    plan: Plan
    dropped: Mapping[str, str]
    left_out: Mapping[str, str]
    notes: tuple[str, ...]
    free_bytes: int

    @property
    def from_format(self) -> str:
        """Return the source's format."""
        return self.source.format

    @property
    def to_format(self) -> str:
        """Return the target's format."""
        return self.options.to

    @property
    def from_layout(self) -> str | None:
        """Return the source's layout; None: unknown family."""
        return self.change.source_layout

    @property
    def to_layout(self) -> str | None:
        """Return the target's layout; None: unknown family."""
        return self.change.target_layout

    @property
    def model_type(self) -> str | None:
        """Return the family, if one is known."""
        return self.change.family.name if self.change.family else self.recognition.model_type

    @property
    def tensors(self) -> int:
        """Return the number of tensors in the output."""
        return len(self.output)

    @property
    def mapped(self) -> int:
        """Return how many of them have another name or axis order than in the source."""
        moved = (m for m in self.change.tensors if m.sources[0].key != m.targets[0].key)
        return sum(1 for _ in moved)

    @property
    def files(self) -> tuple[tuple[str, int], ...]:
        """Return the output files with their sizes in bytes."""
        return tuple((file.path, file.size) for file in self.plan.files)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole output."""
        return self.plan.nbytes

    @property
    def arithmetic(self) -> bool:
        """Return whether elements are cast, which takes torch."""
        return any(t.source_dtype != t.target_dtype for t in self.plan.transfers)

    @property
    def memory_bytes(self) -> int:
        """Return an estimate of the peak memory: start-up, index and buffers."""
        index = 3_000 * (len(self.plan.transfers) + len(self.source.tensors))
        buffers = self.options.execution().memory
        return START_UP + index + buffers + (TORCH + 2 * buffers if self.arithmetic else 0)

    @property
    def statement(self) -> str:
        """Return one line that says what was recognised and what becomes of it."""
        layouts = (
            f"{self.from_layout} → {self.to_layout}"
            if self.from_layout != self.to_layout
            else self.from_layout or "names kept"
        )
        parts = [
            f"{self.from_format} → {self.to_format}",
            self.model_type or self.recognition.named,
            f"layout {layouts}" if self.from_layout else layouts,
            f"{self.tensors:,} tensors, {format_bytes(sum(t.nbytes for t in self.output))}",
        ]
        if self.recognition.root:
            parts.insert(2, f"model under `{self.recognition.root.rstrip('.')}`")
        return " · ".join(parts)

    def to_json(self) -> dict[str, object]:
        """Return the published object (``docs/reference/json.md``)."""
        return {
            "source": self.source.path,
            "target": self.plan.target,
            "from_format": self.from_format,
            "to_format": self.to_format,
            "model_type": self.model_type,
            "candidates": list(self.recognition.candidates),
            "from_layout": self.from_layout,
            "to_layout": self.to_layout,
            "root": self.recognition.root,
            "tensors": self.tensors,
            "mapped": self.mapped,
            "bytes": self.nbytes,
            "free_bytes": self.free_bytes,
            "memory_bytes": self.memory_bytes,
            "arithmetic": self.arithmetic,
            "digest": self.plan.digest,
            "files": [{"path": path, "bytes": nbytes} for path, nbytes in self.files],
            "dropped": dict(self.dropped),
            "left_out": dict(self.left_out),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """What a conversion did.

    Attributes:
        plan: The plan that was carried out.
        target: What was published.
        nbytes: Bytes of the output.
        seconds: Time that copying and publishing took.
        resumed_bytes: Bytes that an earlier run had written already.
        verified: Whether the published output was read again and found right.
        notes: What the user should know.
    """

    plan: ConversionPlan
    target: Path
    nbytes: int
    seconds: float
    resumed_bytes: int
    verified: bool
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """Return the published object (``docs/reference/json.md``)."""
        return {
            **self.plan.to_json(),
            "seconds": round(self.seconds, 3),
            "resumed_bytes": self.resumed_bytes,
            "verified": self.verified,
            "notes": [*self.plan.notes, *self.notes],
        }


def plan_conversion(src: str | Path, dst: str | Path, options: ConversionOptions) -> ConversionPlan:
    """Decide everything about a conversion; writes nothing.

    Args:
        src: The checkpoint.
        dst: Where the output will appear; must not exist unless *options* say to overwrite.
        options: What is asked for.

    Raises:
        CkptError: The source is not whole or not understood, or the conversion would not be safe.
    """
    target = formats.target(options.to)
    checks.options(options, target)
    source = formats.existing(src)
    destination = checks.destination(source, Path(dst), options.overwrite, formats.sniff)
    catalog = formats.open_checkpoint(source, options.from_format, options.model_type)
    assets = gather(catalog, options.assets)
    known = recognise(
        catalog, options.model_type, options.from_layout, options.root, assets.documents
    )
    draft = _Draft(catalog, known, options, target, destination, assets)
    return draft.plan()


def run_conversion(plan: ConversionPlan, progress: Progress | None = None) -> ConversionResult:
    """Carry out *plan* and publish the output, whole or not at all.

    Args:
        plan: What :func:`plan_conversion` returned.
        progress: Called with the bytes done since its last call, from several threads.

    Raises:
        CkptError: Nothing was published, and the source is as it was.
    """
    start = time.monotonic()
    options = plan.options
    _require_equal(plan)
    with staging(
        Path(plan.plan.target),
        overwrite=options.overwrite,
        resume=options.resume,
        keep_on_error=options.resume,
        single_file=plan.plan.single_file,
        is_checkpoint=lambda path: bool(formats.sniff(path)),
    ) as stage:
        free_space(stage.data, plan.nbytes, stage.held())
        done = execute(
            plan.plan,
            stage.data,
            options.execution(),
            progress or (lambda _: None),
            journal=stage.journal,
        )
        stage.publish()
    if options.verify:
        checks.published(plan.plan, done.crcs)
    return ConversionResult(
        plan,
        Path(plan.plan.target),
        plan.nbytes,
        time.monotonic() - start,
        done.resumed_bytes,
        options.verify,
        tuple(stage.notes),
    )


def _require_equal(plan: ConversionPlan) -> None:
    """Prove that tensors which are dropped as tied hold what the kept ones hold."""
    root = plan.recognition.root
    with SourceFiles(plan.source.root) as files:
        for kept, dropped in plan.change.must_equal:
            pair = (plan.source.tensors[root + name] for name in (kept, dropped))
            if not equal(files, *pair):
                raise MappingError(
                    f"`{dropped}` is tied to `{kept}` but holds other values",
                    where=plan.source.path,
                    why="the configuration or the model type says that the two are one",
                    hint="`--untie` keeps both",
                )


class _Draft:
    """A plan in the making: each step adds to what the later ones need."""

    def __init__(
        self,
        catalog: Catalog,
        known: Recognition,
        options: ConversionOptions,
        target: WritableFormat,
        destination: Path,
        assets: Assets,
    ) -> None:
        self.catalog, self.known, self.options = catalog, known, options
        self.target, self.destination, self.assets = target, destination, assets
        self.left_out: dict[str, str] = {}
        self.notes: list[str] = list(catalog.notes)

    def plan(self) -> ConversionPlan:
        """Go through the steps."""
        selection = self._selected()
        change = change_layout(
            self.known,
            selection.tensors,
            self.options.to_layout or self.target.layout,
            self.catalog.path,
            untie=self.options.untie,
            partial=bool(self.options.include or self.options.exclude),
        )
        self.notes += change.notes
        rest = self._rest(selection, change)
        mapped = in_checkpoint(change.tensors, self.known.root, self.keep_root)
        self._locate([*mapped, *rest.tensors], change)
        tensors = self._tensors(mapped, change, rest)
        output = self.target.lay_out(self._request(tensors, self._blobs(change, rest), change))
        self.left_out |= output.left_out
        self.notes += output.notes
        beside = self._papers(change, tensors)
        self.notes += beside.notes
        return ConversionPlan(
            source=self.catalog,
            recognition=self.known,
            options=self.options,
            change=change,
            output=tensors,
            plan=self._executable([*mapped, *rest.tensors], tensors, output, beside),
            dropped=change.dropped,
            left_out=self.left_out,
            notes=tuple(dict.fromkeys(self.notes)),
            free_bytes=checks.free(self.destination),
        )

    @property
    def keep_root(self) -> bool:
        """Return whether the model stays under its prefix: where its surroundings stay too."""
        return self.options.only == "all"

    def _selected(self) -> Selection:
        selection = select(self.catalog, self.known.root)
        if self.options.only == "model":
            reason = "not part of the model (`--only all` keeps it)"
            self.left_out |= dict.fromkeys(selection.rest, reason)
        selection, unwanted = chosen(selection, self.options.include, self.options.exclude)
        names = (self.known.root + name for name in unwanted)
        self.left_out |= dict.fromkeys(names, "not chosen (`--include`, `--exclude`)")
        if not selection.tensors:
            raise MappingError("no tensor is left to convert", where=self.catalog.path)
        return selection

    def _rest(self, selection: Selection, change: Change) -> Rest:
        names = selection.rest if self.keep_root else ()
        return follow(self._valued(), names, self.known.root, change)

    def _valued(self) -> Catalog:
        """Read the leaves that are not tensors and that travel; refuses hostile ones."""
        names = self.catalog.blobs.keys() - self.left_out.keys() if self.target.nested else ()
        blobs = {name: self.catalog.blobs[name] for name in self.catalog.blobs if name in names}
        read = formats.resolve(replace(self.catalog, tensors={}, blobs=blobs))
        self.catalog = replace(self.catalog, blobs={**self.catalog.blobs, **read.blobs})
        return self.catalog

    def _locate(self, mapped: Sequence[MappedTensor], change: Change) -> None:
        """Prove coverage of what is needed, and find its bytes."""
        root = self.known.root
        needed = {view.key for item in mapped for view in item.sources}
        needed |= {root + name for pair in change.must_equal for name in pair}
        tensors = {name: t for name, t in self.catalog.tensors.items() if name in needed}
        for entry in tensors.values():
            check_coverage(entry)
        found = formats.resolve(replace(self.catalog, tensors=tensors, blobs={}))
        self.catalog = replace(self.catalog, tensors=found.tensors)

    def _tensors(
        self, mapped: Sequence[MappedTensor], change: Change, rest: Rest
    ) -> tuple[OutputTensor, ...]:
        entries = self.catalog.tensors
        placed = paths(mapped, entries, change, self.known.root, self.keep_root)
        pinned = change.family.pinned if change.family else ()
        aliases = self._keeps_ties(mapped)
        model = output_tensors(
            mapped, entries, placed, dtype=self.options.dtype, pinned=pinned, aliases=aliases
        )
        others = output_tensors(
            rest.tensors, entries, rest.paths, dtype=None, pinned=(), aliases=aliases
        )
        return (*model, *others)

    def _keeps_ties(self, mapped: Sequence[MappedTensor]) -> bool:
        """Whether tensors that share memory go on doing so; an hf reader would miss one of them."""
        if self.target.nested or (self.known.config or {}).get("tie_word_embeddings") is True:
            return True
        names = [m.targets[0].key for m in mapped if self._entry(m).alias_of]
        if names:
            self.notes.append(f"shared tensors are written out in full: {listed(names)}")
        return False

    def _entry(self, mapped: MappedTensor) -> TensorEntry:
        return self.catalog.tensors[mapped.sources[0].key]

    def _blobs(self, change: Change, rest: Rest) -> list[Blob]:
        """The leaves that are not tensors and travel."""
        outside = {blob.name for blob in rest.blobs}
        root, kept = self.known.root, list(rest.blobs)
        for name, blob in self.catalog.blobs.items():
            if name in self.left_out or name in outside or not name.startswith(root):
                continue
            if not self.target.nested:
                self.left_out[name] = f"{self.target.name} holds tensors only"
            elif not change.identity and not self.keep_root:
                self.left_out[name] = f"layout {change.target_layout} has no place for it"
            else:
                kept.append(blob if self.keep_root else unrooted(blob, root))
        return kept

    def _request(
        self, tensors: tuple[OutputTensor, ...], blobs: list[Blob], change: Change
    ) -> OutputRequest:
        like = reference(self.options.like, self.options.to)
        request = OutputRequest(
            name=self.destination.name,
            tensors=tensors,
            blobs=blobs,
            max_shard_size=self.options.max_shard_size,
            mp=self.options.mp,
            rank_boxes=_rank_boxes(change, self.options.mp),
            checksum=self.options.checksum,
        )
        if like is None:
            return request
        require_same_keys(like, [tensor.name for tensor in tensors])
        if self.target.layout == "meta":
            ranks = len(like.files)
            return replace(request, mp=ranks, rank_boxes=_rank_boxes(change, ranks))
        return replace(request, like=like.file_of, like_files=like.files)

    def _papers(self, change: Change, tensors: tuple[OutputTensor, ...]) -> Papers:
        found = papers(
            self.assets,
            self.options.to,
            change,
            ranks=self.options.mp,
            dtype=main_dtype(tensors),
            cast=self.options.dtype is not None,
        )
        self.documents = found.contents
        return found

    def _executable(
        self,
        mapped: Sequence[MappedTensor],
        tensors: tuple[OutputTensor, ...],
        output: Output,
        beside: Papers,
    ) -> Plan:
        by_name = {tensor.name: tensor.dtype for tensor in tensors}
        copies = tuple(transfers(mapped, self.catalog.tensors, output, by_name))
        raw = (*output.raw_copies, *beside.copies)
        files = (*output.files, *beside.files)
        digest = digest_of(
            self.options.checksum, files, output.records, copies, raw, beside.contents
        )
        if self.options.checksum and not self.target.single_file:
            head = {"source": self._provenance(), "plan": digest}
            files = (*files, manifest(head, tensors, output.boxes, output.records))
        return Plan(
            source_root=self.catalog.root,
            sources=self._sources(copies, output.raw_copies),
            target=str(self.destination),
            single_file=self.target.single_file,
            files=files,
            records=output.records,
            transfers=copies,
            raw_copies=raw,
            digest=digest,
        )

    def _provenance(self) -> dict[str, object]:
        return {
            "name": Path(self.catalog.path).name,
            "format": self.catalog.format,
            "layout": self.known.layout,
            "model_type": self.known.model_type,
        }

    def _sources(
        self, copies: Sequence[Transfer], raw: Sequence[RawCopy]
    ) -> dict[str, FileIdentity]:
        names = dict.fromkeys(o.file for copy in copies for o in copy.source.operands)
        names |= dict.fromkeys(item.source for item in raw)
        with SourceFiles(self.catalog.root) as files:
            return {name: files.identity(name) for name in names}


def _rank_boxes(change: Change, ranks: int) -> Callable[[OutputTensor], Sequence[Box]] | None:
    family = change.family
    if family is None or ranks == 1:
        return None

    def boxes(tensor: OutputTensor) -> Sequence[Box]:
        sizes = change.sizes or {}
        return split(family, "meta", tensor.name, tensor.shape, sizes, ranks).boxes

    return boxes
