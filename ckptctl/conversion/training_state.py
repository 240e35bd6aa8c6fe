"""Training state that ``--only all`` adds: optimizer state, counters and other leaves.

The name of a moment contains the fully qualified name of its parameter
(``optimizer.state.<fqn>.exp_avg``, ``torch/distributed/checkpoint/state_dict.py``). Moments are
fused, split, stacked and permuted like their parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptctl import formats
from ckptctl.catalog import Blob, Catalog, Path, TensorEntry
from ckptctl.conversion.recognition.layout_change import with_sums, with_zeros
from ckptctl.errors import RefusedError, spell_option
from ckptctl.formats.shared.leaves import join
from ckptctl.planner.mapping.mapped import (
    ComposedTensor,
    RedundantData,
    SourceTensor,
    ZeroTensor,
    compose_tensors,
)
from ckptctl.planner.mapping.tensors import LayoutChange

COPIES = frozenset({"fp32_param", "master_param"})
"""Names of optimizers' own copies of parameters."""
_STATISTIC = re.compile(r"avg|moment")
"""Pattern in the names of gradient statistics."""


@dataclass(slots=True)
class Rest:
    """Leaves outside the model, by name in the output.

    Attributes:
        tensors: Tensors by name; their source keys are names in the checkpoint.
        paths: Key path of each tensor.
        blobs: Non-tensor values.
        redundant: Counters that are dropped because their parameters are merged.
        zeros: Zeros that pad moments like their parameters.
    """

    tensors: dict[str, ComposedTensor] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    blobs: list[Blob] = field(default_factory=list)
    redundant: list[RedundantData] = field(default_factory=list)
    zeros: list[ZeroTensor] = field(default_factory=list)

    def add_virtual_tensors(self, catalog: Catalog) -> Catalog:
        """Add the virtual zeros and sums that *tensors* are computed from to *catalog*."""
        return with_sums(with_zeros(catalog, self.zeros, ""), self.tensors.values())


def follow(catalog: Catalog, names: Sequence[str], root: str, change: LayoutChange) -> Rest:
    """Map the leaves called *names* to match the mapped parameters."""
    tensors = [catalog.tensors[name] for name in names if name in catalog.tensors]
    blobs = [catalog.blobs[name] for name in names if name not in catalog.tensors]
    moments = [entry.name for entry in tensors if entry.shape]
    if change.vocab is not None and moments:
        raise RefusedError(
            "cannot resize optimizer state to another vocabulary size",
            where=f"tensor `{moments[0]}`",
            why=f"{spell_option('--vocab-size')} only pads or truncates parameters",
            hint=f"pass {spell_option('--only model')}",
        )
    _require_no_parts(catalog, tensors, change)
    if change.keeps_names or not names:
        same = (
            ComposedTensor.from_unchanged(entry.name, entry.name, entry.shape) for entry in tensors
        )
        return Rest(
            {one.key: one for one in same}, {entry.name: entry.path for entry in tensors}, blobs
        )
    run = _Follow(catalog, root, change)
    for entry in tensors:
        run.tensor(entry)
    for blob in blobs:
        run.blob(blob)
    run.moments()
    return run.rest


def _require_no_parts(
    catalog: Catalog, tensors: Sequence[TensorEntry], change: LayoutChange
) -> None:
    """Raise if optimizer state was saved for parts of a parameter that are now merged."""
    merged = formats.merged_parameters(catalog, [entry.name for entry in tensors])
    own = {source.key for item in change.tensors for source in item.sources} if merged else {}
    for name, whole in merged.items():
        parameter = next((part for part in name_parts(whole) if part in own), None)
        if parameter is not None:
            raise RefusedError(
                "cannot map optimizer state to its parameter",
                where=f"tensor `{name}`",
                why=f"Megatron-FSDP saved it for one part of `{parameter}`, but parts are merged",
                hint=f"pass {spell_option('--only model')}; to resume in Megatron-FSDP, load the "
                "original save",
            )


class _Follow:
    """Mapper that finds parameter names in the names of training state and replaces them."""

    def __init__(self, catalog: Catalog, root: str, change: LayoutChange) -> None:
        self.root, self.entries = root, catalog.tensors
        self.zeros = {zeros.key: zeros for zeros in change.zeros if zeros.like}
        self.rest = Rest()
        self.targets: dict[str, list[ComposedTensor]] = {}
        for composed in compose_tensors(change.tensors).values():
            for key in dict.fromkeys(self._parameters_of(composed)):
                self.targets.setdefault(key, []).append(composed)
        self.counters: dict[str, str] = {}
        self.leaves: dict[str, tuple[str, Blob]] = {}
        self.alike: dict[Path, dict[str, TensorEntry]] = {}

    def tensor(self, entry: TensorEntry) -> None:
        """Map a moment of a parameter, a counter, or an unrelated tensor."""
        found, counter = self._parameter(entry.name), entry.shape in ((), (1,))
        if found is None:
            is_state = entry.name.partition(".")[0].lower().startswith("opt")
            if not counter and (is_state or ".state." in entry.name):
                raise RefusedError(
                    "cannot map optimizer state to its parameter",
                    where=f"tensor `{entry.name}`",
                    why="its name contains no parameter name, or that parameter is skipped",
                    hint=f"pass {spell_option('--only model')}, or keep the layout",
                )
            self._keep(entry, entry.path, entry.name)
        elif counter:
            for path in self._targets(entry.path, found):
                self._keep(entry, path, join(path))
        else:
            self._moment(entry, found)

    def _keep(self, entry: TensorEntry, path: Path, name: str) -> None:
        first = self.counters.setdefault(name, entry.name)
        if first == entry.name:
            self._add(ComposedTensor.from_unchanged(entry.name, name, entry.shape), path)
        else:
            self.rest.redundant.append(RedundantData.from_copy(entry.name, kept_key=first))

    def _moment(self, entry: TensorEntry, found: str) -> None:
        shape = self.entries[self.root + found].shape
        if shape != entry.shape:
            raise RefusedError(
                "optimizer state and its parameter have different shapes",
                where=f"tensor `{entry.name}`",
                why=f"the state is {list(entry.shape)}, but `{found}` is {list(shape)}",
                hint=f"pass {spell_option('--only model')}, or keep the layout",
            )
        pattern = _replaced(entry.path, found, "")
        self.alike.setdefault(pattern, {})[found] = entry

    def moments(self) -> None:
        """Map the moments of each kind like their parameters."""
        for moments in self.alike.values():
            wanted = {one.key: one for name in moments for one in self.targets[name]}
            for composed in wanted.values():
                self._follow(composed, moments)

    def _follow(self, composed: ComposedTensor, moments: Mapping[str, TensorEntry]) -> None:
        parameters = list(self._parameters_of(composed))
        some = next(key for key in parameters if key in moments)
        lacking = next((key for key in parameters if key not in moments), None)
        if lacking is not None:
            raise RefusedError(
                "optimizer state is missing for some parts of a tensor",
                where=f"tensor `{moments[some].name}`",
                why=f"`{some}` and `{lacking}` become one tensor, but `{lacking}` has no state",
                hint=f"pass {spell_option('--only model')}, or keep the layout",
            )
        path = _replaced(moments[some].path, some, composed.key)
        sources = tuple(self._moment_of(source, moments) for source in composed.sources)
        self._add(replace(composed, key=join(path), sources=sources), path)

    def _add(self, composed: ComposedTensor, path: Path) -> None:
        known = self.rest.tensors.setdefault(composed.key, composed)
        if known is not composed:
            both = (next(iter(one.keys)) for one in (known, composed))
            raise RefusedError(
                "two tensors would have the same name in the output",
                where=f"tensor `{composed.key}`",
                why=" and ".join(f"`{name}`" for name in both),
                hint=f"pass {spell_option('--only model')}, or keep the layout",
            )
        self.rest.paths[composed.key] = path

    def _parameters_of(self, composed: ComposedTensor) -> Iterator[str]:
        """Yield the parameters that *composed* reads or that its zeros pad."""
        for key in composed.keys:
            yield self.zeros[key].like if key in self.zeros else key

    def _moment_of(self, source: SourceTensor, moments: Mapping[str, TensorEntry]) -> SourceTensor:
        """Return the source for a parameter's moment, or for zeros that pad moments."""
        zeros = self.zeros.get(source.key)
        if zeros is None:
            return _source_of(source, moments[source.key].name)
        like = moments[zeros.like].name
        self.rest.zeros.append(replace(zeros, key=f"{zeros.key}@{like}", like=like))
        return source._replace(key=self.rest.zeros[-1].key)

    def blob(self, blob: Blob) -> None:
        """Map a non-tensor value. Lists of parameter names are translated."""
        value = blob.value
        if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            names = list(dict.fromkeys(name for item in value for name in self._renamed(item)))
            if names != value:
                blob = replace(blob, value=names, file=None)
        found = self._parameter(blob.name)
        for path in [blob.path] if found is None else self._targets(blob.path, found):
            self._leaf(replace(blob, name=join(path), path=path), blob.name)

    def _leaf(self, blob: Blob, source: str) -> None:
        """Add a value. Parameters that are merged must have equal values."""
        origin, first = self.leaves.setdefault(blob.name, (source, blob))
        if first is blob:
            self.rest.blobs.append(blob)
        elif (first.value, first.file is None) != (blob.value, blob.file is None):
            raise RefusedError(
                "parameters that become one have different optimizer settings",
                where=f"`{origin}` and `{source}`",
                why=f"{first.value!r} and {blob.value!r}",
                hint=f"pass {spell_option('--only model')}, or keep the layout",
            )

    def _renamed(self, name: str) -> list[str]:
        """Return the target names of a parameter, or *name* itself if it is not a parameter."""
        return [one.key for one in self.targets[name]] if name in self.targets else [name]

    def _parameter(self, name: str) -> str | None:
        """Find the longest parameter name in *name*, or return None."""
        return next((part for part in name_parts(name) if part in self.targets), None)

    def _targets(self, path: Path, found: str) -> list[Path]:
        return [_replaced(path, found, target) for target in self._renamed(found)]


def _replaced(path: Path, found: str, target: str) -> Path:
    """Replace a parameter's name in the key, or the keys, that spell it."""
    for position, key in enumerate(path):
        if isinstance(key, str) and found in name_parts(key):
            new = f".{key}.".replace(f".{found}.", f".{target}.").strip(".")
            return (*path[:position], new, *path[position + 1 :])
    return (f".{join(path)}.".replace(f".{found}.", f".{target}.").strip("."),)


def name_parts(name: str) -> Iterator[str]:
    """Yield every run of dotted components of *name*, the longest first."""
    pieces = name.split(".")
    for length in range(len(pieces), 0, -1):
        for start in range(len(pieces) - length + 1):
            yield ".".join(pieces[start : start + length])


def _source_of(parameter: SourceTensor, name: str) -> SourceTensor:
    """Build the source that reads state *name* in the same way as *parameter*."""
    kinds = {part for part in name.split(".") if part in COPIES or _STATISTIC.search(part)}
    if parameter.offset and not kinds:
        raise RefusedError(
            "cannot map optimizer state to its parameter",
            where=f"tensor `{name}`",
            why=f"the layouts store the parameter with an offset of {abs(parameter.offset)}, and it "
            "is unknown whether this tensor is a copy",
            hint=f"pass {spell_option('--only model')}, or keep the layout",
        )
    return parameter._replace(key=name, plus=parameter.offset if COPIES & kinds else 0)
