"""The text model of a model that sees pictures, as a source that lacks the rest of it."""

from __future__ import annotations

from dataclasses import replace

from ckptctl import families
from ckptctl.catalog import Catalog
from ckptctl.ops.conversion.assets import CONFIG, Assets
from ckptctl.ops.conversion.options import ConversionOptions
from ckptctl.ops.conversion.renaming import renamed
from ckptctl.ops.recognition.model import Description, Model, Request, understand
from ckptctl.planner.configs.facts import Json, read_sizes
from ckptctl.planner.families.declarations import looked_up, spellings
from ckptctl.planner.layouts import HF, Family
from ckptctl.planner.mapping.detect import configured
from ckptctl.planner.mapping.inner import ALONE, with_names_of
from ckptctl.planner.mapping.tensors import map_tensors


def as_part_of(
    catalog: Catalog, assets: Assets, options: ConversionOptions, whole: Family
) -> tuple[Catalog, Assets, Model, dict[str, str]] | None:
    """Return a text model under the names that it has in *whole*, and as what it is known then.

    Returns:
        The last are the names that its tensors had. None: it is no such part, or the configuration
        that counts is not that of *whole*.
    """
    config = assets.documents.get(CONFIG)
    module = spellings(whole.sizes.get("d", ("", ""))[0])[0].rpartition(".")[0]
    inner = looked_up(config or {}, module) if module else None
    if config is None or not isinstance(inner, dict):
        return None
    if whole.name not in configured(families.families(), config):
        return None
    own = {k: one for k, one in catalog.documents.items() if k == CONFIG} or {CONFIG: inner}
    known = understand(catalog, own, Request(None, options.from_layout, options.root))
    part = families.families().get(known.model_type or "")
    if part is None or known.layout is None or part.name not in _described(inner):
        return None
    joint = with_names_of(part, known.layout, whole, HF)
    if joint is None:
        return None
    shapes = {name: entry.shape for name, entry in known.tensors.items()}
    sizes = read_sizes(part, inner)
    change = map_tensors(joint, ALONE, HF, shapes, sizes, partial=True, tied=False)
    catalog, origins = renamed(catalog, change, known.root)
    described = tuple(_nested(one, config, module) for one in assets.described)
    request = Request(whole.name, None, known.root.rstrip(".") or ".", options.sizes)
    found = understand(catalog, assets.documents, request)
    return catalog, replace(assets, described=described), replace(found, layout=HF), origins


def _described(inner: Json) -> list[str]:
    """Return the model types that a text model's configuration allows."""
    return configured(families.families(), inner)


def _nested(file: Description, config: Json, module: str) -> Description:
    """Return what the text model's own config.json says, as that of the whole would say it."""
    if (
        file.name != CONFIG
        or file.assets
        or file.content.get("model_type") == config.get("model_type")
    ):
        return file
    return replace(file, content={**config, module: file.content})
