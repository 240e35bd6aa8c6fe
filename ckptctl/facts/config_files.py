"""Config files of an output: compared with each other, written, and copied."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ckptctl.conversion.assets import CONFIG, PARAMS, Assets
from ckptctl.conversion.contents import build_layout_request, find_main_dtype
from ckptctl.conversion.draft import Draft
from ckptctl.errors import MappingError, spell_option
from ckptctl.facts import MEGATRON
from ckptctl.facts.agreed_change import agree_on_change
from ckptctl.facts.megatron import longest, megatron_to_config, merged
from ckptctl.facts.mlx_config import for_layout, with_earlier_spelling
from ckptctl.facts.params import assumed, config_to_params, params_to_config
from ckptctl.formats.base import WritableFormat
from ckptctl.formats.sidecar_files import amended, kind_of
from ckptctl.numerics.quantization.statement import QUANTIZATION
from ckptctl.numerics.quantized import unsaid
from ckptctl.planner.config_facts import Json, get_model_params
from ckptctl.planner.families.declarations import find_set_alias
from ckptctl.planner.layouts import BASE, HF, MLX
from ckptctl.planner.mapping.mapped import compose_tensors
from ckptctl.planner.mapping.tensors import LayoutChange


def compare_descriptions(draft: Draft) -> Draft:
    """Compare the files that describe the source's model, and note differences."""
    asked = build_layout_request(draft)
    draft.notes.extend(agree_on_change(draft.model, draft.selection.tensors, asked))
    return draft


def config_files(draft: Draft) -> Draft:
    """Decide which config files to write next to the tensors of an output that is no adapter."""
    if draft.is_adapter:
        return draft
    assets, options, target, change = draft.assets, draft.options, draft.target, draft.change
    if target.single_file:
        names = sorted({*assets.sizes, *assets.documents})
        if names:
            behind = f"{len(names)} not copied: {', '.join(names)}"
            draft.notes.add(f"a single {target.name} file has no sidecar files; {behind}")
        return draft
    cast = (options.dtype or options.dequantize) is not None
    dtype = None
    if cast or CONFIG not in assets.documents:
        own = compose_tensors(change.tensors, draft.model.root, draft.output_root)
        plain = draft.quantization.original_tensors if draft.quantization else draft.tensors
        dtype = find_main_dtype([tensor for tensor in plain if tensor.name in own])
    written = _written(assets, target, change, draft.ranks, dtype, cast)
    config = written.get(CONFIG, assets.documents.get(CONFIG))
    if options.to_layout == MLX:
        spelled_earlier = with_earlier_spelling(config or {}, change.family)
        if spelled_earlier != (config or {}):
            written[CONFIG] = config = spelled_earlier
    if draft.quantization:
        if config is None:
            raise MappingError(
                f"{spell_option('--quantize')} requires config.json, which is missing",
                why="loaders read the quantization scheme from it",
                hint=f"pass {spell_option('--assets DIR')} to copy it from the trained model's "
                "folder",
            )
        written[CONFIG] = {**config, QUANTIZATION: draft.quantization.config}
    if target.name == "hf":
        draft.notes.add(*_about_transformers(draft, written))
        if not draft.quantization:
            draft.notes.add(*unsaid(draft.located, config, assets.sizes))
    if target.described and PARAMS not in written:
        raise MappingError(
            f"cannot write params.json, which format {target.name} requires",
            why="unknown model type" if change.family is None else "there is no config.json",
            hint=f"pass {spell_option('--assets DIR')} with the trained model's config.json or "
            "params.json",
        )
    contents = {name: dumped(document) for name, document in written.items()}
    return replace(draft, written=contents, copies=tuple(assets.list_copies(written)))


def _about_transformers(draft: Draft, written: Collection[str]) -> tuple[str, ...]:
    """Note missing files that transformers or its users need."""
    assets, change = draft.assets, draft.change
    notes = (*_about_layout(change), *_about_class(assets.documents.get(CONFIG), change))
    if CONFIG not in {*assets.documents, *written}:
        missing = (
            "there is no config.json, which transformers requires; pass "
            f"{spell_option('--assets DIR')} to copy it and the tokenizer from the trained model's "
            "folder"
        )
        return (missing, *notes)
    if CONFIG not in assets.documents:
        notes = (_about_config(change, assets), *notes)
    there = any(kind_of(name) == "tokenizer" for name in assets.sizes)
    if there or draft.options.assets or draft.catalog.format == "hf":
        return notes
    said = (
        f"no tokenizer is written; pass {spell_option('--assets DIR')} to copy it from the "
        "trained model's folder"
    )
    return (*notes, said)


def _about_layout(change: LayoutChange) -> tuple[str, ...]:
    """Note if transformers does not expect the output's tensor names."""
    family, layout = change.family, change.target_layout
    if layout in (None, HF, BASE) or (family and HF not in family.layouts):
        return ()
    if family and family.get_layout(layout).has_same_tensors(family.get_layout(HF)):
        return ()
    if layout.startswith("hf-"):
        return (f"transformers 5 reads layout {layout}; earlier versions may not",)
    return (f"transformers expects layout hf, but this is layout {layout}",)


def _about_class(config: Json | None, change: LayoutChange) -> tuple[str, ...]:
    """Note if config.json does not name the model class that vLLM needs.

    Source: vLLM's ``transformers_utils/config.py``: earlier versions stop, later ones use the class
    without a head.
    """
    if config is None or "model_type" not in config or config.get("architectures"):
        return ()
    family = change.family
    named = f' (for {family.name}: `["{family.architecture}"]`)' if family else ""
    return (f"{CONFIG} has no `architectures`, which vLLM needs to find the model class{named}",)


def _about_config(change: LayoutChange, assets: Assets) -> str:
    """Note the source of a generated config.json and the defaults assumed."""
    family = change.family.name if change.family else "?"
    tied = "tied" if change.tied else "untied"
    params, made_from, known = assets.documents.get(PARAMS), PARAMS, dict[str, object]()
    if params is not None and change.family:
        known = assumed(change.family, params)
    elif params is None:
        made_from, known = "Megatron's configuration", longest(_recorded(assets))
    more = "".join(f", {name} {value}" for name, value in known.items())
    return (
        f"config.json is generated from {made_from} for {family} with {tied} embeddings{more}; "
        f"pass {spell_option('--model-type')} or {spell_option('--assets')} if that is wrong"
    )


def _written(
    assets: Assets,
    target: WritableFormat,
    change: LayoutChange,
    ranks: int,
    dtype: str | None,
    cast: bool,
) -> dict[str, Json]:
    """Build the config files of an output that differ from the source's."""
    config, params = assets.documents.get(CONFIG), assets.documents.get(PARAMS)
    written: dict[str, Json] = {}
    if config is not None:
        adapted = adapted_config(config, change)
        changed = _with_dtype(adapted, dtype) if cast else adapted
        changed = for_layout(changed, change.family, change.target_layout)
        if changed != config or CONFIG not in assets.sizes or CONFIG in assets.changed:
            written[CONFIG] = changed
    elif target.name == "hf" and change.family:
        family, sizes, recorded = change.family, change.sizes or {}, _recorded(assets)
        if params is not None:
            written[CONFIG] = params_to_config(family, params, sizes, tied=change.tied, dtype=dtype)
        elif recorded and family.megatron:
            made = megatron_to_config(family, recorded, sizes, tied=change.tied, dtype=dtype)
            written[CONFIG] = adapted_config(made, change)
    if target.name == "dcp" and params is not None:
        written[PARAMS] = params
    if target.described:
        found = _params(config, params, change, ranks)
        if found is not None:
            written[PARAMS] = found
    return written


def _recorded(assets: Assets) -> Json:
    """Merge the model records of Megatron-based programs."""
    return merged(one.content for one in assets.described if one.name == MEGATRON)


def _params(
    config: Json | None, params: Json | None, change: LayoutChange, ranks: int
) -> Json | None:
    if change.family is None:
        return None
    if params is not None:
        heads = (change.sizes or {}).get("k")
        stated = max(heads, ranks) if heads and "k" in change.family.repeated else heads
        known = "n_kv_heads" in get_model_params(params)
        params = amended(params, "n_kv_heads", stated) if stated and known else params
        return amended(params, "vocab_size", change.vocab) if change.vocab else params
    if config is None:
        return None
    adapted = adapted_config(config, change)
    return config_to_params(change.family, adapted, change.sizes or {}, ranks=ranks)


def _with_dtype(config: Json, dtype: str | None) -> Json:
    """Return *config* with its dtype replaced, under the key that it uses."""
    names = [name for name in ("dtype", "torch_dtype") if name in config]
    if dtype is None or all(config[name] in (dtype, None) for name in names):
        return config
    return {**config, **dict.fromkeys(names, dtype)}


def adapted_config(config: Json, change: LayoutChange) -> Json:
    """Return *config* as it is after ``--untie`` and ``--vocab-size``."""
    if change.family is None:
        return config
    if not change.tied and config.get("tie_word_embeddings"):
        config = {**config, "tie_word_embeddings": False}
    if change.vocab is None:
        return config
    name = find_set_alias(config, change.family.sizes["v"][0])
    return _replaced(config, name.split("."), change.vocab)


def _replaced(values: Json, path: Sequence[str], value: object) -> Json:
    head, *tail = path
    inner = values.get(head)
    if tail:
        value = _replaced(inner if isinstance(inner, Mapping) else {}, tail, value)
    return {**values, head: value}


def dumped(content: Json) -> bytes:
    """Serialize *content* in the JSON format of transformers."""
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"
