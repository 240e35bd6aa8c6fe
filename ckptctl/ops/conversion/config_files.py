"""The config files of an output: what is written, and which side files are copied."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckptctl import formats
from ckptctl.errors import MappingError
from ckptctl.formats.assets import (
    amended,
)
from ckptctl.formats.base import copied, document
from ckptctl.ops.conversion.assets import CONFIG, PARAMS, Assets
from ckptctl.planner.configs.stated import Json, plain
from ckptctl.planner.configs.translation import assumed, config_to_params, params_to_config
from ckptctl.planner.families.declarations import spelled
from ckptctl.planner.layouts import BASE, HF
from ckptctl.planner.mapping.tensors import Change
from ckptctl.planner.plan import OutputFile, RawCopy

NO_CONFIG = (
    "there is no config.json: transformers cannot load this without one; `--assets DIR` takes it,"
    " and the tokenizer, from the model that was trained"
)


@dataclass(frozen=True, slots=True)
class ConfigFiles:
    """The files of an output beside its weights: copied ones, and those with *contents*."""

    files: tuple[OutputFile, ...]
    copies: tuple[RawCopy, ...]
    contents: Mapping[str, bytes]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, written: Mapping[str, bytes], copies: Iterable[RawCopy], notes: Iterable[str] = ()
    ) -> ConfigFiles:
        """Files that are written, and copies of whole files."""
        files = [document(name, content) for name, content in written.items()]
        copies = tuple(copies)
        files += [copied(copy.target, copy.nbytes) for copy in copies]
        return cls(tuple(files), copies, written, tuple(notes))


def config_files(
    assets: Assets,
    to_format: str,
    change: Change,
    *,
    ranks: int,
    dtype: str | None,
    cast: bool,
) -> ConfigFiles:
    """Decide which side files an output gets."""
    if to_format == "torch":
        names = sorted({*assets.sizes, *assets.documents})
        note = f"a torch file carries no side files; {len(names)} stay behind: {', '.join(names)}"
        return ConfigFiles.of({}, (), (note,) if names else ())
    written = _written(assets, to_format, change, ranks, dtype, cast)
    notes: tuple[str, ...] = ()
    if to_format == "hf" and CONFIG not in assets.documents:
        made = CONFIG in written
        notes = (_about_config(change, assets.documents[PARAMS]) if made else NO_CONFIG,)
    if to_format == "hf":
        notes += (*_about_layout(change), *_about_class(assets.documents.get(CONFIG), change))
    if formats.target(to_format).described and PARAMS not in written:
        raise _no_params(to_format, change)
    return ConfigFiles.of(written, assets.copies(written), notes)


def _about_layout(change: Change) -> tuple[str, ...]:
    """Say so where transformers does not look for the names that the output has."""
    family, layout = change.family, change.target_layout
    if layout in (None, HF, BASE) or (family and HF not in family.layouts):
        return ()
    if family and family.layout(layout).same_as(family.layout(HF)):
        return ()
    if layout.startswith("hf-"):
        return (f"transformers 5 reads layout {layout}, earlier versions may not",)
    return (f"transformers reads layout hf, and this is layout {layout}",)


def _about_class(config: Json | None, change: Change) -> tuple[str, ...]:
    """Say so where vLLM does not find which class generates text, as transformers does.

    Source: vLLM's ``transformers_utils/config.py``: earlier versions stop, later ones take the
    class without a head.
    """
    if config is None or "model_type" not in config or config.get("architectures"):
        return ()
    family = change.family
    named = f'; that of {family.name} is `["{family.architecture}"]`' if family else ""
    return (f"{CONFIG} has no `architectures`, where vLLM looks for the class of the model{named}",)


def _about_config(change: Change, params: Json) -> str:
    family = change.family.name if change.family else "?"
    tied = "tied" if change.tied else "untied"
    known = assumed(change.family, params) if change.family else {}
    more = "".join(f", {name} {value}" for name, value in known.items())
    return (
        f"config.json is made from params.json as for {family}, embeddings {tied}{more}; "
        "`--model-type` or `--assets` if that is wrong"
    )


def _written(
    assets: Assets, to_format: str, change: Change, ranks: int, dtype: str | None, cast: bool
) -> dict[str, bytes]:
    config, params = assets.documents.get(CONFIG), assets.documents.get(PARAMS)
    written: dict[str, bytes] = {}
    if config is not None:
        changed = resized(_untied(_with_dtype(config, dtype) if cast else config, change), change)
        if changed != config or CONFIG not in assets.sizes or CONFIG in assets.changed:
            written[CONFIG] = dumped(changed)
    if to_format == "hf" and config is None and params is not None and change.family:
        made = params_to_config(
            change.family, params, change.sizes or {}, tied=change.tied, dtype=dtype
        )
        written[CONFIG] = dumped(made)
    if to_format == "dcp" and params is not None:
        written[PARAMS] = dumped(params)
    if formats.target(to_format).described:
        found = _params(config, params, change, ranks)
        if found is not None:
            written[PARAMS] = dumped(found)
    return written


def _params(config: Json | None, params: Json | None, change: Change, ranks: int) -> Json | None:
    if change.family is None:
        return None
    if params is not None:
        heads = (change.sizes or {}).get("k")
        stated = max(heads, ranks) if heads and "k" in change.family.repeated else heads
        known = "n_kv_heads" in plain(params)
        params = amended(params, "n_kv_heads", stated) if stated and known else params
        return amended(params, "vocab_size", change.vocab) if change.vocab else params
    if config is None:
        return None
    told = resized(_untied(config, change), change)
    return config_to_params(change.family, told, change.sizes or {}, ranks=ranks)


def _no_params(to_format: str, change: Change) -> MappingError:
    known = "the model type is not known" if change.family is None else "there is no config.json"
    return MappingError(
        f"format {to_format} needs params.json, and it cannot be written",
        why=known,
        hint="`--assets DIR` takes it from the model that was trained: a folder with config.json or"
        " params.json",
    )


def _with_dtype(config: Json, dtype: str | None) -> Json:
    """Return *config* with its dtype replaced, under the name it has there."""
    names = [name for name in ("dtype", "torch_dtype") if name in config]
    if dtype is None or all(config[name] in (dtype, None) for name in names):
        return config
    return {**config, **dict.fromkeys(names, dtype)}


def _untied(config: Json, change: Change) -> Json:
    """Return *config* as it holds after ``--untie``."""
    if change.family is None or change.tied or not config.get("tie_word_embeddings"):
        return config
    return {**config, "tie_word_embeddings": False}


def resized(config: Json, change: Change) -> Json:
    """Return *config* as it holds after ``--vocab-size``."""
    if change.family is None or change.vocab is None:
        return config
    name = spelled(config, change.family.sizes["v"][0])
    return _replaced(config, name.split("."), change.vocab)


def _replaced(values: Json, path: Sequence[str], value: object) -> Json:
    head, *tail = path
    inner = values.get(head)
    if tail:
        value = _replaced(inner if isinstance(inner, Mapping) else {}, tail, value)
    return {**values, head: value}


def dumped(content: Json) -> bytes:
    """Return *content* as the JSON that transformers writes."""
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"
