"""How the tensors of a model become those of the layout that is written."""

from __future__ import annotations

from dataclasses import replace

from ckptctl import formats
from ckptctl.ops.conversion.checks import keep_together
from ckptctl.ops.conversion.contents import should_untie
from ckptctl.ops.conversion.draft import Draft
from ckptctl.ops.conversion.part import skip_parts
from ckptctl.ops.recognition.layout_change import LayoutRequest, change_layout
from ckptctl.ops.recognition.model import require_one_model, root_hint
from ckptctl.planner.layouts import HF


def map_layout(draft: Draft) -> Draft:
    """Say what the model's tensors become, and what a user should know of it."""
    options, target, root = draft.options, draft.target, draft.root
    asked = LayoutRequest(
        draft.layout,
        described=target.parallel or target.described,
        untie=should_untie(draft),
        partial=bool(options.include or options.exclude or draft.missing),
        vocab=options.vocab_size,
        pads=target.pads,
        whole=draft.whole,
        missing={name.removeprefix(root) for name in draft.missing},
        trust_assets=options.trust_assets,
    )
    if not draft.everything:
        require_one_model(draft.model)
    tensors = draft.selection.tensors
    change = change_layout(draft.model, tensors, asked)
    names = {root + name for name in tensors}
    keep_together(draft.catalog, names, renamed=not change.identity, dtype=options.dtype)
    draft.notes.extend(change.notes)
    draft = replace(draft, change=change)
    _warn_of_names(draft)
    return skip_parts(draft, change.left_out)


def _warn_of_names(draft: Draft) -> None:
    """Warn of names that become Hugging Face's only in that they are in its files."""
    cut = bool(draft.root) and not draft.everything
    new = draft.target.layout == HF and (cut or formats.get(draft.catalog.format).layout != HF)
    known = draft.change.family or draft.model.candidates
    if not known and new and not draft.is_adapter:
        hint = root_hint(draft.model)
        draft.notes.add(f"unknown model type; keys are copied unchanged ({hint})", kind="warning")
