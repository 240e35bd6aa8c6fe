"""Draft of a conversion plan, which the planning stages complete step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptctl.catalog import Blob, Catalog
from ckptctl.conversion.assets import Assets
from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.conversion.destinations import Destination
from ckptctl.conversion.recognition.model import Model
from ckptctl.conversion.recognition.roots import ModelLeaves
from ckptctl.errors import format_option
from ckptctl.formats.base import OutputLayout, OutputTensor, WritableFormat
from ckptctl.notes import Notes
from ckptctl.planner.layouts import BASE, HF, is_base_layout
from ckptctl.planner.mapping.mapped import ComposedTensor, RedundantData
from ckptctl.planner.mapping.tensors import LayoutChange
from ckptctl.planner.plan import RawCopy


@dataclass(frozen=True, slots=True)
class Quantization:
    """Quantized tensors of an output.

    Attributes:
        original_tensors: The tensors of the output before quantization.
        parts: Maps the name of each quantized tensor and each scale tensor to the name of the
            original tensor that it is computed from.
        config: Value of the field ``quantization_config`` in the output's config.json.
        is_lossless: Whether the weights were quantized already and keep their values
            (``--repack``).
        layout: Layout of the output if quantization separates experts and so changes it, or None.
    """

    original_tensors: tuple[OutputTensor, ...]
    parts: Mapping[str, str]
    config: Mapping[str, object] = field(default_factory=dict)
    is_lossless: bool = False
    layout: str | None = None

    @property
    def weights(self) -> tuple[str, ...]:
        """Names, before quantization, of the weights that are quantized."""
        return tuple(dict.fromkeys(self.parts.values()))

    @property
    def unquantized(self) -> tuple[OutputTensor, ...]:
        """Output tensors that are matrices or stacks of matrices and are not quantized."""
        quantized = set(self.weights)
        return tuple(
            tensor
            for tensor in self.original_tensors
            if tensor.name not in quantized and len(tensor.shape) > 1
        )


@dataclass(frozen=True, slots=True)
class Draft:
    """Incomplete plan of a conversion. Each planning stage takes a draft and returns a new one.

    Fields are grouped by the function that sets them first. Before that function has run, a field
    is empty, except *model* and *located*, which start as the opened checkpoint. Later steps may
    change any field.

    Attributes:
        options: Options of the conversion. Set by ``open_draft``, as are the next six fields.
        target: Output format.
        destination: Destination of the output.
        source: Catalog of the source as it was opened, which no step changes.
        assets: Configuration and sidecar files. Steps may change them.
        model: Checkpoint as changed by the steps that have run. ``understand_model`` adds the model
            type, layout and prefix.
        located: Catalog of the same checkpoint in which the bytes to read are located, with virtual
            tensors. Set by ``list_output_tensors``. Earlier steps use *catalog*.
        notes: Notes for the user.
        like: Catalog of the ``--like`` checkpoint, whose sharding is reused, or None.
        base: Catalog of the checkpoint that supplies missing tensors, or None. Set by
            ``--fill-from``, as are the next two fields.
        filled_from: Maps the name in *catalog* of each tensor that is read from *base* to its name
            in *base*. If several tensors of *base* are merged, it is the name of the first.
        origins: Maps the name in *catalog* of each tensor that ``--fill-from`` renamed to its name
            in *source*.
        selection: Tensors and other values to convert. Set by ``select_tensors``, as are the next
            three fields.
        expected_names: Names of all tensors that the model should have, including tensors that are
            not selected.
        missing: Names of absent or incomplete items that cannot be converted, with reasons.
        reference: Package, version and class that determine the tensors of a model without a table,
            or an empty string.
        change: Mapping of the model's tensors to the target layout. Set by ``plan_layout_change``.
        mapped: Output tensors by name, each composed of elements of tensors in *located*. Set by
            ``list_output_tensors``, as are the next three fields.
        tensors: Output tensors, in order.
        blobs: Non-tensor values of the output.
        redundant: Elements of tensors in *located* that are dropped. Before anything is written,
            ``run_conversion`` proves that they are zero or equal to other elements.
        quantization: Tensors that are quantized while they are copied, or None. Set by
            ``--quantize``.
        adapter: Parsed adapter_config.json for the output, or None. Set by ``describe-adapter``.
        output_layout: Files and offsets of the output tensors. Set by ``lay_out``, as is the next
            field.
        strings: Metadata strings that the output files store, by key.
        written: Contents of sidecar files to write, by name. Set by steps at ``files``, as is the
            next field.
        copies: Sidecar files to copy from the source or from ``--assets``.
    """

    options: ConversionOptions
    target: WritableFormat
    destination: Destination
    source: Catalog
    assets: Assets
    model: Model
    located: Catalog
    notes: Notes = field(default_factory=Notes)
    like: Catalog | None = None
    base: Catalog | None = None
    filled_from: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    selection: ModelLeaves = field(default_factory=lambda: ModelLeaves("", {}, {}, ()))
    expected_names: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    reference: str = ""
    change: LayoutChange = field(default_factory=lambda: LayoutChange(None, None, None, ()))
    mapped: Mapping[str, ComposedTensor] = field(default_factory=dict)
    tensors: tuple[OutputTensor, ...] = ()
    blobs: Sequence[Blob] = ()
    redundant: tuple[RedundantData, ...] = ()
    quantization: Quantization | None = None
    adapter: Mapping[str, object] | None = None
    output_layout: OutputLayout = field(default_factory=lambda: OutputLayout((), (), {}))
    strings: Mapping[str, str] = field(default_factory=dict)
    written: Mapping[str, bytes] = field(default_factory=dict)
    copies: tuple[RawCopy, ...] = ()

    @property
    def catalog(self) -> Catalog:
        """Catalog of the checkpoint as changed by the steps that have run."""
        return self.model.catalog

    def with_catalog(self, catalog: Catalog) -> Draft:
        """Return a copy of the draft whose model is read from *catalog*."""
        return replace(self, model=replace(self.model, catalog=catalog))

    def argument_of(self, step: str) -> str:
        """Return the value of *step* in ``--step NAME=VALUE``, or "" if it has none."""
        assignments = (text.partition("=") for text in self.options.step)
        return next((value for name, _, value in assignments if name == step), "")

    @property
    def is_adapter(self) -> bool:
        """Whether the checkpoint is an adapter, which contains low-rank factors."""
        return self.model.is_adapter

    @property
    def includes_training_state(self) -> bool:
        """Whether to convert training state and keep prefixes (``--only all``)."""
        return self.options.only == "all"

    @property
    def output_root(self) -> str:
        """Prefix of the model's tensor names in the output, or an empty string."""
        return self.model.root if self.includes_training_state else ""

    @property
    def layout(self) -> str | None:
        """Layout of the output, or None to keep the layout of the source.

        A model without a head keeps names such as ``layers.0``, which transformers also loads.
        """
        source_layout, adapted = self.model.layout, self.target.adapter_layouts
        if self.options.to_layout:
            return self.options.to_layout
        if is_base_layout(source_layout) and self.target.layout == HF:
            return BASE
        if adapted and self.is_adapter:
            return source_layout if source_layout in adapted else adapted[0]
        return self.target.layout

    @property
    def stored_tensors(self) -> tuple[OutputTensor, ...]:
        """Tensors that the output stores, excluding tied tensors that ``--tied drop`` omits."""
        if self.options.tied != "drop":
            return self.tensors
        return tuple(tensor for tensor in self.tensors if tensor.alias_of is None)

    @property
    def ranks(self) -> int:
        """Number of model-parallel ranks that the output is split across."""
        return len(self.like.files) if self.like and self.target.parallel else self.options.mp

    @property
    def keep_hint(self) -> str:
        """Error hint that names the options which keep training state."""
        everything = (
            format_option("--only all")
            if self.target.nested
            else format_option("--to dcp", "--only all")
        )
        return f"pass {everything}, or consolidate's {format_option('--optimizer')}, to keep it"
