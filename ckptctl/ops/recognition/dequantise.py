"""Virtual tensors: the plain ones that quantised tensors stand for, and those of nothing but zeros.

Sources: DeepSeek-V3's ``inference/fp8_cast_bf16.py`` and ``transformers``'
``integrations/finegrained_fp8.py`` for float8 with block scales; ``integrations/mxfp4.py`` and
OpenAI's ``gpt_oss/torch/weights.py`` for MXFP4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptctl.catalog import (
    Box,
    Catalog,
    Computed,
    Input,
    Path,
    TensorEntry,
    computed_name,
)
from ckptctl.errors import MappingError, UsageError, listed
from ckptctl.ops.recognition.quantised import QUANTIZATION, ScaledWeight, orphans, pairs, unknown
from ckptctl.ops.sources import located
from ckptctl.planner.mapping.mapped import MappedTensor, Zeros
from ckptctl.storage.compare import row_major

CONFIG = "config.json"


def dequantised(catalog: Catalog, dtype: str) -> Catalog:
    """Return *catalog* with a plain tensor in place of every quantised one and its scales.

    The plain tensors are computed when they are read.
    """
    found = _understood(catalog)
    names = (name for pair in found for name in (pair.weight, pair.scale))
    entries = located(catalog, names).tensors
    inputs = {name: Input(catalog.root, entry) for name, entry in entries.items()}
    made = {pair.weight: pair for pair in found}
    gone = {pair.scale for pair in found}
    tensors: dict[str, TensorEntry] = {}
    computed = dict(catalog.computed)
    for name, entry in catalog.tensors.items():
        if name in made:
            pair = made[name]
            virtual = _computed(pair, inputs, dtype)
            computed[computed_name(pair.key)] = virtual
            tensors[pair.key] = _entry(pair, inputs[pair.weight].entry, virtual)
        elif name not in gone:
            tensors[name] = replace(entry, alias_of=None) if entry.alias_of in gone else entry
    documents = dict(catalog.documents)
    if CONFIG in documents:
        kept = {key: value for key, value in documents[CONFIG].items() if key != QUANTIZATION}
        documents[CONFIG] = kept
    ways = ", ".join(dict.fromkeys(pair.how for pair in found))
    return replace(
        catalog,
        tensors=tensors,
        computed=computed,
        documents=documents,
        notes=(*catalog.notes, f"dequantised to {dtype}: {len(found):,} tensors, {ways}"),
    )


def _understood(catalog: Catalog) -> list[ScaledWeight]:
    strange = unknown(catalog)
    if strange:
        ways = list(dict.fromkeys(strange.values()))
        raise MappingError(
            f"cannot dequantise {', '.join(ways)}",
            where=catalog.path,
            why=f"it is found in {listed(list(strange))}",
            hint="fp8 with block scales and MXFP4 can be dequantised",
        )
    orphans(catalog)
    found = pairs(catalog)
    if not found:
        raise UsageError(
            "nothing here is quantised",
            where=catalog.path,
            why="no tensor has scales",
            hint="leave `--dequantize` out; `--dtype` casts",
        )
    clash = [pair.key for pair in found if pair.key != pair.weight and pair.key in catalog.tensors]
    if clash:
        raise MappingError(f"{listed(clash)} is there already, unquantised", where=catalog.path)
    return found


def _computed(pair: ScaledWeight, inputs: Mapping[str, Input], dtype: str) -> Computed:
    weight, scale = pair.roles
    made_of = {weight: inputs[pair.weight], scale: inputs[pair.scale]}
    return Computed(pair.kind, dtype, pair.shape, made_of, pair.parameters)


def _entry(pair: ScaledWeight, weight: TensorEntry, computed: Computed) -> TensorEntry:
    extent, shape = computed.extent(computed_name(pair.key)), pair.shape
    if pair.transposed:
        strides = row_major(shape)
        shape = (*shape[:-2], shape[-1], shape[-2])
        strides = (*strides[:-2], strides[-1], strides[-2])
        extent = replace(extent, box=Box.whole(shape), strides=strides)
    path, grad = _path(weight.path, pair), weight.requires_grad
    return TensorEntry(pair.key, computed.dtype, shape, (extent,), path, requires_grad=grad)


def _path(path: Path, pair: ScaledWeight) -> Path:
    """Return the key path of the plain tensor: without the end that says it is quantised."""
    suffix, last = pair.weight[len(pair.key) :], path[-1]
    if suffix and isinstance(last, str):
        if last == suffix.removeprefix("."):
            return path[:-1]
        return (*path[:-1], last.removesuffix(suffix))
    return path


def made(
    catalog: Catalog, zeros: Sequence[Zeros], root: str, prefix: str
) -> tuple[Catalog, list[MappedTensor]]:
    """Return *catalog* with such tensors in virtual files, and how they become the target's."""
    entries, computed = dict(catalog.tensors), dict(catalog.computed)
    mapped: list[MappedTensor] = []
    for item in zeros:
        target = prefix + item.key
        name = computed_name(f"{target}@{item.origin}" if item.origin else target)
        kind = item.dtype or entries[root + item.like].dtype
        path = entries[root + item.like].path if item.like else (target,)
        computed[name] = Computed("constant", kind, item.shape)
        entries[name] = TensorEntry(name, kind, item.shape, (computed[name].extent(name),), path)
        same = MappedTensor.same(name, target, item.shape)
        origin = item.origin or same.targets[0].origin
        mapped.append(replace(same, targets=(replace(same.targets[0], origin=origin),)))
    return replace(catalog, tensors=entries, computed=computed), mapped
