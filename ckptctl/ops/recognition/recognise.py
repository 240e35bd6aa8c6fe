"""What a checkpoint is: where the model lies in it, which family it is, which layout it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckptctl import families, formats
from ckptctl.catalog import Catalog
from ckptctl.errors import (
    MappingError,
    UsageError,
    nearest,
    possible,
)
from ckptctl.ops.recognition.roots import (
    checked_root,
    containers,
    covers,
    roots,
    subtrees,
)
from ckptctl.ops.recognition.selection import Selection, select
from ckptctl.planner.configs.stated import Json
from ckptctl.planner.layouts import BASE, Family
from ckptctl.planner.mapping.adapters import is_adapter
from ckptctl.planner.mapping.detect import Candidate, Detection, detect


@dataclass(frozen=True, slots=True)
class Recognition:
    """The result.

    Attributes:
        model_type: The family, if exactly one fits.
        layout: The layout, if exactly one fits; None for an unknown family.
        alike: Other layouts with the same names and axis orders.
        root: Prefix of the model's names inside the checkpoint, with its dot; ``""``: the top.
        exact: Whether every key is known and none is missing.
        asked: The family that the user named.
        inside: Where nothing fits at *root*: prefixes of the models that lie elsewhere in it, each
            with the families that it may be.
        pairs: Families and layouts that fit, the first of each that are alike.
    """

    model_type: str | None
    candidates: tuple[str, ...]
    layout: str | None
    alike: tuple[str, ...]
    evidence: tuple[str, ...]
    root: str
    exact: bool
    config: Json | None
    params: Json | None
    asked: str | None = None
    inside: tuple[tuple[str, tuple[str, ...]], ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()

    @property
    def named(self) -> str:
        """Return the model type as a sentence can show it."""
        return self.model_type or possible(self.candidates) or "unknown model"


def recognise(
    catalog: Catalog,
    model_type: str | None = None,
    layout: str | None = None,
    root: str | None = None,
    documents: Mapping[str, Json] | None = None,
) -> Recognition:
    """Find the model in *catalog* and say what it is, by *documents* or else the catalog's own."""
    documents = catalog.documents if documents is None else documents
    config, params = documents.get("config.json"), documents.get("params.json")
    known = {model_type: families.family(model_type)} if model_type else families.families()
    if is_adapter(catalog.tensors):
        known = families.adapters(known.values())
        model_type = next(iter(known), None) if model_type else None
    _check_layout(layout, known)
    prefixes = [checked_root(catalog, root)] if root is not None else roots(catalog)
    prefer = layout or formats.get(catalog.format).layout
    named = containers(catalog)
    tried: dict[str, Detection] = {}
    for prefix in prefixes:
        if prefix not in named and any(one.exact for one in tried.values()):
            break
        selection = select(catalog, prefix)
        seen = _detect(selection, known, config, params, prefer, bool(model_type))
        tried[prefix] = seen if layout else _of_format(seen, catalog.format)
    best = max(tried.items(), key=lambda item: _rank(item[1]))
    _require_one_root(best, {p: d for p, d in tried.items() if p in named}, catalog.path)
    asked = root is not None or bool(best[1].candidates)
    inside = {} if asked else _inside(catalog, known, tried)
    if len(inside) == 1 and covers(catalog, next(iter(inside))):
        best = next(iter(inside.items()))
    found = _recognition(*best, model_type, layout, config, params)
    if not found.candidates:
        found = replace(found, inside=tuple((p, _families(d)) for p, d in inside.items()))
    return _settled(found, best[1], catalog, known, layout)


def _inside(
    catalog: Catalog, known: Mapping[str, Family], tried: Mapping[str, Detection]
) -> dict[str, Detection]:
    """Return the parts of *catalog* that are exactly a model of a family, by their prefixes."""
    found: dict[str, Detection] = {}
    for prefix in subtrees(catalog):
        if prefix in tried or any(prefix.startswith(outer) for outer in found):
            continue
        shapes = {name: one.shape for name, one in select(catalog, prefix).tensors.items()}
        seen = detect(shapes, known, least=1.0, root=prefix)
        if seen.exact:
            found[prefix] = seen
    return found


def _families(found: Detection) -> tuple[str, ...]:
    return tuple(dict.fromkeys(candidate.family for candidate in found.candidates))


def _settled(
    found: Recognition,
    seen: Detection,
    catalog: Catalog,
    known: Mapping[str, Family],
    layout: str | None,
) -> Recognition:
    """Return *found* with what names and shapes leave open."""
    if found.layout is None and found.exact and is_adapter(catalog.tensors):
        # Layouts that differ only in layers that are not adapted: any of them is right.
        found = replace(found, layout=seen.candidates[0].layout)
    if found.asked is None and found.config is None:
        found = _perhaps_tied(found, select(catalog, found.root), known)
    if layout is not None and not found.candidates:
        names = " or ".join(map(_said, seen.candidates))
        raise MappingError(
            f"the tensors are not in layout `{layout}`",
            where=catalog.path,
            why=f"their names are those of {names}"
            if names
            else "no known family has these keys in it",
        )
    return found


def _check_layout(layout: str | None, known: Mapping[str, Family]) -> None:
    names = sorted({name for family in known.values() for name in family.layouts})
    if layout is not None and layout not in (*names, BASE):
        close = nearest(layout, names)
        raise UsageError(
            f"unknown layout `{layout}`",
            why=f"known: {', '.join(names)}",
            hint=f"did you mean `{close}`?" if close else None,
        )


def _detect(
    selection: Selection,
    known: Mapping[str, Family],
    config: Json | None,
    params: Json | None,
    prefer: str | None,
    named: bool,
) -> Detection:
    shapes = {name: entry.shape for name, entry in selection.tensors.items()}
    root = selection.root
    return detect(shapes, known, config, params, prefer=prefer, named=named, root=root)


def _of_format(found: Detection, format: str) -> Detection:
    """Return the candidates in the layout that the format always has, where there are any."""
    known = formats.get(format)
    fitting = [c for c in found.candidates if known.layout in (c.layout, *c.alike)]
    if known.other_layouts or not fitting:
        return found
    return replace(found, candidates=tuple(fitting))


def _perhaps_tied(
    found: Recognition, selection: Selection, known: Mapping[str, Family]
) -> Recognition:
    """Name the tied families, too, where nothing but equal tensors tells them apart.

    Meta's files of Llama 3.2 hold the embedding twice, and params.json does not say that the two
    are one.
    """
    family = known.get(found.model_type or "")
    if family is None or family.tied or found.layout is None or not found.exact:
        return found
    leaves = family.layout(found.layout).leaves
    pairs = [
        (leaves[tie.tensor].key.text, leaves[tie.of].key.text)
        for tie in family.ties
        if tie.tensor in leaves and tie.of in leaves
    ]
    if not any(_same_crc(selection, *pair) for pair in pairs):
        return found
    tied = [name for name, other in known.items() if other.tied and other.refines == family.name]
    evidence = (f"{name}, because its tied tensors hold the same bytes" for name in tied)
    return replace(
        found,
        model_type=None if tied else found.model_type,
        candidates=(*found.candidates, *tied),
        evidence=(*found.evidence, *evidence),
    )


def _same_crc(selection: Selection, one: str, other: str) -> bool:
    """Whether two tensors have the same recorded checksums, box by box."""
    crcs = [
        [(extent.box, extent.crc32) for extent in selection.tensors[name].extents]
        for name in (one, other)
        if name in selection.tensors
    ]
    return len(crcs) == 2 and crcs[0] == crcs[1] and all(crc is not None for _, crc in crcs[0])


def _require_one_root(
    best: tuple[str, Detection], named: Mapping[str, Detection], where: str
) -> None:
    alike = [prefix for prefix, found in named.items() if _rank(found) == _rank(best[1])]
    equals = [p for p in alike if not any(q != p and q.startswith(p) for q in alike)]
    if best[0] in equals and len(equals) > 1:
        shown = " or ".join(f"`{prefix.rstrip('.')}`" for prefix in equals)
        raise MappingError(
            f"the model could be under {shown}",
            where=where,
            why="both are containers that fit equally well",
            hint=f"say which with `--root {equals[0].rstrip('.')}`",
        )


def _rank(found: Detection) -> tuple[bool, float]:
    return found.exact, max((c.share for c in found.candidates), default=0.0)


def _recognition(
    root: str,
    found: Detection,
    model_type: str | None,
    layout: str | None,
    config: Json | None,
    params: Json | None,
) -> Recognition:
    candidates = [c for c in found.candidates if layout in (None, c.layout, *c.alike)]
    names = tuple(dict.fromkeys(c.family for c in candidates))
    layouts = {layout} if layout and candidates else {c.layout for c in candidates}
    one = next(iter(layouts)) if len(layouts) == 1 else None
    return Recognition(
        model_type=names[0] if len(names) == 1 else model_type if names else None,
        candidates=names,
        layout=one or layout,
        alike=candidates[0].alike if candidates else (),
        evidence=tuple(_said(candidate) for candidate in candidates),
        root=root,
        exact=found.exact,
        config=config,
        params=params,
        asked=model_type,
        pairs=tuple((c.family, c.layout) for c in candidates),
    )


def _said(candidate: Candidate) -> str:
    return f"{candidate.family} in layout {candidate.layout} ({', '.join(candidate.evidence)})"
