"""Detect the quantized tensors of a checkpoint, and replace them by dequantized ones.

The schemes of ``ckptctl/numerics/quantization`` detect them from names, dtypes, shapes and config
files. Dequantized tensors are virtual: computed as they are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations, takewhile
from typing import TYPE_CHECKING

from ckptctl import dtypes
from ckptctl.catalog import (
    Box,
    Catalog,
    ComputedTensor,
    ComputeInput,
    Finding,
    Path,
    TensorEntry,
    computed_name,
    row_major,
)
from ckptctl.conversion.sources import locate_tensors
from ckptctl.errors import (
    CkptError,
    DamagedError,
    MappingError,
    UnmappedTensorError,
    UnsupportedError,
    UsageError,
    quote_names,
    spell_option,
)
from ckptctl.formats.shared.findings import severity_of
from ckptctl.numerics.quantization.statement import (
    BESIDE,
    CONFIG,
    Json,
    QuantizationStatement,
    all_of_config,
    of_config,
    of_file,
    require_agreement,
    without,
)
from ckptctl.numerics.quantization.survey import Survey, look_plain, survey
from ckptctl.storage.files import source_files
from ckptctl.storage.json_reader import read_json
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

if TYPE_CHECKING:
    from ckptctl.conversion.recognition.model import Model
    from ckptctl.numerics.quantization.scheme import QuantizedWeight

SMALL = 1 << 20
"""Largest tensor, in bytes, whose values schemes may read as metadata."""


def statement_of(
    catalog: Catalog, more: Iterable[QuantizationStatement] = ()
) -> QuantizationStatement:
    """Return the quantization statement of a checkpoint's files and of *more*.

    Raises:
        MappingError: Statements contradict each other.
    """
    config = catalog.documents.get(CONFIG, {})
    said = [*all_of_config(config), *_beside(catalog.root, catalog.assets), *more]
    for one, other in combinations(said, 2):
        require_agreement(one, other)
    return said[0] if said else QuantizationStatement()


def statements_in(
    root: TreePath, config: Json, names: Collection[str]
) -> Iterator[QuantizationStatement]:
    """Yield the statements of a config folder, from its *config* and its files *names*."""
    for one in (*all_of_config(config), *_beside(root, names)):
        yield replace(one, where=f"{one.where} ({root})")


def _beside(root: TreePath, names: Collection[str]) -> Iterator[QuantizationStatement]:
    for name in BESIDE:
        if name in names:
            with source_files(root) as files:
                content = read_json(files, name, constants=True)
            if not isinstance(content, dict):
                raise UnsupportedError(f"`{name}` is not a JSON object", where=root)
            yield of_file(name, content)


def is_plain(catalog: Catalog) -> bool:
    """Return whether neither a tensor nor a file of a checkpoint indicates quantization."""
    return look_plain(catalog.tensors) and not statement_of(catalog).method


def surveyed(catalog: Catalog, more: Iterable[QuantizationStatement] = ()) -> Survey:
    """Survey the quantized tensors of a checkpoint, given statements of its and *more* files."""

    def values(entry: TensorEntry) -> bytes:
        # late, for a fast start: only few schemes read values
        from ckptctl.storage.computed import open_reader
        from ckptctl.storage.tensor_reader import TensorReader

        if entry.nbytes > SMALL:
            raise UnsupportedError(
                f"`{entry.name}` is too large: "
                f"{pluralize(entry.nbytes, 'byte')}, at most {SMALL:,} are "
                "supported",
                where=catalog.path,
            )
        whole = locate_tensors(catalog, [entry.name])
        with open_reader(whole) as reader:
            return bytes(TensorReader(reader, whole.tensors[entry.name]).read())

    return survey(catalog.tensors, statement_of(catalog, more), values)


def glanced(catalog: Catalog) -> Survey:
    """Survey a checkpoint, reporting an unreadable quantization config as unknown."""
    try:
        return surveyed(catalog)
    except CkptError as error:
        return Survey(unknown={str(catalog.path): error.what})


def quantized(catalog: Catalog) -> Mapping[str, str]:
    """Map the dequantized name of each quantized tensor to its scheme."""
    return glanced(catalog).ways


def unsaid(catalog: Catalog, config: Json | None, beside: Collection[str]) -> Iterator[str]:
    """Note if tensors are quantized but neither *config* nor sidecar files state it."""
    said = config is not None and of_config(config) is not None
    narrow = any(dtypes.itemsize(entry.dtype) == 1 for entry in catalog.tensors.values())
    if config is None or said or not narrow or not BESIDE.keys().isdisjoint(beside):
        return
    if ways := glanced(catalog).ways:
        yield (
            f"{CONFIG} does not state that {pluralize(len(ways), 'tensor')} are quantized "
            f"({', '.join(dict.fromkeys(ways.values()))}), so programs would use their raw "
            f"values; pass {spell_option('--dequantize bf16')} to dequantize them"
        )


@contextmanager
def advised(model: Model) -> Iterator[None]:
    """Add a dequantization hint to unmapped-tensor errors if the checkpoint is quantized."""
    catalog, root = model.catalog, model.root
    try:
        yield
    except UnmappedTensorError as error:
        own = error.where == str(catalog.path) or any(
            root + k in catalog.tensors for k in error.keys
        )
        if own and (found := glanced(catalog)).ways:
            how = f"the checkpoint is quantized ({', '.join(dict.fromkeys(found.ways.values()))})"
            error.hint = f"{how}; this scheme can be neither mapped nor dequantized"
            if found.whole:
                error.hint = f"{how}; pass {spell_option('--dequantize bf16')} to dequantize it"
            if found.whole and not error.keys and _is_known_when_plain(catalog):
                ways = ", ".join(dict.fromkeys(found.ways.values()))
                error.what = f"the checkpoint is quantized: {ways}"
                error.why = "no layout supports tensors that are quantized in this way"
                error.hint = f"add {spell_option('--dequantize bf16')}"
        raise


def _is_known_when_plain(catalog: Catalog) -> bool:
    """Return whether a family has the tensors of the dequantized checkpoint."""
    from ckptctl.conversion.recognition.model import recognize_model  # late: only for errors

    try:
        return bool(recognize_model(dequantized(catalog, "bfloat16")).candidates)
    except CkptError:
        return False


def weights(catalog: Catalog) -> list[QuantizedWeight]:
    """Return the supported quantized weights, in the checkpoint's order.

    Raises:
        DamagedError: Tensors of a weight are missing.
        UnsupportedError: Tensors of a weight do not match each other.
        MappingError: A quantization statement is unsupported.
    """
    return _fitting(surveyed(catalog))


def _fitting(found: Survey) -> list[QuantizedWeight]:
    for error in found.unfit.values():
        raise error
    return found.weights


def orphans(catalog: Catalog) -> None:
    """Raise if quantized tensors have no scales, or scales have no quantized tensor."""
    _require_pairs(surveyed(catalog), catalog, DamagedError)


def understood(found: Survey, method: str) -> bool:
    """Return whether a scheme is known well enough to tell which tensors are missing.

    This is so if one weight is complete, or if a config states a scheme that is recognized by names
    alone. An unsupported configuration says nothing about missing tensors.
    """
    known = (DamagedError, UnsupportedError)
    if any(not isinstance(error, known) for error in found.unfit.values()):
        return False
    from ckptctl.numerics.quantization.scheme import methods, schemes

    told = any(one.by_names and method in one.methods for one in schemes())
    return told or (bool(found.weights) and (not method or method in methods()))


def misfits(catalog: Catalog, seen: Survey | None = None) -> Iterator[Finding]:
    """Yield findings on missing or mismatched tensors of quantized weights.

    Args:
        catalog: The checkpoint.
        seen: Survey of the checkpoint, or None to make one.
    """
    try:
        found, method = seen or surveyed(catalog), statement_of(catalog).method
    except CkptError as error:
        yield Finding(error.what, error.why, "unknown", basis="model")
        return
    if (found.bare or found.lone) and understood(found, method):
        for name in found.bare:
            what = "a quantized tensor has no scales"
            yield Finding(what, tensor=name, basis="model")
        for name in found.lone:
            yield Finding("scales without a quantized tensor", tensor=name, basis="model")
    for name, wrong in found.unfit.items():
        if isinstance(wrong, DamagedError | UnsupportedError):
            severity = severity_of(wrong)
            yield Finding(wrong.what, wrong.why, severity, tensor=name, basis="model")


def _require_pairs(found: Survey, catalog: Catalog, kind: type[CkptError]) -> None:
    for names, what in (
        (found.bare, "quantized tensors without scales"),
        (found.lone, ("scales without quantized tensors")),
    ):
        if names:
            raise kind(f"{what}: {quote_names(names)}", where=catalog.path)


def dequantized(
    catalog: Catalog, dtype: str, more: Sequence[QuantizationStatement] | None = None
) -> Catalog:
    """Replace the quantized tensors of *catalog* and their scales by dequantized tensors.

    The dequantized tensors are virtual: computed when they are read.

    Args:
        catalog: A checkpoint.
        dtype: dtype of the dequantized tensors.
        more: Statements of ``--assets``, or None where that option does not exist.
    """
    seen = surveyed(catalog, more or ())
    found = _understood(seen, catalog, more)
    names = (name for weight in found for name in weight.inputs)
    entries = locate_tensors(catalog, dict.fromkeys(names)).tensors
    inputs = {name: ComputeInput(catalog.root, entry) for name, entry in entries.items()}
    made = {weight.lead: weight for weight in found}
    gone = {name for weight in found for name in weight.names[1:]} | seen.dropped.keys()
    tensors: dict[str, TensorEntry] = {}
    computed = dict(catalog.computed)
    for name, entry in catalog.tensors.items():
        if name in made:
            weight = made[name]
            made_of = tuple(inputs[name] for name in weight.inputs)
            virtual = ComputedTensor(weight.kind, dtype, weight.shape, made_of, weight.arguments)
            computed[computed_name(weight.key)] = virtual
            tensors[weight.key] = _entry(weight, inputs[weight.lead].entry, virtual)
        elif name not in gone:
            tensors[name] = replace(entry, alias_of=None) if entry.alias_of in gone else entry
    documents = dict(catalog.documents)
    if CONFIG in documents:
        documents[CONFIG] = without(documents[CONFIG])
    return replace(
        catalog,
        tensors=tensors,
        computed=computed,
        documents=documents,
        notes=(*catalog.notes, *_notes(seen, dtype)),
    )


def _notes(found: Survey, dtype: str) -> Iterator[str]:
    """Note the dequantized and the dropped tensors."""
    ways = ", ".join(dict.fromkeys(weight.how for weight in found.weights))
    yield f"dequantized {pluralize(len(found.weights), 'tensor')} to {dtype} ({ways})"
    for what in dict.fromkeys(found.dropped.values()):
        names = [name for name, one in found.dropped.items() if one == what]
        count = pluralize(len(names), "tensor")
        yield f"dropped {count} ({what}), which unquantized weights do not need"


def _understood(
    found: Survey, catalog: Catalog, more: Sequence[QuantizationStatement] | None
) -> list[QuantizedWeight]:
    if found.unknown:
        ways = list(dict.fromkeys(found.unknown.values()))
        raise MappingError(
            f"cannot dequantize {', '.join(ways)}",
            where=catalog.path,
            why=f"found in {quote_names(list(found.unknown))}",
            hint=_advice(catalog, more),
        )
    known = understood(found, statement_of(catalog, more or ()).method)
    _require_pairs(found, catalog, DamagedError if known else UnsupportedError)
    plain = _fitting(found)
    if not plain:
        raise UsageError(
            "the checkpoint is not quantized",
            where=catalog.path,
            why="no scale tensors found",
            hint=f"omit {spell_option('--dequantize')}; pass {spell_option('--dtype')} to change "
            "the dtype",
        )
    leads = {weight.lead for weight in plain}
    keys = [weight.key for weight in plain if weight.key not in leads]
    clash = [key for key in keys if key in catalog.tensors]
    if clash:
        raise MappingError(
            f"unquantized tensors with the same names exist: {quote_names(clash)}",
            where=catalog.path,
        )
    return plain


def _advice(catalog: Catalog, more: Sequence[QuantizationStatement] | None) -> str:
    """Return a hint with the supported schemes, or that a config is missing."""
    if statement_of(catalog, more or ()).method:
        from ckptctl.numerics.quantization.scheme import schemes

        names = [one.name for one in schemes() if any(form.make for form in one.forms)]
        return f"supported schemes: {', '.join(names)}"
    folder = "" if more is None else f" or in the folder of {spell_option('--assets')}"
    return (
        "no file describes the quantization; add a config.json with `quantization_config` next "
        f"to the weights{folder}"
    )


def _entry(weight: QuantizedWeight, lead: TensorEntry, computed: ComputedTensor) -> TensorEntry:
    extent, shape = computed.to_extent(computed_name(weight.key)), weight.shape
    if weight.transposed:
        strides = row_major(shape)
        shape = (*shape[:-2], shape[-1], shape[-2])
        strides = (*strides[:-2], strides[-1], strides[-2])
        extent = replace(extent, box=Box.whole(shape), strides=strides)
    path, grad = _path(lead.path, weight), lead.requires_grad
    return TensorEntry(weight.key, computed.dtype, shape, (extent,), path, requires_grad=grad)


def _path(path: Path, weight: QuantizedWeight) -> Path:
    """Return the key path of the dequantized tensor, which may have another ending."""
    pairs = zip(weight.lead, weight.key, strict=False)
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    before, after, last = weight.lead[same:], weight.key[same:], path[-1]
    if not isinstance(last, str) or before == after:
        return path
    if last == before.removeprefix("."):
        return (*path[:-1], after.removeprefix(".")) if after else path[:-1]
    return (*path[:-1], last.removesuffix(before) + after)
