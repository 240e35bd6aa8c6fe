"""Compare the config files of a source, and build or copy the config files of the output."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ckptctl.conversion.assets import CONFIG, PARAMS, Assets
from ckptctl.conversion.contents import build_layout_request, find_main_dtype
from ckptctl.conversion.draft import Draft
from ckptctl.errors import MappingError, format_option
from ckptctl.facts import MEGATRON
from ckptctl.facts.agreed_change import compare_before_change
from ckptctl.facts.megatron import megatron_to_config, merge_records, read_max_length
from ckptctl.facts.mlx_config import adapt_model_type, add_legacy_keys
from ckptctl.facts.params import config_to_params, get_preset_facts, params_to_config
from ckptctl.formats.base import WritableFormat
from ckptctl.formats.sidecar_files import find_file_kind, replace_model_param
from ckptctl.numerics.quantization.statement import QUANTIZATION
from ckptctl.numerics.quantized import note_undeclared_quantization
from ckptctl.planner.config_facts import Json, get_model_params
from ckptctl.planner.families.declarations import choose_field_alias
from ckptctl.planner.layouts import BASE, HF, MLX
from ckptctl.planner.mapping.mapped import compose_tensors
from ckptctl.planner.mapping.tensors import LayoutChange


def compare_descriptions(draft: Draft) -> Draft:
    """Compare the files that describe the source's model, and note harmless differences."""
    request = build_layout_request(draft)
    draft.notes.extend(compare_before_change(draft.model, draft.selection.tensors, request))
    return draft


def plan_config_files(draft: Draft) -> Draft:
    """Decide which config files to write next to the output's tensors, unless it is an adapter."""
    if draft.is_adapter:
        return draft
    assets, options, target, change = draft.assets, draft.options, draft.target, draft.change
    if target.single_file:
        names = sorted({*assets.sizes, *assets.documents})
        if names:
            not_copied = f"{len(names)} not copied: {', '.join(names)}"
            draft.notes.add(f"a single {target.name} file has no sidecar files; {not_copied}")
        return draft
    is_cast = (options.dtype or options.dequantize) is not None
    dtype = None
    if is_cast or CONFIG not in assets.documents:
        output_names = compose_tensors(change.tensors, draft.model.root, draft.output_root)
        source_tensors = (
            draft.quantization.original_tensors if draft.quantization else draft.tensors
        )
        dtype = find_main_dtype(
            [tensor for tensor in source_tensors if tensor.name in output_names]
        )
    documents = _build_documents(assets, target, change, draft.ranks, dtype, is_cast)
    config = documents.get(CONFIG, assets.documents.get(CONFIG))
    if options.to_layout == MLX:
        legacy_config = add_legacy_keys(config or {}, change.family)
        if legacy_config != (config or {}):
            documents[CONFIG] = config = legacy_config
    if draft.quantization:
        if config is None:
            option = "--repack" if draft.quantization.is_lossless else "--quantize"
            raise MappingError(
                f"{format_option(option)} requires config.json, which is missing",
                why="loaders read the quantization scheme from it",
                hint=f"pass {format_option('--assets DIR')} to copy it from the trained model's "
                "folder",
            )
        documents[CONFIG] = {**config, QUANTIZATION: draft.quantization.config}
    if target.name == "hf":
        draft.notes.add(*_note_missing_files(draft, documents))
        if not draft.quantization:
            draft.notes.add(*note_undeclared_quantization(draft.located, config, assets.sizes))
    if target.has_params_json and PARAMS not in documents:
        raise MappingError(
            f"cannot write params.json, which format {target.name} requires",
            why="unknown model type" if change.family is None else "there is no config.json",
            hint=f"pass {format_option('--assets DIR')} with the trained model's config.json or "
            "params.json",
        )
    contents = {name: dump_json(document) for name, document in documents.items()}
    return replace(draft, written=contents, copies=tuple(assets.iterate_copies_except(documents)))


def _note_missing_files(draft: Draft, written: Collection[str]) -> tuple[str, ...]:
    """Return notes on missing config and tokenizer files, and on unexpected tensor names."""
    assets, change = draft.assets, draft.change
    notes = (*_note_layout(change), *_note_architecture(assets.documents.get(CONFIG), change))
    if CONFIG not in {*assets.documents, *written}:
        missing = (
            "there is no config.json, which transformers requires; pass "
            f"{format_option('--assets DIR')} to copy it and the tokenizer from the trained "
            "model's "
            "folder"
        )
        return (missing, *notes)
    if CONFIG not in assets.documents:
        notes = (_note_generated_config(change, assets), *notes)
    has_tokenizer = any(find_file_kind(name) == "tokenizer" for name in assets.sizes)
    if has_tokenizer or draft.options.assets or draft.catalog.format == "hf":
        return notes
    tokenizer_note = (
        f"no tokenizer is written; pass {format_option('--assets DIR')} to copy it from the "
        "trained model's folder"
    )
    return (*notes, tokenizer_note)


def _note_layout(change: LayoutChange) -> tuple[str, ...]:
    """Return a note if the output's tensor names are not those that transformers expects."""
    family, layout = change.family, change.target_layout
    if layout in (None, HF, BASE) or (family and HF not in family.layouts):
        return ()
    if family and family.get_layout(layout).has_same_tensors(family.get_layout(HF)):
        return ()
    if layout.startswith("hf-"):
        return (f"transformers 5 reads layout {layout}; earlier versions may not",)
    return (f"transformers expects layout hf, but this is layout {layout}",)


def _note_architecture(config: Json | None, change: LayoutChange) -> tuple[str, ...]:
    """Return a note if config.json does not name the model class that vLLM needs.

    Source: vLLM's ``transformers_utils/config.py``: earlier versions stop, later ones use the class
    without a head.
    """
    if config is None or "model_type" not in config or config.get("architectures"):
        return ()
    family = change.family
    example = f' (for {family.name}: `["{family.architecture}"]`)' if family else ""
    return (f"{CONFIG} has no `architectures`, which vLLM needs to find the model class{example}",)


def _note_generated_config(change: LayoutChange, assets: Assets) -> str:
    """Return a note on the origin of a generated config.json, and on the values assumed in it."""
    family = change.family.name if change.family else "?"
    tied = "tied" if change.tied else "untied"
    params, made_from, assumed_values = assets.documents.get(PARAMS), PARAMS, dict[str, object]()
    if params is not None and change.family:
        assumed_values = get_preset_facts(change.family, params)
    elif params is None:
        made_from, assumed_values = (
            "Megatron's configuration",
            read_max_length(_merge_megatron_records(assets)),
        )
    assumed_text = "".join(f", {name} {value}" for name, value in assumed_values.items())
    return (
        f"config.json is generated from {made_from} for {family} with {tied} "
        f"embeddings{assumed_text}; "
        f"pass {format_option('--model-type')} or {format_option('--assets')} if that is wrong"
    )


def _build_documents(
    assets: Assets,
    target: WritableFormat,
    change: LayoutChange,
    ranks: int,
    dtype: str | None,
    is_cast: bool,
) -> dict[str, Json]:
    """Build the config files of the output that are not copied unchanged from the source."""
    config, params = assets.documents.get(CONFIG), assets.documents.get(PARAMS)
    written: dict[str, Json] = {}
    if config is not None:
        adapted = adapt_config(config, change)
        changed = _replace_dtype(adapted, dtype) if is_cast else adapted
        changed = adapt_model_type(changed, change.family, change.target_layout)
        if changed != config or CONFIG not in assets.sizes or CONFIG in assets.changed:
            written[CONFIG] = changed
    elif target.name == "hf" and change.family:
        family, sizes, megatron_record = (
            change.family,
            change.sizes or {},
            _merge_megatron_records(assets),
        )
        if params is not None:
            written[CONFIG] = params_to_config(family, params, sizes, tied=change.tied, dtype=dtype)
        elif megatron_record and family.megatron:
            megatron_config = megatron_to_config(
                family, megatron_record, sizes, tied=change.tied, dtype=dtype
            )
            written[CONFIG] = adapt_config(megatron_config, change)
    if target.name == "dcp" and params is not None:
        written[PARAMS] = params
    if target.has_params_json:
        output_params = _build_params(config, params, change, ranks)
        if output_params is not None:
            written[PARAMS] = output_params
    return written


def _merge_megatron_records(assets: Assets) -> Json:
    """Merge all of the source's Megatron model records into one dictionary."""
    return merge_records(file.content for file in assets.described if file.name == MEGATRON)


def _build_params(
    config: Json | None, params: Json | None, change: LayoutChange, ranks: int
) -> Json | None:
    if change.family is None:
        return None
    if params is not None:
        heads = (change.sizes or {}).get("k")
        head_count = max(heads, ranks) if heads and "k" in change.family.repeated else heads
        has_heads = "n_kv_heads" in get_model_params(params)
        params = (
            replace_model_param(params, "n_kv_heads", head_count)
            if head_count and has_heads
            else params
        )
        return replace_model_param(params, "vocab_size", change.vocab) if change.vocab else params
    if config is None:
        return None
    adapted = adapt_config(config, change)
    return config_to_params(change.family, adapted, change.sizes or {}, ranks=ranks)


def _replace_dtype(config: Json, dtype: str | None) -> Json:
    """Return *config* with its dtype replaced, keeping the key (``dtype`` or ``torch_dtype``)."""
    names = [name for name in ("dtype", "torch_dtype") if name in config]
    if dtype is None or all(config[name] in (dtype, None) for name in names):
        return config
    return {**config, **dict.fromkeys(names, dtype)}


def adapt_config(config: Json, change: LayoutChange) -> Json:
    """Return *config* adapted to ``--untie`` and ``--vocab-size``."""
    if change.family is None:
        return config
    if not change.tied and config.get("tie_word_embeddings"):
        config = {**config, "tie_word_embeddings": False}
    if change.vocab is None:
        return config
    name = choose_field_alias(config, change.family.sizes["v"][0])
    return _replace_nested(config, name.split("."), change.vocab)


def _replace_nested(values: Json, path: Sequence[str], value: object) -> Json:
    head, *tail = path
    inner = values.get(head)
    if tail:
        value = _replace_nested(inner if isinstance(inner, Mapping) else {}, tail, value)
    return {**values, head: value}


def dump_json(content: Json) -> bytes:
    """Serialize *content* as JSON in the style in which transformers writes config.json."""
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"
