"""Selection of the tensors and other values of a checkpoint to convert.

``--allow-missing`` skips items that are known to be incomplete.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ckptctl import formats
from ckptctl.catalog import Box, Catalog, Finding, TensorEntry
from ckptctl.conversion.draft import Draft
from ckptctl.conversion.items import read_item_headers
from ckptctl.conversion.recognition.lacking import find_missing_tensors
from ckptctl.conversion.recognition.roots import (
    ModelLeaves,
    is_selected,
    select_by_globs,
    select_model,
)
from ckptctl.conversion.training_state import iterate_name_parts
from ckptctl.errors import (
    CkptError,
    CoverageError,
    DamagedError,
    MappingError,
    UnsupportedError,
    UsageError,
    format_command,
    format_option,
    quote_names,
)
from ckptctl.numerics.quantized import survey_leniently
from ckptctl.planner.boxes import check_coverage
from ckptctl.storage.files import source_files
from ckptctl.storage.zips.zip_reader import read_archive
from ckptctl.tree import TreePath
from ckptctl.verdict import strip_structure_claim

OPTIMIZER_SETTINGS = "param_groups"
EXTRA_STATE = "._extra_state/"


def select_tensors(draft: Draft) -> Draft:
    """Select the tensors to convert, as specified by the options of *draft*.

    Incomplete tensors are skipped if ``--allow-missing`` is set.
    """
    catalog, options, root, notes = draft.catalog, draft.options, draft.model.root, draft.notes
    incomplete_names, unusable_files = (
        find_incomplete_items(draft.source) if options.allow_missing else ({}, {})
    )
    selection = select_model(catalog, root)
    if draft.target.training:
        selection = _add_module_states(selection, catalog)
    expected_names = tuple(selection.tensors)
    if draft.includes_training_state and not (selection.rest or selection.blobs):
        _require_no_unread_state(catalog)
        notes.add("the checkpoint contains no training state")
    if selection.rest and not draft.includes_training_state:
        why = f"not part of the model ({draft.keep_hint})"
        notes.explain("skipped", dict.fromkeys(selection.rest, why))
    missing_names = (
        name for name in incomplete_names if name.startswith(root) and name not in catalog.blobs
    )
    model_names = dict.fromkeys(
        (*expected_names, *(name.removeprefix(root) for name in missing_names))
    )
    missing_tensors = find_missing_tensors(draft.model, model_names, draft.layout)
    selection, excluded_names = select_by_globs(
        selection,
        options.include,
        options.exclude,
        draft.includes_training_state,
        missing_tensors.names,
    )
    if excluded_names:
        filter_options = f"{format_option('--include')}, {format_option('--exclude')}"
        notes.explain("skipped", dict.fromkeys(excluded_names, f"not selected ({filter_options})"))
    is_empty = not catalog.tensors and (incomplete_names or unusable_files)
    if (
        not selection.tensors
        and not is_empty
        and not (draft.includes_training_state and selection.rest)
    ):
        raise MappingError(
            "no tensors to convert",
            where=catalog.path,
            why="the checkpoint contains training state but no model" if selection.rest else None,
            hint=draft.keep_hint if selection.rest else None,
        )
    missing: dict[str, str] = {}
    if incomplete_names or unusable_files:
        absent_names, incomplete = _find_incomplete(draft, selection, incomplete_names)
        missing = {**incomplete, **unusable_files}
        expected_names += absent_names
        selection = _remove_names(selection, missing)
        if not selection.tensors:
            reasons = missing or incomplete_names
            name, why = next(iter(reasons.items()))
            raise DamagedError(
                "no complete tensors to convert",
                where=catalog.path,
                why=f"`{name}`: {why} ({len(reasons):,} missing in total)",
                hint=f"run {format_command('verify', catalog.path)} to list everything that "
                "is missing",
            )
    if missing_tensors.names:
        missing_tensors = missing_tensors.keep_only(
            [name for name in missing_tensors.names if _is_requested(draft, root + name)]
        )
        if not options.allow_missing:
            missing_tensors.require_complete(str(catalog.path), options.fill_from)
    expected_names += missing_tensors.names if missing_tensors.certain else ()
    notes.add(
        *(strip_structure_claim(missing_tensors.notes) if missing else missing_tensors.notes),
        *(f"`{name}`: {why}" for name, why in missing_tensors.shapes.items()),
    )
    missing |= missing_tensors.missing
    model = draft.model
    if not model.pairs:
        model = replace(model, dequantized_pairs=missing_tensors.model.pairs)
    return replace(
        draft,
        model=model,
        selection=selection,
        expected_names=expected_names,
        missing=missing,
        reference=missing_tensors.reference,
    )


def skip_tensors(draft: Draft, reasons_by_name: Mapping[str, str]) -> Draft:
    """Skip the tensors named in *reasons_by_name*, and optimizer state that depends on them.

    All missing items of the selection are added to the notes, with the reasons.
    """
    root, selection = draft.model.root, draft.selection
    missing_names = {**draft.missing, **{root + name: why for name, why in reasons_by_name.items()}}
    model = {root + name for name in (*selection.tensors, *reasons_by_name)} | missing_names.keys()
    training_state = selection.rest if draft.includes_training_state else ()
    missing = {**find_dependent_state(missing_names, model, training_state, root), **missing_names}
    draft.notes.explain("missing", missing)
    return replace(draft, selection=_remove_names(selection, missing), missing=missing)


def _is_requested(draft: Draft, name: str) -> bool:
    """Check if the options select the missing leaf *name*."""
    globs = draft.options.include, draft.options.exclude
    return is_selected(draft.catalog, name, draft.model.root, *globs, draft.includes_training_state)


def _add_module_states(selection: ModelLeaves, catalog: Catalog) -> ModelLeaves:
    """Add non-tensor module states, such as Transformer Engine's scales, to *selection*.

    Only programs that write such states expect to find them in a checkpoint.
    """
    states = {name: catalog.blobs[name] for name in selection.rest if EXTRA_STATE in name}
    rest = tuple(name for name in selection.rest if name not in states)
    return replace(selection, blobs={**selection.blobs, **states}, rest=rest)


def _require_no_unread_state(catalog: Catalog) -> None:
    """Raise if training state is next to the model of *catalog*, which contains none."""
    if folders := formats.list_unread_parts(catalog):
        raise UsageError(
            "the training state is in another checkpoint",
            where=catalog.path.parent,
            why=f"only `{catalog.path.name}` was read, not {quote_names(folders)}",
            hint="convert each of these folders separately",
        )
    files = formats.list_unread_trainer_files(catalog)
    if optimizer := next((name for name in files if name.startswith("optimizer")), None):
        raise UsageError(
            "the training state is in separate files",
            where=catalog.root,
            why=f"{quote_names(files)} were not read",
            hint=f"convert `{optimizer}` separately",
        )


def _find_incomplete(
    draft: Draft, selection: ModelLeaves, incomplete_names: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the names of the model's absent tensors, and the reason for each item not written."""
    catalog, root = draft.catalog, draft.model.root
    selected_names = {root + name for name in (*selection.tensors, *selection.blobs)}
    training_state = selection.rest if draft.includes_training_state else ()
    converted_names = {*selected_names, *training_state}
    absent = incomplete_names.keys() - catalog.tensors.keys() - catalog.blobs.keys()
    incomplete = {
        name: why
        for name, why in incomplete_names.items()
        if name in converted_names or (name in absent and _is_requested(draft, name))
    }
    absent_names = {name for name in absent if is_selected(catalog, name, root, (), (), False)}
    absent_in_model = sorted(name.removeprefix(root) for name in absent_names)
    return tuple(absent_in_model), {
        **find_dependent_state(incomplete, selected_names | absent_names, training_state, root),
        **incomplete,
    }


def _remove_names(selection: ModelLeaves, names: Collection[str]) -> ModelLeaves:
    """Remove the leaves whose names in the checkpoint are in *names* from *selection*."""
    root = selection.root
    return replace(
        selection,
        tensors={n: entry for n, entry in selection.tensors.items() if root + n not in names},
        blobs={n: blob for n, blob in selection.blobs.items() if root + n not in names},
        rest=tuple(name for name in selection.rest if name not in names),
    )


def find_dependent_state(
    missing: Iterable[str], model: Iterable[str], training_state: Sequence[str], root: str
) -> dict[str, str]:
    """Find optimizer state that is useless because items are missing, and return it with reasons.

    The moments of a parameter are useless without the parameter, and without each other. Settings
    in ``param_groups`` are kept.

    Args:
        missing: Names of missing items in the checkpoint.
        model: Names of all leaves of the model in the checkpoint.
        training_state: Names of leaves outside the model.
        root: Prefix of the model's names in the checkpoint.
    """
    model_names = set(model)
    missing = list(missing)
    parameters = {name.removeprefix(root) for name in model_names}
    missing_parameters = {name.removeprefix(root) for name in missing if name in model_names}
    missing_state_by_parent = {
        _get_parent_name(name): name
        for name in missing
        if name not in model_names and _is_optimizer_state(name)
    }
    reasons: dict[str, str] = {}
    for name in training_state if missing_parameters or missing_state_by_parent else ():
        if not _is_optimizer_state(name):
            continue
        parameter = next((part for part in iterate_name_parts(name) if part in parameters), None)
        if parameter in missing_parameters:
            reasons[name] = f"its parameter `{parameter}` is missing"
        elif _get_parent_name(name) in missing_state_by_parent:
            reasons[name] = (
                f"it depends on `{missing_state_by_parent[_get_parent_name(name)]}`, which is "
                "missing"
            )
    return reasons


def _is_optimizer_state(name: str) -> bool:
    parts = name.split(".")
    return "state" in parts and OPTIMIZER_SETTINGS not in parts


def _get_parent_name(name: str) -> str:
    return name.rpartition(".")[0]


def find_incomplete_items(catalog: Catalog) -> tuple[dict[str, str], dict[str, str]]:
    """Find the incomplete items of a checkpoint that was opened with ``partial``.

    Returns:
        Reasons for incomplete leaves, by name in the checkpoint, and reasons for unusable files
        whose contents are unknown, by file name.
    """
    _, item_findings = read_item_headers(replace(catalog, replicas={}))
    errors = [f for f in (*catalog.findings, *item_findings) if f.severity != "warning"]
    names = {finding.tensor: finding.summary for finding in errors if finding.tensor}
    names = _find_mismatched_files(catalog, item_findings) | names
    for name, boxes in catalog.lost.items():
        if boxes:
            names.setdefault(name, _explain_lost_boxes(boxes))
    for entry in catalog.tensors.values():
        if entry.name not in names and (why := _explain_coverage_gap(entry)):
            names[entry.name] = why
    aliases = ((t.name, t.alias_of) for t in catalog.tensors.values() if t.alias_of)
    _propagate_reasons(names, aliases, "it shares memory with")
    if names:
        pairs = (
            (weight.lead, name)
            for weight in survey_leniently(catalog).weights
            for name in weight.names[1:]
        )
        _propagate_reasons(names, pairs, "it is part of the same quantized tensor as")
    explained_files = {file for boxes in catalog.lost.values() for box, file in boxes if box.numel}
    explained_files |= {finding.file for finding in errors if finding.tensor and finding.file}
    unattributed = [f for f in errors if not f.tensor and f.file not in explained_files]
    return names, {f.file or f.what: f.summary for f in unattributed}


def _explain_lost_boxes(boxes: Sequence[tuple[Box, str]]) -> str:
    """Explain which unusable file stores some of the tensor's boxes."""
    known_file = next((file for box, file in boxes if box.numel), None)
    if known_file is None:
        return f"it may continue in `{boxes[0][1]}`, which cannot be used"
    return f"a part of it is in `{known_file}`, which cannot be used"


def _explain_coverage_gap(entry: TensorEntry) -> str | None:
    try:
        check_coverage(entry)
    except (CoverageError, UnsupportedError) as error:
        return error.why or error.what
    return None


def _propagate_reasons(names: dict[str, str], pairs: Iterable[tuple[str, str]], why: str) -> None:
    """Add a reason to *names* for each partner of a name that has a reason, transitively."""
    pairs = list(pairs)
    changed = True
    while changed:
        changed = False
        for name, partner in (*pairs, *((b, a) for a, b in pairs)):
            if name in names and partner not in names:
                names[partner] = f"{why} `{name}`"
                changed = True


class _StoredItem(NamedTuple):
    name: str
    file: str
    offset: int
    nbytes: int


def _find_mismatched_files(catalog: Catalog, item_findings: Sequence[Finding]) -> dict[str, str]:
    """Return a reason for each item that is stored in a file of another rank or save.

    A file of another rank or save may contain items of the right dtype and shape by chance, with
    other values. A single unreadable item counts as damage. The complete file is considered to be
    from another rank or save if several items are unreadable, if the bytes of an item are intact
    but belong to another item, or if the length of the file differs.
    """
    failed_names_by_file: dict[str, list[str]] = defaultdict(list)
    for finding in item_findings:
        if finding.severity == "error" and finding.file and finding.tensor in catalog.tensors:
            failed_names_by_file[finding.file].append(finding.tensor or "")
    items_by_file: dict[str, list[_StoredItem]] = defaultdict(list)
    for item in _iterate_items(catalog):
        if item.file in failed_names_by_file:
            items_by_file[item.file].append(item)
    reasons: dict[str, str] = {}
    for file, items in items_by_file.items():
        first, *other_names = failed_names_by_file[file]
        if (
            other_names
            or catalog.files.get(file) != max(item.offset + item.nbytes for item in items)
            or any(_is_readable(catalog.root, item) for item in items if item.name == first)
        ):
            suffix = f" and {len(other_names):,} more" if other_names else ""
            why = f"its file does not match the metadata: cannot read or verify `{first}`{suffix}"
            reasons |= {item.name: why for item in items}
    return reasons


def _iterate_items(catalog: Catalog) -> Iterator[_StoredItem]:
    for entry in catalog.tensors.values():
        for extent in entry.extents:
            yield _StoredItem(entry.name, extent.file, extent.offset, extent.nbytes)
    for blob in catalog.blobs.values():
        if blob.file is not None:
            yield _StoredItem(blob.name, blob.file, blob.offset, blob.nbytes)


def _is_readable(root: TreePath, item: _StoredItem) -> bool:
    """Check if the bytes of *item* are a readable ``torch.save`` zip."""
    try:
        with source_files(root) as files:
            read_archive(files, item.file, item.offset, item.nbytes)
    except CkptError:
        return False
    return True
