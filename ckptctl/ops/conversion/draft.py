"""A conversion while it is planned: what is read, what becomes of it, and what is still open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptctl.catalog import Blob, Catalog
from ckptctl.errors import MappingError, spell_option
from ckptctl.formats.base import Output, OutputTensor, WritableFormat
from ckptctl.notes import Notes
from ckptctl.ops.conversion.assets import Assets
from ckptctl.ops.conversion.options import ConversionOptions
from ckptctl.ops.destinations import Destination
from ckptctl.ops.recognition.model import Model
from ckptctl.ops.recognition.roots import Selection
from ckptctl.planner.layouts import BASE, HF, is_base
from ckptctl.planner.mapping.adapters import is_adapter
from ckptctl.planner.mapping.mapped import ComposedTensor
from ckptctl.planner.mapping.tensors import Change
from ckptctl.planner.plan import RawCopy
from ckptctl.planner.quantization.recipes import WEIGHT, Recipe
from ckptctl.planner.quantization.statement import QUANTIZATION

HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class Quantization:
    """What of an output is quantized, and how.

    Attributes:
        recipe: How.
        plain: The tensors that the output would have without.
        parts: For each quantized tensor, and each of its scales, the plain one it stands for.
    """

    recipe: Recipe
    plain: tuple[OutputTensor, ...]
    parts: Mapping[str, str]

    def described(self, config: Mapping[str, object] | None) -> Mapping[str, object]:
        """Return config.json with what programs have to know of it."""
        if config is None:
            raise MappingError(
                f"{spell_option('--quantize')} requires config.json, which is missing",
                why="loaders read the quantization scheme from it",
                hint=f"pass {spell_option('--assets DIR')} to copy it from the trained model's "
                "folder",
            )
        return {**config, QUANTIZATION: self.recipe.config(self.ignored)}

    @property
    def weights(self) -> tuple[str, ...]:
        """Return the names of the plain tensors that are quantized."""
        return tuple(dict.fromkeys(self.parts.values()))

    @property
    def left(self) -> tuple[OutputTensor, ...]:
        """Return the matrices, and stacks of such, that stay as they are."""
        made = set(self.weights)
        return tuple(one for one in self.plain if one.name not in made and len(one.shape) > 1)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return the modules of these; stacked experts are parameters of one.

        A head that is tied to the embeddings is no tensor of its own, and stays as they do.
        """
        stacks = (one.name for one in self.left if len(one.shape) > 2)
        apart = {name: name.rpartition(".")[0] for name in stacks if not name.endswith(WEIGHT)}
        named = (apart.get(one.name, one.name) for one in self.left)
        found = (name for name in named if name.endswith(WEIGHT) or name in apart.values())
        tied = not any(one.name.endswith(f"{HEAD}{WEIGHT}") for one in self.plain)
        return tuple(dict.fromkeys((*(n.removesuffix(WEIGHT) for n in found), *[HEAD] * tied)))


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint on its way to the output; each stage and step takes one and returns one.

    What no stage has decided yet is empty.

    Attributes:
        options: What is asked for.
        target: The format that is written.
        destination: Where the output is made.
        source: The checkpoint as it was opened.
        assets: Its configuration and side files.
        model: The model, in the checkpoint as steps have changed it.
        inputs: That checkpoint with the bytes of the tensors that are read.
        notes: Collects what is said while it is planned.
        like: The checkpoint whose division into files is reused, or None.
        base: The checkpoint that missing tensors are taken from, or None.
        taken: Names of the tensors of *base* in the model's checkpoint, and what they are there; of
            several that become one, the first.
        origins: Names in *source* of tensors that the model's checkpoint calls otherwise.
        selection: The leaves that are converted.
        whole: Names in the model of all tensors that it should have, selected or not.
        missing: What would be converted if it were there and complete, and why it is not.
        change: How the model's layout changes.
        mapped: What each tensor of the output is made of, by its name.
        tensors: The tensors of the output, in order.
        blobs: Its other leaves.
        must_equal: Names in the source, kept and dropped, whose bytes have to be the same.
        quantization: What is quantized on the way, or None.
        output: Where everything goes in the files of the output.
        strings: The strings that these files carry.
        written: Files beside them, with what is in them.
        copies: Files beside them that are copied.
    """

    options: ConversionOptions
    target: WritableFormat
    destination: Destination
    source: Catalog
    assets: Assets
    model: Model
    inputs: Catalog
    notes: Notes = field(default_factory=Notes)
    like: Catalog | None = None
    base: Catalog | None = None
    taken: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    selection: Selection = field(default_factory=lambda: Selection("", {}, {}, ()))
    whole: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    change: Change = field(default_factory=lambda: Change(None, None, None, ()))
    mapped: Mapping[str, ComposedTensor] = field(default_factory=dict)
    tensors: tuple[OutputTensor, ...] = ()
    blobs: Sequence[Blob] = ()
    must_equal: tuple[tuple[str, str], ...] = ()
    quantization: Quantization | None = None
    output: Output = field(default_factory=lambda: Output((), (), {}))
    strings: Mapping[str, str] = field(default_factory=dict)
    written: Mapping[str, bytes] = field(default_factory=dict)
    copies: tuple[RawCopy, ...] = ()

    @property
    def catalog(self) -> Catalog:
        """Return the checkpoint as steps have changed it."""
        return self.model.catalog

    def with_catalog(self, catalog: Catalog) -> Draft:
        """Return the same of a changed checkpoint."""
        return replace(self, model=replace(self.model, catalog=catalog))

    def argument_of(self, step: str) -> str:
        """Return the value of ``--step NAME=VALUE``, or an empty string without one."""
        given = (one.partition("=") for one in self.options.step)
        return next((value for name, _, value in given if name == step), "")

    @property
    def is_adapter(self) -> bool:
        """Whether it has low-rank factors."""
        return is_adapter(self.catalog.tensors)

    @property
    def everything(self) -> bool:
        """Whether what surrounds the model is converted, too; then the model keeps its prefix."""
        return self.options.only == "all"

    @property
    def kept_root(self) -> str:
        """Prefix of the model's names in the output."""
        return self.model.root if self.everything else ""

    @property
    def layout(self) -> str | None:
        """Layout to write, or None for that of the source.

        Transformers reads models without their head under either kind of names.
        """
        own, adapted = self.model.layout, self.target.adapter_layouts
        if self.options.to_layout:
            return self.options.to_layout
        if is_base(own) and self.target.layout == HF:
            return BASE
        if adapted and self.is_adapter:
            return own if own in adapted else adapted[0]
        return self.target.layout

    @property
    def own_tensors(self) -> tuple[OutputTensor, ...]:
        """Tensors of the output without those that ``--tied drop`` drops."""
        if self.options.tied != "drop":
            return self.tensors
        return tuple(one for one in self.tensors if one.alias_of is None)

    @property
    def ranks(self) -> int:
        """Number of model-parallel ranks that the output is divided among."""
        return len(self.like.files) if self.like and self.target.parallel else self.options.mp

    @property
    def keep_hint(self) -> str:
        """Say which options keep what surrounds the model."""
        everything = (
            spell_option("--only all")
            if self.target.nested
            else spell_option("--to dcp", "--only all")
        )
        return f"pass {everything}, or consolidate's {spell_option('--optimizer')}, to keep it"
