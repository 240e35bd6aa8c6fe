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
    build_computed_name,
    compute_row_major_strides,
)
from ckptctl.conversion.sources import locate_tensors
from ckptctl.errors import (
    CkptError,
    DamagedError,
    MappingError,
    UnmappedTensorError,
    UnsupportedError,
    UsageError,
    format_option,
    quote_names,
)
from ckptctl.formats.shared.findings import classify_severity
from ckptctl.numerics.quantization.statement import (
    CONFIG,
    SIDECAR_METHODS,
    Json,
    QuantizationConfig,
    find_quantization_config,
    iterate_quantization_configs,
    parse_sidecar_config,
    require_configs_agree,
    strip_quantization_config,
)
from ckptctl.numerics.quantization.survey import (
    QuantizationSurvey,
    detect_quantized_weights,
    looks_unquantized,
)
from ckptctl.storage.files import source_files
from ckptctl.storage.json_reader import read_json
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

if TYPE_CHECKING:
    from ckptctl.conversion.recognition.model import Model
    from ckptctl.numerics.quantization.scheme import QuantizedWeight

MAX_METADATA_BYTES = 1 << 20
"""Size limit in bytes for tensors whose values schemes read as metadata."""


def read_quantization_config(
    catalog: Catalog, extra_configs: Iterable[QuantizationConfig] = ()
) -> QuantizationConfig:
    """Return the quantization config of a checkpoint, from its files and *extra_configs*.

    Raises:
        MappingError: Quantization configs contradict each other.
    """
    config = catalog.documents.get(CONFIG, {})
    quant_configs = [
        *iterate_quantization_configs(config),
        *_read_sidecar_configs(catalog.root, catalog.assets),
        *extra_configs,
    ]
    for first_statement, second_statement in combinations(quant_configs, 2):
        require_configs_agree(first_statement, second_statement)
    return quant_configs[0] if quant_configs else QuantizationConfig()


def read_folder_quantization_configs(
    root: TreePath, config: Json, names: Collection[str]
) -> Iterator[QuantizationConfig]:
    """Yield the quantization configs of a folder, from config.json and separate files.

    Args:
        root: The folder.
        config: Content of its config.json.
        names: Names of its files.
    """
    for quant_config in (
        *iterate_quantization_configs(config),
        *_read_sidecar_configs(root, names),
    ):
        yield replace(quant_config, where=f"{quant_config.where} ({root})")


def _read_sidecar_configs(root: TreePath, names: Collection[str]) -> Iterator[QuantizationConfig]:
    for name in SIDECAR_METHODS:
        if name in names:
            with source_files(root) as files:
                content = read_json(files, name, allow_nan=True)
            if not isinstance(content, dict):
                raise UnsupportedError(f"`{name}` is not a JSON object", where=root)
            yield parse_sidecar_config(name, content)


def is_unquantized(catalog: Catalog) -> bool:
    """Return whether no tensor and no config file of a checkpoint indicates quantization."""
    return looks_unquantized(catalog.tensors) and not read_quantization_config(catalog).method


def survey_catalog(
    catalog: Catalog, extra_configs: Iterable[QuantizationConfig] = ()
) -> QuantizationSurvey:
    """Detect the quantized tensors of a checkpoint, using its configs and *extra_configs*."""

    def read_values(entry: TensorEntry) -> bytes:
        # late, for a fast start: only few schemes read values
        from ckptctl.storage.computed import open_catalog_reader
        from ckptctl.storage.tensor_reader import TensorReader

        if entry.nbytes > MAX_METADATA_BYTES:
            raise UnsupportedError(
                f"`{entry.name}` is too large: "
                f"{pluralize(entry.nbytes, 'byte')}, at most {MAX_METADATA_BYTES:,} are "
                "supported",
                where=catalog.path,
            )
        located_catalog = locate_tensors(catalog, [entry.name])
        with open_catalog_reader(located_catalog) as reader:
            return bytes(TensorReader(reader, located_catalog.tensors[entry.name]).read())

    return detect_quantized_weights(
        catalog.tensors, read_quantization_config(catalog, extra_configs), read_values
    )


def survey_leniently(catalog: Catalog) -> QuantizationSurvey:
    """Survey a checkpoint, treating an invalid quantization config as an unknown scheme."""
    try:
        return survey_catalog(catalog)
    except CkptError as error:
        return QuantizationSurvey(unknown={str(catalog.path): error.what})


def find_quantized_tensors(catalog: Catalog) -> Mapping[str, str]:
    """Map the dequantized name of each quantized weight to a description of its scheme."""
    return survey_leniently(catalog).scheme_by_tensor


def require_same_quantization(first: Catalog, second: Catalog, hint: str) -> None:
    """Raise if only one of two checkpoints is quantized, since its tensors have other names."""
    schemes, other_schemes = (find_quantized_tensors(catalog) for catalog in (first, second))
    if bool(schemes) == bool(other_schemes):
        return
    quantized, other = (first, second) if schemes else (second, first)
    names = ", ".join(dict.fromkeys((schemes or other_schemes).values()))
    raise MappingError(
        "only one of the checkpoints is quantized",
        where=f"{first.path} and {second.path}",
        why=f"{quantized.path} is quantized ({names}), and {other.path} is not",
        hint=hint,
    )


def note_undeclared_quantization(
    catalog: Catalog, config: Json | None, sidecar_names: Collection[str]
) -> Iterator[str]:
    """Yield a note if tensors are quantized but no config file declares the quantization."""
    is_stated = config is not None and find_quantization_config(config) is not None
    has_byte_dtypes = any(
        dtypes.get_itemsize(entry.dtype) == 1 for entry in catalog.tensors.values()
    )
    if (
        config is None
        or is_stated
        or not has_byte_dtypes
        or not SIDECAR_METHODS.keys().isdisjoint(sidecar_names)
    ):
        return
    if schemes_by_tensor := survey_leniently(catalog).scheme_by_tensor:
        yield (
            f"{CONFIG} does not state that {pluralize(len(schemes_by_tensor), 'tensor')} are "
            "quantized "
            f"({', '.join(dict.fromkeys(schemes_by_tensor.values()))}), so programs would use "
            "their raw "
            f"values; pass {format_option('--dequantize bf16')} to dequantize them"
        )


@contextmanager
def dequantize_hint_on_error(model: Model) -> Iterator[None]:
    """Add a hint to dequantize to errors about unmapped tensors if the checkpoint is quantized."""
    catalog, root = model.catalog, model.root
    try:
        yield
    except UnmappedTensorError as error:
        is_about_model = error.where == str(catalog.path) or any(
            root + k in catalog.tensors for k in error.keys
        )
        if is_about_model and (survey := survey_leniently(catalog)).scheme_by_tensor:
            quantized_text = (
                "the checkpoint is quantized "
                f"({', '.join(dict.fromkeys(survey.scheme_by_tensor.values()))})"
            )
            error.hint = f"{quantized_text}; this scheme can be neither mapped nor dequantized"
            if survey.is_fully_supported:
                error.hint = (
                    f"{quantized_text}; pass {format_option('--dequantize bf16')} to dequantize it"
                )
            if survey.is_fully_supported and not error.keys and _is_known_when_dequantized(catalog):
                schemes_text = ", ".join(dict.fromkeys(survey.scheme_by_tensor.values()))
                error.what = f"the checkpoint is quantized: {schemes_text}"
                error.why = "no layout supports tensors that are quantized in this way"
                error.hint = f"add {format_option('--dequantize bf16')}"
        raise


def _is_known_when_dequantized(catalog: Catalog) -> bool:
    """Return whether the model would be recognized if the checkpoint were dequantized."""
    from ckptctl.conversion.recognition.model import recognize_model  # late: only for errors

    try:
        return bool(recognize_model(dequantize_catalog(catalog, "bfloat16")).candidates)
    except CkptError:
        return False


def list_quantized_weights(catalog: Catalog) -> list[QuantizedWeight]:
    """Return the supported quantized weights, in the checkpoint's order.

    Raises:
        DamagedError: Tensors of a weight are missing.
        UnsupportedError: Tensors of a weight do not match each other.
        MappingError: The quantization config is unsupported.
    """
    return _require_valid_weights(survey_catalog(catalog))


def _require_valid_weights(survey: QuantizationSurvey) -> list[QuantizedWeight]:
    for error in survey.errors.values():
        raise error
    return survey.weights


def require_paired_scales(catalog: Catalog) -> None:
    """Raise if quantized tensors have no scales, or scales have no quantized tensor."""
    _require_pairs(survey_catalog(catalog), catalog, DamagedError)


def can_tell_missing_tensors(survey: QuantizationSurvey, method: str) -> bool:
    """Return whether missing tensors of quantized weights can be determined.

    This requires that at least one weight is complete, that the config states a scheme that tensor
    names identify, or that no tensor but the weights is left of the stated scheme. If the config is
    unsupported, missing tensors cannot be determined.
    """
    tensor_errors = (DamagedError, UnsupportedError)
    if any(not isinstance(error, tensor_errors) for error in survey.errors.values()):
        return False
    from ckptctl.numerics.quantization.scheme import list_supported_methods, load_schemes

    is_named_scheme = any(
        scheme.needs_no_config and method in scheme.methods for scheme in load_schemes()
    )
    is_supported = method in list_supported_methods()
    return (
        is_named_scheme
        or survey.lacks_all_scales
        or (bool(survey.weights) and (not method or is_supported))
    )


def find_quantization_problems(catalog: Catalog) -> Iterator[Finding]:
    """Yield findings on missing or mismatched tensors of quantized weights."""
    try:
        survey, method = survey_catalog(catalog), read_quantization_config(catalog).method
    except CkptError as error:
        yield Finding(error.what, error.why, "unknown", basis="model")
        return
    if (
        survey.weights_without_scales or survey.scales_without_weights
    ) and can_tell_missing_tensors(survey, method):
        for name in survey.weights_without_scales:
            message = "a quantized tensor has no scales"
            yield Finding(message, tensor=name, basis="model")
        for name in survey.scales_without_weights:
            yield Finding("scales without a quantized tensor", tensor=name, basis="model")
    for name, problem in survey.errors.items():
        if isinstance(problem, DamagedError | UnsupportedError):
            severity = classify_severity(problem)
            yield Finding(problem.what, problem.why, severity, tensor=name, basis="model")


def _require_pairs(
    survey: QuantizationSurvey, catalog: Catalog, error_class: type[CkptError]
) -> None:
    for names, message in (
        (survey.weights_without_scales, "quantized tensors without scales"),
        (survey.scales_without_weights, ("scales without quantized tensors")),
    ):
        if names:
            raise error_class(f"{message}: {quote_names(names)}", where=catalog.path)


def dequantize_catalog(
    catalog: Catalog, dtype: str, assets_configs: Sequence[QuantizationConfig] | None = None
) -> Catalog:
    """Replace the quantized tensors and scales in *catalog* by dequantized tensors.

    The dequantized tensors are virtual: computed when they are read.

    Args:
        catalog: The quantized checkpoint.
        dtype: Dtype of the dequantized tensors.
        assets_configs: Quantization configs of ``--assets``, or None if the command has no such
            option.
    """
    survey = survey_catalog(catalog, assets_configs or ())
    quantized_weights = _require_dequantizable(survey, catalog, assets_configs)
    names = (name for weight in quantized_weights for name in weight.inputs)
    entries = locate_tensors(catalog, dict.fromkeys(names)).tensors
    inputs = {name: ComputeInput(catalog.root, entry) for name, entry in entries.items()}
    weight_by_lead = {weight.lead: weight for weight in quantized_weights}
    removed_names = {
        name for weight in quantized_weights for name in weight.names[1:]
    } | survey.dropped.keys()
    tensors: dict[str, TensorEntry] = {}
    computed = dict(catalog.computed)
    for name, entry in catalog.tensors.items():
        if name in weight_by_lead:
            weight = weight_by_lead[name]
            weight_inputs = tuple(inputs[name] for name in weight.inputs)
            virtual_file = ComputedTensor(
                weight.kind, dtype, weight.shape, weight_inputs, weight.arguments
            )
            computed[build_computed_name(weight.key)] = virtual_file
            tensors[weight.key] = _build_virtual_entry(
                weight, inputs[weight.lead].entry, virtual_file
            )
        elif name not in removed_names:
            tensors[name] = (
                replace(entry, alias_of=None) if entry.alias_of in removed_names else entry
            )
    documents = dict(catalog.documents)
    if CONFIG in documents:
        documents[CONFIG] = strip_quantization_config(documents[CONFIG])
    return replace(
        catalog,
        tensors=tensors,
        computed=computed,
        documents=documents,
        notes=(*catalog.notes, *_note_dequantization(survey, dtype)),
    )


def dequantize_if_quantized(catalog: Catalog, dtype: str | None) -> Catalog:
    """Dequantize a checkpoint, unless it is not quantized or *dtype* is None."""
    if dtype is None or not find_quantized_tensors(catalog):
        return catalog
    return dequantize_catalog(catalog, dtype)


def _note_dequantization(survey: QuantizationSurvey, dtype: str) -> Iterator[str]:
    """Yield notes on how many tensors are dequantized to *dtype*, and which are dropped."""
    schemes_text = ", ".join(dict.fromkeys(weight.description for weight in survey.weights))
    yield f"dequantized {pluralize(len(survey.weights), 'tensor')} to {dtype} ({schemes_text})"
    for reason in dict.fromkeys(survey.dropped.values()):
        names = [name for name, drop_reason in survey.dropped.items() if drop_reason == reason]
        count = pluralize(len(names), "tensor")
        yield f"dropped {count} ({reason}), which unquantized weights do not need"


def _require_dequantizable(
    survey: QuantizationSurvey,
    catalog: Catalog,
    assets_configs: Sequence[QuantizationConfig] | None,
) -> list[QuantizedWeight]:
    if survey.unknown:
        schemes = list(dict.fromkeys(survey.unknown.values()))
        raise MappingError(
            f"cannot dequantize {', '.join(schemes)}",
            where=catalog.path,
            why=f"found in {quote_names(list(survey.unknown))}",
            hint=_unknown_scheme_hint(catalog, assets_configs),
        )
    is_known_scheme = can_tell_missing_tensors(
        survey, read_quantization_config(catalog, assets_configs or ()).method
    )
    _require_pairs(survey, catalog, DamagedError if is_known_scheme else UnsupportedError)
    quantized_weights = _require_valid_weights(survey)
    if not quantized_weights:
        raise UsageError(
            "the checkpoint is not quantized",
            where=catalog.path,
            why="no scale tensors found",
            hint=f"omit {format_option('--dequantize')}; pass {format_option('--dtype')} to change "
            "the dtype",
        )
    leads = {weight.lead for weight in quantized_weights}
    keys = [weight.key for weight in quantized_weights if weight.key not in leads]
    clash = [key for key in keys if key in catalog.tensors]
    if clash:
        raise MappingError(
            f"unquantized tensors with the same names exist: {quote_names(clash)}",
            where=catalog.path,
        )
    return quantized_weights


def _unknown_scheme_hint(
    catalog: Catalog, assets_configs: Sequence[QuantizationConfig] | None
) -> str:
    """Return a hint that lists the supported schemes, or that says that a config is missing."""
    if read_quantization_config(catalog, assets_configs or ()).method:
        from ckptctl.numerics.quantization.scheme import load_schemes

        names = [
            scheme.name
            for scheme in load_schemes()
            if any(form.build_weight for form in scheme.naming_patterns)
        ]
        return f"supported schemes: {', '.join(names)}"
    folder = "" if assets_configs is None else f" or in the folder of {format_option('--assets')}"
    return (
        "no file describes the quantization; add a config.json with `quantization_config` next "
        f"to the weights{folder}"
    )


def _build_virtual_entry(
    weight: QuantizedWeight, lead: TensorEntry, computed: ComputedTensor
) -> TensorEntry:
    extent, shape = computed.to_extent(build_computed_name(weight.key)), weight.shape
    if weight.transposed:
        strides = compute_row_major_strides(shape)
        shape = (*shape[:-2], shape[-1], shape[-2])
        strides = (*strides[:-2], strides[-1], strides[-2])
        extent = replace(extent, box=Box.whole(shape), strides=strides)
    path, grad = _build_dequantized_path(lead.path, weight), lead.requires_grad
    return TensorEntry(weight.key, computed.dtype, shape, (extent,), path, requires_grad=grad)


def _build_dequantized_path(path: Path, weight: QuantizedWeight) -> Path:
    """Return the key path of the dequantized tensor, given the path of the quantized elements."""
    pairs = zip(weight.lead, weight.key, strict=False)
    common_length = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    old_ending, new_ending, last_key = (
        weight.lead[common_length:],
        weight.key[common_length:],
        path[-1],
    )
    if not isinstance(last_key, str) or old_ending == new_ending:
        return path
    if last_key == old_ending.removeprefix("."):
        return (*path[:-1], new_ending.removeprefix(".")) if new_ending else path[:-1]
    return (*path[:-1], last_key.removesuffix(old_ending) + new_ending)
