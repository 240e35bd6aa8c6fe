"""From a recognised checkpoint and options to a complete plan, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ckptctl import formats
from ckptctl.catalog import Blob, Catalog
from ckptctl.errors import DamagedError, MappingError, RefusedError, command
from ckptctl.formats.base import Output, OutputRequest, OutputTensor, WritableFormat
from ckptctl.formats.checksums import MANIFEST
from ckptctl.formats.shared.unknown_classes import require_known
from ckptctl.ops.conversion.adapter_files import adapter_config_files
from ckptctl.ops.conversion.assets import Assets
from ckptctl.ops.conversion.checks import (
    Divide,
    reference,
    require_same_keys,
    require_scaled,
    require_whole_blocks,
)
from ckptctl.ops.conversion.config_files import ConfigFiles, config_files
from ckptctl.ops.conversion.executable import LaidOut, executable, provenance
from ckptctl.ops.conversion.leaves import (
    Parts,
    inside_model,
    keep_together,
    same_data,
    strings,
    unpacked,
)
from ckptctl.ops.conversion.missing import (
    Missing,
    asked_of,
    dependent,
    leave_out,
    present,
    without,
)
from ckptctl.ops.conversion.options import ConversionOptions
from ckptctl.ops.conversion.output_tensors import (
    in_checkpoint,
    main_dtype,
    output_tensors,
    paths,
    shared_memory,
    tied_away,
    unrooted,
    written_in_full,
)
from ckptctl.ops.conversion.plan import ConversionPlan
from ckptctl.ops.conversion.training import Rest, follow
from ckptctl.ops.destinations import Destination
from ckptctl.ops.recognition.dequantise import made
from ckptctl.ops.recognition.lacking import lacks, require_one_model, root_hint
from ckptctl.ops.recognition.layout_change import LayoutRequest, change_layout
from ckptctl.ops.recognition.recognise import Recognition
from ckptctl.ops.recognition.selection import Selection, chosen, select
from ckptctl.ops.sources import located
from ckptctl.planner.axes import Sizes
from ckptctl.planner.layouts import BASE, HF
from ckptctl.planner.mapping.adapters import is_adapter
from ckptctl.planner.mapping.mapped import MappedTensor
from ckptctl.planner.mapping.tensors import Change
from ckptctl.planner.model_parallel import RankShard, divide

KEPT = "`--only all`, or consolidate's `--optimizer`, keeps it"


class Draft:
    """A plan in the making: each step adds to what the later ones need.

    Args:
        catalog: The source.
        recognition: What it was recognised as.
        options: What is asked for.
        target: The format to write.
        destination: Where the output goes.
        assets: Configuration and side files.
        missing: What of the source is not whole.
    """

    def __init__(
        self,
        catalog: Catalog,
        recognition: Recognition,
        options: ConversionOptions,
        target: WritableFormat,
        destination: Destination,
        assets: Assets,
        missing: Missing | None = None,
    ) -> None:
        self.source = self.catalog = catalog
        self.recognition, self.options = recognition, options
        self.target, self.destination, self.assets = target, destination, assets
        self.like = reference(options.like, options.to)
        self.whole: tuple[str, ...] = ()
        self.left_out: dict[str, str] = {}
        self.tied: dict[str, str] = {}
        self.gone = missing or Missing()
        self.missing: dict[str, str] = {}
        self.parts: Parts = {}
        self.notes: list[str] = [*catalog.notes, *assets.notes(target)]
        self.warnings: list[str] = []

    def plan(self) -> ConversionPlan:
        """Go through the steps."""
        selection = self._selected()
        change = self._change(selection)
        selection = self._without_parts(selection, change)
        rest = self._rest(selection, change)
        mapped = self._mapped(change)
        read = [*mapped, *rest.tensors]
        equal = self._equal(change, rest)
        self._locate(read, change, equal)
        tensors = self._tensors(mapped, change, rest)
        divide = _divide(change, self.target.layout) if self.ranks > 1 else None
        if divide:
            require_whole_blocks(self._described(), mapped, tensors, divide, self.ranks)
        blobs = self._blobs(selection, change, rest)
        said = strings(self.source, tensors, self.target)
        request = replace(self._request(tensors, blobs, divide), metadata=said.kept)
        output = self.target.lay_out(request)
        if said.kept and not same_data(self.source, read, output):
            said = said.without_hashes()
            output = self.target.lay_out(replace(request, metadata=said.kept))
        self.left_out |= said.left_out
        beside = self._config_files(change, tensors)
        _require_apart(output, beside)
        single_file = self.target.single_file
        laid = LaidOut(read, tensors, output, beside, self.destination.path, single_file, said.kept)
        return self._finished(laid, change, equal)

    def _change(self, selection: Selection) -> Change:
        """Say what the model's tensors become, and note what the user should know of it."""
        asked = LayoutRequest(
            self.layout,
            self.catalog.path,
            source_layout=formats.get(self.catalog.format).layout,
            described=self.target.parallel or self.target.described,
            untie=written_in_full(self.options, self.catalog, self.recognition),
            partial=bool(self.options.include or self.options.exclude or self.missing),
            given=self.options.sizes or {},
            vocab=self.options.vocab_size,
            whole=self.whole,
            missing={name.removeprefix(self.recognition.root) for name in self.missing},
            documents=self.assets.described,
            trust_assets=self.options.trust_assets,
        )
        if self.options.only == "model":
            require_one_model(self.recognition, self.catalog.path)
        change = change_layout(self.recognition, selection.tensors, asked)
        self.notes += change.notes
        self.warnings += self._strange(change)
        self.notes += [f"`{fact}`: {why}" for fact, why in change.decided.items()]
        keep_together(
            self.catalog,
            {self.recognition.root + name for name in selection.tensors},
            renamed=not change.identity,
            dtype=self.options.dtype,
        )
        return change

    def _without_parts(self, selection: Selection, change: Change) -> Selection:
        """Return *selection* without what is nothing without what is missing, and note that."""
        root = self.recognition.root
        lost = {root + name: why for name, why in change.left_out.items()}
        everything = {root + name for name in (*selection.tensors, *change.left_out)}
        outside = selection.rest if self.keep_root else ()
        gone = {**self.missing, **lost}
        self.missing = {**dependent(gone, everything | gone.keys(), outside, root), **gone}
        return without(selection, self.missing)

    def _strange(self, change: Change) -> list[str]:
        """Warn of names that become Hugging Face's only in that they are in its files."""
        cut = bool(self.recognition.root) and not self.keep_root
        new = self.target.layout == "hf" and (
            cut or formats.get(self.catalog.format).layout != "hf"
        )
        if (
            change.family
            or self.recognition.candidates
            or not new
            or is_adapter(self.catalog.tensors)
        ):
            return []
        return [f"the model type is not known, all names are kept: {root_hint(self.recognition)}"]

    def _mapped(self, change: Change) -> list[MappedTensor]:
        """Return the model's tensors by their names in both checkpoints; those made up, too."""
        root = self.recognition.root
        mapped = in_checkpoint(change.tensors, root, self.keep_root)
        prefix = root if self.keep_root else ""
        self.catalog, zeros = made(self.catalog, change.zeros, root, prefix)
        return [*mapped, *zeros]

    def _finished(
        self, laid: LaidOut, change: Change, equal: tuple[tuple[str, str], ...]
    ) -> ConversionPlan:
        """Return the plan, with all that was noted on the way."""
        self.left_out |= laid.output.left_out
        self.notes += [*laid.output.notes, *laid.beside.notes]
        return ConversionPlan(
            source=self.catalog,
            recognition=self.recognition,
            options=self.options,
            change=change,
            output=laid.tensors,
            plan=executable(
                self.catalog,
                laid,
                checksum=self.options.checksum,
                provenance=provenance(self.catalog, self.recognition, self.missing),
            ),
            must_equal=equal,
            dropped={**change.dropped, **self.tied},
            left_out=self.left_out,
            notes=tuple(dict.fromkeys(self.notes)),
            warnings=tuple(self.warnings),
            free_bytes=self.destination.free_bytes(),
            upload=self.destination.upload,
            missing=self.missing,
            not_carried=self.assets.not_carried(self.target),
        )

    @property
    def layout(self) -> str | None:
        """Return the layout to write; None: that of the source.

        Transformers reads models without their head under either kind of names.
        """
        implied = BASE if self.recognition.layout == BASE and self.target.layout == HF else None
        return self.options.to_layout or implied or self.target.layout

    @property
    def keep_root(self) -> bool:
        """Return whether the model stays under its prefix: where its surroundings stay too."""
        return self.options.only == "all"

    def _selected(self) -> Selection:
        selection = select(self.catalog, self.recognition.root)
        self.whole = tuple(selection.tensors)
        if self.options.only == "model":
            reason = (
                "not part of the model (`--only all`, or consolidate's `--optimizer`, keeps it)"
            )
            self.left_out |= dict.fromkeys(selection.rest, reason)
        options = self.options
        there = present(self.catalog, selection, self.gone)
        lacking = lacks(self.recognition, there, options.sizes or {}, self.layout)
        selection, unwanted = chosen(
            selection, options.include, options.exclude, self.keep_root, lacking.names
        )
        self.left_out |= dict.fromkeys(unwanted, "not chosen (`--include`, `--exclude`)")
        nothing = not self.catalog.tensors and bool(self.gone)
        if not selection.tensors and not nothing and not (self.keep_root and selection.rest):
            raise MappingError(
                "no tensor is left to convert",
                where=self.catalog.path,
                why="it holds training state and no model" if selection.rest else None,
                hint=KEPT if selection.rest else None,
            )
        selection = self._whole(selection) if self.gone else selection
        lacking = asked_of(lacking, self.catalog, options)
        if not options.allow_missing:
            lacking.require_whole(self.catalog.path)
        self.whole += lacking.names if lacking.certain else ()
        self.missing |= lacking.missing
        self.notes += lacking.doubts
        return selection

    def _whole(self, selection: Selection) -> Selection:
        """Return what is whole of *selection*, and note what is not."""
        self.whole, self.missing = leave_out(
            self.catalog, selection, self.gone, self.whole, self.options
        )
        selection = without(selection, self.missing)
        if not selection.tensors:
            lacking = self.missing or self.gone.names
            name, why = next(iter(lacking.items()))
            raise DamagedError(
                "nothing whole is left to convert",
                where=self.catalog.path,
                why=f"`{name}`: {why}; in all {len(lacking):,} are missing",
                hint=f"{command('verify', self.catalog.path)} lists what is missing",
            )
        return selection

    def _rest(self, selection: Selection, change: Change) -> Rest:
        self._read_values()
        outside = [part for name in selection.rest for part in self.parts.get(name, (name,))]
        root, kept = self.recognition.root, self.keep_root
        rest = follow(self.catalog, outside if kept else (), root, change)
        for item, path in inside_model(self.catalog, self.parts, outside, root, kept):
            if change.identity or kept:
                rest.tensors.append(item)
                rest.paths[item.targets[0].key] = path
            else:
                self.left_out[item.sources[0].key] = _no_place(change)
        return rest

    def _read_values(self) -> None:
        """Read the leaves that are not tensors and that travel; refuses hostile ones."""
        apart = self.left_out.keys() | self.missing.keys()
        names = self.catalog.blobs.keys() - apart if self.target.nested else ()
        blobs = {name: self.catalog.blobs[name] for name in self.catalog.blobs if name in names}
        read = formats.resolve(replace(self.catalog, tensors={}, blobs=blobs))
        self.catalog = replace(self.catalog, blobs={**self.catalog.blobs, **read.blobs})
        if not self.target.verbatim:
            self.catalog, self.parts = unpacked(self.catalog, read.blobs)
        parts = [part for name in read.blobs for part in self.parts.get(name, (name,))]
        leaves = (self.catalog.blobs[part] for part in parts if part in self.catalog.blobs)
        require_known(leaves, verbatim=self.target.verbatim)

    def _equal(self, change: Change, rest: Rest) -> tuple[tuple[str, str], ...]:
        """Names in the checkpoint, kept and left out, that have to hold the same."""
        root = self.recognition.root
        pairs = ((root + kept, root + dropped) for kept, dropped in change.must_equal)
        return (*pairs, *rest.must_equal)

    def _locate(
        self, mapped: Sequence[MappedTensor], change: Change, equal: Sequence[tuple[str, str]]
    ) -> None:
        """Prove coverage of what is needed, and find its bytes."""
        root = self.recognition.root
        needed = {view.key for item in mapped for view in item.sources}
        needed |= {name for pair in equal for name in pair}
        needed |= {root + name for name in change.must_be_zero}
        names = [name for name in self.catalog.tensors if name in needed]
        self.catalog = replace(self.catalog, tensors=located(self.catalog, names).tensors)

    def _tensors(
        self, mapped: Sequence[MappedTensor], change: Change, rest: Rest
    ) -> tuple[OutputTensor, ...]:
        entries = self.catalog.tensors
        placed = paths(mapped, entries, change, self.recognition.root, self.keep_root)
        pinned = change.family.pinned if change.family else ()
        aliases, said = shared_memory(
            self.options, self.target, self.recognition, self.catalog, mapped
        )
        self.notes += said
        model = output_tensors(
            mapped, entries, placed, dtype=self.options.dtype, pinned=pinned, aliases=aliases
        )
        require_scaled(self.options, mapped, entries, model)
        others = output_tensors(
            rest.tensors, entries, rest.paths, dtype=None, pinned=(), aliases=aliases
        )
        tensors = (*model, *others)
        if self.options.tied != "drop":
            return tensors
        self.tied = tied_away(tensors)
        return tensors if self.target.records_ties else tuple(t for t in tensors if not t.alias_of)

    def _blobs(self, selection: Selection, change: Change, rest: Rest) -> list[Blob]:
        """The leaves that are not tensors and travel."""
        outside = {part for name in selection.rest for part in self.parts.get(name, (name,))}
        root, kept = self.recognition.root, list(rest.blobs)
        for name, blob in self.catalog.blobs.items():
            apart = name in self.left_out or name in self.missing or name in outside
            if apart or not name.startswith(root):
                continue
            if not self.target.nested:
                self.left_out[name] = f"{self.target.name} holds tensors only"
            elif not change.identity and not self.keep_root:
                self.left_out[name] = _no_place(change)
            else:
                kept.append(blob if self.keep_root else unrooted(blob, root))
        return kept

    def _request(
        self, tensors: tuple[OutputTensor, ...], blobs: list[Blob], divide: Divide | None
    ) -> OutputRequest:
        request = OutputRequest(
            name=self.destination.path.name,
            tensors=tensors,
            blobs=blobs,
            max_shard_size=self.options.shard_bytes,
            mp=self.ranks,
            rank_boxes=partial(divide, ranks=self.ranks) if divide else None,
            checksum=self.options.checksum,
        )
        if self.like is None:
            return request
        require_same_keys(self.like, [tensor.name for tensor in tensors])
        if self.target.parallel:
            return request
        return replace(request, like=self.like.file_of, like_files=self.like.files)

    def _described(self) -> Catalog:
        """Return the source with all that is said of it, by `--assets`, too."""
        said = {**self.catalog.documents, **self.assets.documents}
        return replace(self.catalog, documents=said)

    @property
    def ranks(self) -> int:
        """Return the number of model-parallel shards: of the reference, or as asked for."""
        if self.like is not None and self.target.parallel:
            return len(self.like.files)
        return self.options.mp

    def _config_files(self, change: Change, tensors: tuple[OutputTensor, ...]) -> ConfigFiles:
        if is_adapter(self.catalog.tensors):
            return adapter_config_files(
                self.catalog, self.assets, change, self.target, self.options.lora_alpha
            )
        return config_files(
            self.assets,
            self.options.to,
            change,
            ranks=self.ranks,
            dtype=main_dtype(tensors),
            cast=(self.options.dtype or self.options.dequantize) is not None,
        )


def _require_apart(output: Output, beside: ConfigFiles) -> None:
    """Refuse a file that is carried along under the name of one that is written."""
    written = {MANIFEST, *(file.path for file in output.files)}
    twice = [file.path for file in beside.files if file.path in written]
    if twice:
        raise RefusedError(
            "a file that is carried along would replace one of the output",
            where=f"`{twice[0]}`",
            hint="`--carry` with a narrower GLOB leaves it out",
        )


def _no_place(change: Change) -> str:
    return f"layout {change.target_layout} has no place for it"


def _divide(change: Change, layout: str | None) -> Divide | None:
    """Return how ranks divide tensors; None: nobody knows."""
    family, sizes = change.family, Sizes(change.sizes or {}, {})
    if family is None or layout is None:
        return None

    def shares(tensor: OutputTensor, ranks: int) -> Sequence[RankShard | None]:
        return divide(family, layout, tensor.name, tensor.shape, sizes, ranks)

    return shares
