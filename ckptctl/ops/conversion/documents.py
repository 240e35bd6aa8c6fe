"""Configuration and side files of an output: what is written, what is carried along."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptctl import formats
from ckptctl.catalog import Catalog
from ckptctl.errors import MappingError, SourceNotFoundError, UsageError
from ckptctl.formats.assets import (
    DOCUMENTS,
    QUANTISATION,
    amended,
    beside,
    documents,
    left_behind,
)
from ckptctl.formats.base import WritableFormat, copied, document
from ckptctl.formats.rank_states import CONFIGURATION
from ckptctl.ops.conversion.carrying import carried
from ckptctl.ops.recognition.agreement import Description, of_training
from ckptctl.ops.recognition.layout_change import Change
from ckptctl.ops.recognition.quantised import QUANTIZATION
from ckptctl.planner.configs.stated import Json, plain
from ckptctl.planner.configs.translation import assumed, config_to_params, params_to_config
from ckptctl.planner.families.declarations import spelled
from ckptctl.planner.layouts import BASE, HF
from ckptctl.planner.plan import OutputFile, RawCopy
from ckptctl.storage.paths import path_at, path_hint

CONFIG, PARAMS = "config.json", "params.json"
NO_CONFIG = (
    "there is no config.json: transformers cannot load this without one; `--assets DIR` takes it,"
    " and the tokenizer, from the model that was trained"
)


@dataclass(frozen=True, slots=True)
class Assets:
    """Where configuration and side files come from.

    Attributes:
        roots: For each side file the directory that it lies in.
        sizes: Their sizes in bytes.
        documents: Parsed ``config.json`` and ``params.json``, those of ``--assets`` alone where it
            has any.
        others: Names of what lies in the same directories and does not travel; and why.
        changed: Documents that no longer say what their files say.
        described: All of them, those that ``--assets`` replaces, too.
    """

    roots: Mapping[str, str]
    sizes: Mapping[str, int]
    documents: Mapping[str, Json]
    others: Mapping[str, str] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()
    described: tuple[Description, ...] = ()

    def not_carried(self, target: WritableFormat) -> dict[str, str]:
        """Return the names of what an output of *target* does not get, and why."""
        alone = f"a {target.name} file carries no side files"
        own = dict.fromkeys({**self.sizes, **self.documents}, alone) if target.single_file else {}
        return {**own, **self.others}

    def notes(self, target: WritableFormat) -> list[str]:
        """Return what the user should know of what *target* could carry and does not get."""
        return [] if target.single_file else [*left_behind(self.others)]


@dataclass(frozen=True, slots=True)
class Papers:
    """The files of an output beside its weights.

    Attributes:
        files: Written or copied files.
        copies: How the copied ones are filled.
        contents: The written ones.
        notes: What the user should know.
    """

    files: tuple[OutputFile, ...]
    copies: tuple[RawCopy, ...]
    contents: Mapping[str, bytes]
    notes: tuple[str, ...] = ()


def stated_in(directory: str | Path) -> dict[str, Json]:
    """Return the configuration that ``--assets`` holds.

    Raises:
        SourceNotFoundError: There is no such directory.
    """
    root = Path(directory).expanduser().absolute()
    if not root.is_dir():
        raise SourceNotFoundError(
            "no such directory",
            where=str(root),
            why=f"--assets names a folder with {CONFIG} or {PARAMS}",
            hint=path_hint(root),
        )
    return documents(root)


def gather(catalog: Catalog, directory: str | Path | None, globs: Sequence[str] = ()) -> Assets:
    """Return the checkpoint's side files, those of ``--assets`` instead where it has them.

    Args:
        catalog: The checkpoint.
        directory: That of ``--assets``.
        globs: Those of ``--carry``: what travels beside the files of known kinds.

    Raises:
        SourceNotFoundError: ``--assets`` names no directory.
        UsageError: It holds nothing to take, or a glob matches nothing.
    """
    found, roots = _own(catalog), [path_at(catalog.root)]
    if directory is not None:
        roots.append(Path(directory).expanduser().absolute())
        found = _with_directory(catalog, found, roots[1])
    return carried(found, roots, globs) if globs else found


def _with_directory(catalog: Catalog, own: Assets, root: Path) -> Assets:
    """Return *own* with the files of ``--assets``, which is *root*."""
    stated, found = stated_in(root), beside(root, documented=False)
    if not found.assets and not stated:
        raise UsageError("there is no configuration or tokenizer here", where=str(root))
    described = own.documents if str(root) == catalog.root else stated
    theirs = (Description(name, str(root / name), one, True) for name, one in described.items())
    return Assets(
        {**own.roots, **dict.fromkeys(found.assets, str(root))},
        {**own.sizes, **found.assets},
        {**({} if described else own.documents), **described},
        {**own.others, **found.others},
        described=(*(own.described if str(root) != catalog.root else ()), *theirs),
    )


def _own(catalog: Catalog) -> Assets:
    """Return the checkpoint's side files; those of verl's folder come to lie beside the others."""
    root, inner = path_at(catalog.root), f"{CONFIGURATION}/"
    roots: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for name, size in sorted(catalog.assets.items(), key=lambda one: not one[0].startswith(inner)):
        short = name.removeprefix(inner)
        roots[short] = str(root if short == name else root / CONFIGURATION)
        sizes[short] = size
    described = (
        Description(name, str(path_at(roots.get(name, catalog.root)) / name), content)
        for name, content in catalog.documents.items()
        if name in DOCUMENTS
    )
    files = (*described, *of_training(catalog))
    return Assets(roots, sizes, catalog.documents, catalog.others, described=files)


def unquantised(assets: Assets) -> Assets:
    """Return *assets* as they hold once nothing is quantised any more."""
    described = tuple(replace(one, content=_plain(one.content)) for one in assets.described)
    config = assets.documents.get(CONFIG, {})
    if QUANTIZATION not in config:
        return replace(assets, described=described)
    documents = {**assets.documents, CONFIG: _plain(config)}
    changed = assets.changed | {CONFIG}
    sizes = {name: size for name, size in assets.sizes.items() if name not in QUANTISATION}
    return replace(assets, sizes=sizes, documents=documents, changed=changed, described=described)


def _plain(config: Json) -> Json:
    return {key: value for key, value in config.items() if key != QUANTIZATION}


def papers(
    assets: Assets,
    to_format: str,
    change: Change,
    *,
    ranks: int,
    dtype: str | None,
    cast: bool,
) -> Papers:
    """Decide which side files an output gets.

    Args:
        assets: What there is.
        to_format: Name of the target format.
        change: How the layout changes.
        ranks: Number of model-parallel shards.
        dtype: The floating dtype of most of the output's tensors.
        cast: Whether ``--dtype`` changed any tensor.

    Raises:
        MappingError: The target needs a configuration and none can be had or expressed.
    """
    if to_format == "torch":
        names = sorted({*assets.sizes, *assets.documents})
        note = f"a torch file carries no side files; {len(names)} stay behind: {', '.join(names)}"
        return Papers((), (), {}, (note,) if names else ())
    written = _written(assets, to_format, change, ranks, dtype, cast)
    notes: tuple[str, ...] = ()
    if to_format == "hf" and CONFIG not in assets.documents:
        made = CONFIG in written
        notes = (_about_config(change, assets.documents[PARAMS]) if made else NO_CONFIG,)
    if to_format == "hf":
        notes += (*_about_layout(change), *_about_class(assets.documents.get(CONFIG), change))
    if formats.target(to_format).described and PARAMS not in written:
        raise _no_params(to_format, change)
    kept = {name: size for name, size in assets.sizes.items() if name not in written}
    return Papers(
        tuple(document(name, content) for name, content in written.items())
        + tuple(copied(name, size) for name, size in kept.items()),
        tuple(RawCopy(name, 0, size, name, root=assets.roots[name]) for name, size in kept.items()),
        written,
        notes,
    )


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
