"""Which tensors of a checkpoint are quantised, and how; the plain ones that they stand for.

That is told from names, dtypes and shapes alone. Plain tensors are virtual: computed as they are
read.

Sources: DeepSeek-V3's ``inference/fp8_cast_bf16.py`` and ``transformers``'
``integrations/finegrained_fp8.py`` for float8 with block scales; ``integrations/mxfp4.py`` and
OpenAI's ``gpt_oss/torch/weights.py`` for MXFP4.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ckptctl.catalog import (
    Box,
    Catalog,
    Computed,
    Input,
    Path,
    TensorEntry,
    computed_name,
)
from ckptctl.errors import (
    CkptError,
    HomelessError,
    MappingError,
    UnsupportedError,
    UsageError,
    listed,
)
from ckptctl.ops.sources import located
from ckptctl.storage.compare import row_major

QUANTIZATION = "quantization_config"
FP8 = "float8_e4m3fn"
SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
BLOCK = 32
METHODS = ("fp8", "mxfp4")
DEFAULT = (128, 128)
STRANGE = {
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".SCB": "bitsandbytes int8",
    ".quant_state.bitsandbytes__nf4": "bitsandbytes nf4",
    ".quant_state.bitsandbytes__fp4": "bitsandbytes fp4",
    ".weight_packed": "compressed-tensors",
    ".weight_scale": "compressed-tensors or scales of rows",
    ".weight_scale_2": "NVFP4",
    ".qscale_weight": "Mistral's fp8",
    ".input_scale": "static scales of activations",
    ".activation_scale": "static scales of activations",
}
PARTS = (
    *(".g_idx", ".scales", ".weight_format"),
    *(".weight_g_idx", ".weight_shape", ".weight_zero_point", ".weight_global_scale"),
    *(".weight_scale_inv", ".input_global_scale", ".output_scale"),
    *(".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map"),
)
"""How the tensors end that lie beside those of :data:`STRANGE`."""
INTEGERS = {"int8": "int8 weights", "uint32": "MLX", "float4_e2m1fn_x2": "packed fp4"}


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """A quantised tensor and its scales.

    Attributes:
        how: For people, as in ``fp8 blocks of 128x128``.
        kind: What computes it: a kind in ``ckptctl/storage/kinds``.
        roles: What that calls the two.
        parameters: What else it wants to know.
        transposed: Whether the plain tensor has the last two dimensions in the other order.
    """

    key: str
    weight: str
    scale: str
    how: str
    kind: str
    roles: tuple[str, str]
    shape: tuple[int, ...]
    parameters: Mapping[str, int] = field(default_factory=dict)
    transposed: bool = False


def quantised(catalog: Catalog) -> Mapping[str, str]:
    """Return what is quantised, by the name of the tensor that it stands for, and how."""
    found: dict[str, str] = {}
    for name in catalog.tensors:
        try:
            pair = _pair(catalog, name)
        except CkptError:
            found[name] = "scales that do not fit"
        else:
            found |= {pair.key: pair.how} if pair else {}
    return {**found, **unknown(catalog)}


def understood(catalog: Catalog) -> bool:
    """Return whether all that is quantised is so in a way that is understood, and whole."""
    try:
        orphans(catalog)
        pairs(catalog)
    except CkptError:
        return False
    return not unknown(catalog)


@contextmanager
def advised(catalog: Catalog, root: str) -> Iterator[None]:
    """Let errors about tensors without a place say that a checkpoint is quantised, if it is."""
    try:
        yield
    except HomelessError as error:
        own = error.where == catalog.path or any(root + k in catalog.tensors for k in error.keys)
        if own and (found := quantised(catalog)):
            how = f"it is quantised ({', '.join(dict.fromkeys(found.values()))})"
            error.hint = f"{how}, which can be neither mapped nor dequantised"
            if understood(catalog):
                error.hint = f"{how}: --dequantize bf16 writes plain tensors instead"
        raise


def pairs(catalog: Catalog) -> list[ScaledWeight]:
    """Return the quantised tensors that are understood, in the checkpoint's order."""
    return [pair for name in catalog.tensors if (pair := _pair(catalog, name))]


def _pair(catalog: Catalog, name: str) -> ScaledWeight | None:
    scale = _scale_of(catalog, name)
    if scale is None:
        return None
    entry = catalog.tensors[name]
    if entry.dtype == FP8:
        return _fp8(entry, catalog.tensors[scale], _block(catalog))
    return _mxfp4(entry, catalog.tensors[scale])


def unknown(catalog: Catalog) -> dict[str, str]:
    """Return tensors that are quantised in a way that is not understood, and what it is called."""
    found: dict[str, str] = {}
    for name, entry in catalog.tensors.items():
        end = next((end for end in STRANGE if name.endswith(end)), None)
        if end is not None:
            found[name] = STRANGE[end]
        elif entry.dtype in INTEGERS and name.endswith(".weight"):
            found[name] = INTEGERS[entry.dtype]
    method = _described(catalog).get("quant_method", METHODS[0])
    if not found and method not in METHODS:
        found[QUANTIZATION] = f"`{method}`"
    return found


def plain_names(names: Collection[str]) -> Collection[str]:
    """Return *names* with that of the plain weight for all that a quantised one is stored as.

    Where no name is one of a way of quantisation that no table describes, they are as they were.
    """
    endings = (*STRANGE, *PARTS)
    if not any(name.endswith(tuple(STRANGE)) for name in names):
        return names
    plain: dict[str, None] = {}
    for name in names:
        end = max((end for end in endings if name.endswith(end)), key=len, default=None)
        stem = name.removesuffix(".weight" if end is None else end).removesuffix(".weight")
        plain[f"{stem}.weight" if end or name.endswith(".weight") else name] = None
    return list(plain)


def orphans(catalog: Catalog) -> None:
    """Refuse quantised tensors without scales, and scales without such."""
    bare, lone = [], []
    used = {_scale_of(catalog, name) for name in catalog.tensors}
    for name, entry in catalog.tensors.items():
        if (entry.dtype == FP8 or _packed(entry)) and _scale_of(catalog, name) is None:
            bare.append(name)
        packed = entry.dtype == "uint8" and name.endswith(("_scales", ".scales"))
        if name not in used and (packed or name.endswith("_scale_inv")):
            lone.append(name)
    for names, what in ((bare, "has no scales"), (lone, "has nothing to scale")):
        if names:
            raise UnsupportedError(f"{listed(names)} {what}", where=catalog.path)


def _scale_of(catalog: Catalog, name: str) -> str | None:
    """Return the scales of *name*, if it is quantised and has any."""
    entry = catalog.tensors[name]
    candidates: tuple[str, ...] = ()
    if entry.dtype == FP8:
        candidates = (f"{name}_scale_inv",)
        if name.endswith(".weight"):
            candidates += (name.removesuffix("weight") + "scale",)
    elif _packed(entry):
        candidates = (name.removesuffix("blocks") + "scales",)
    return next((found for found in candidates if found in catalog.tensors), None)


def _packed(entry: TensorEntry) -> bool:
    return entry.dtype == "uint8" and entry.name.endswith(("_blocks", ".blocks"))


def _fp8(weight: TensorEntry, scale: TensorEntry, block: tuple[int, int]) -> ScaledWeight:
    if len(weight.shape) < 2:
        raise _unfit(weight, scale, "blocks have rows and columns")
    *lead, rows, columns = weight.shape
    grid = (*lead, -(-rows // block[0]), -(-columns // block[1]))
    single = scale.shape != grid and scale.numel == 1 and not lead
    down, across = (rows, columns) if single else block
    if scale.dtype not in SCALES or (scale.shape != grid and not single):
        raise _unfit(weight, scale, f"blocks of {down}x{across} need floats {list(grid)}")
    return ScaledWeight(
        weight.name,
        weight.name,
        scale.name,
        "fp8 with one scale" if single else f"fp8 blocks of {down}x{across}",
        "block_fp8",
        ("weight", "scale"),
        weight.shape,
        {"block_rows": down, "block_columns": across},
    )


def _mxfp4(blocks: TensorEntry, scales: TensorEntry) -> ScaledWeight:
    *lead, count, width = blocks.shape if len(blocks.shape) > 2 else (0, 0)
    if scales.dtype != "uint8" or scales.shape != blocks.shape[:-1] or width != BLOCK // 2:
        raise _unfit(blocks, scales, "uint8 [..., n, 16] and uint8 [..., n] are needed")
    return ScaledWeight(
        blocks.name[: -len("_blocks")],
        blocks.name,
        scales.name,
        f"MXFP4 blocks of {BLOCK}",
        "mxfp4",
        ("blocks", "scales"),
        (*lead, count * BLOCK),
        transposed=blocks.name.endswith("_blocks"),
    )


def _unfit(weight: TensorEntry, scale: TensorEntry, why: str) -> UnsupportedError:
    shapes = f"{weight.dtype} {list(weight.shape)} and {scale.dtype} {list(scale.shape)}"
    return UnsupportedError(
        f"`{scale.name}` does not fit `{weight.name}`", where=weight.name, why=f"{shapes}: {why}"
    )


def _described(catalog: Catalog) -> Mapping[str, object]:
    found = catalog.documents.get("config.json", {}).get(QUANTIZATION)
    return found if isinstance(found, Mapping) else {}


def _block(catalog: Catalog) -> tuple[int, int]:
    """Return the rows and columns of an fp8 block."""
    stated = _described(catalog).get("weight_block_size")
    if stated is None:
        return DEFAULT
    match stated:
        case [int(down), int(across)] if down > 0 and across > 0:
            return down, across
    raise MappingError(
        f"`weight_block_size` is {stated!r}",
        where=f"{QUANTIZATION} in config.json",
        why="two positive numbers are expected",
    )


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
