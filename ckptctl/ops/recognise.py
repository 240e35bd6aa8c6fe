"""What a checkpoint is: where the model lies in it, which family it is, which layout it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptctl import families, formats
from ckptctl.catalog import Catalog
from ckptctl.errors import MappingError, UsageError, nearest
from ckptctl.ops.selection import Selection, checked_root, roots, select
from ckptctl.planner.detect import Candidate, Detection, detect
from ckptctl.planner.layouts import Family

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Recognition:
    """The result.

    Attributes:
        model_type: The family, if exactly one fits (or the user named it).
        candidates: All families that fit.
        layout: The layout, if exactly one fits; None for an unknown family.
        alike: Other layouts with the same names and axis orders.
        evidence: What speaks for it, for people.
        root: Prefix of the model's names inside the checkpoint, with its dot; ``""``: the top.
        exact: Whether every key is known and none is missing.
        config: ``config.json``, if there is one.
        params: ``params.json``, if there is one.
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

    @property
    def named(self) -> str:
        """Return the model type as a sentence can show it."""
        return self.model_type or " or ".join(self.candidates) or "unknown model"


def recognise(
    catalog: Catalog,
    model_type: str | None = None,
    layout: str | None = None,
    root: str | None = None,
    documents: Mapping[str, Json] | None = None,
) -> Recognition:
    """Find the model in *catalog* and say what it is.

    Args:
        catalog: The checkpoint.
        model_type: The family, where the user named it.
        layout: The layout, where the user named it.
        root: The model's prefix, where the user named it.
        documents: ``config.json`` and ``params.json``; None: the checkpoint's own.

    Raises:
        UsageError: The user named something that does not exist.
        MappingError: The tensors are not in the layout that the user named.
    """
    documents = catalog.documents if documents is None else documents
    config, params = documents.get("config.json"), documents.get("params.json")
    known = {model_type: families.family(model_type)} if model_type else families.families()
    _check_layout(layout, known)
    prefixes = [checked_root(catalog, root)] if root is not None else roots(catalog)
    prefer = layout or formats.get(catalog.format).layout
    best: tuple[str, Detection] | None = None
    for prefix in prefixes:
        selection = select(catalog, prefix)
        found = _detect(selection, known, config, params, prefer, bool(model_type))
        if best is None or _better(found, best[1]):
            best = prefix, found
        if found.exact:
            break
    if best is None:
        raise UsageError("there are no tensors", where=catalog.path)
    recognition = _recognition(best[0], best[1], model_type, layout, config, params)
    if layout is not None and not recognition.candidates:
        raise MappingError(
            f"the tensors are not in layout `{layout}`",
            where=catalog.path,
            why=f"their names are those of {' or '.join(map(_said, best[1].candidates))}"
            if best[1].candidates
            else "no known family has these keys in it",
        )
    return recognition


def _check_layout(layout: str | None, known: Mapping[str, Family]) -> None:
    names = sorted({name for family in known.values() for name in family.layouts})
    if layout is not None and layout not in names:
        close = nearest(layout, names)
        raise UsageError(
            f"unknown layout `{layout}`",
            why=f"known: {', '.join(names)}",
            hint=f"did you mean `{close}`?" if close else None,
        )


def require_one(found: Recognition, where: str) -> None:
    """Raise MappingError unless family and layout are known without doubt."""
    if not found.candidates:
        raise MappingError(
            "the model type is not known",
            where=where,
            why="no known family has these keys",
            hint="name it with `--model-type`; without mapping, hf, dcp and torch keep the names",
        )
    if found.model_type is None or found.layout is None:
        raise MappingError(
            f"two model types or layouts are possible: {' and '.join(found.evidence)}",
            where=where,
            hint="`--model-type` says which; a config.json (`--assets DIR`) decides it too",
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
    if named:
        return detect(shapes, known, prefer=prefer)
    return detect(shapes, known, config, params, prefer=prefer)


def _better(found: Detection, best: Detection) -> bool:
    return _rank(found) > _rank(best)


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
        model_type=names[0] if len(names) == 1 else model_type,
        candidates=names,
        layout=one or layout,
        alike=candidates[0].alike if candidates else (),
        evidence=tuple(_said(candidate) for candidate in candidates),
        root=root,
        exact=found.exact,
        config=config,
        params=params,
    )


def _said(candidate: Candidate) -> str:
    return f"{candidate.family} in layout {candidate.layout} ({', '.join(candidate.evidence)})"
