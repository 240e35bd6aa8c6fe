"""First stages of planning, which open the source and recognize the model in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ckptctl import formats
from ckptctl.conversion.assets import find_assets_folder, gather_assets
from ckptctl.conversion.checks import (
    require_existing_source,
    require_matching_suffix,
    require_valid_options,
)
from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.conversion.destinations import is_replaceable, require_destination
from ckptctl.conversion.draft import Draft
from ckptctl.conversion.recognition.model import (
    DEFAULT_REFERENCE,
    Model,
    ModelRequest,
    recognize_model,
)
from ckptctl.conversion.recognition.roots import strip_wrappers
from ckptctl.conversion.sources import open_source
from ckptctl.errors import MappingError, RefusedError, format_option
from ckptctl.formats.sidecar_files import read_config_files
from ckptctl.numerics.quantized import dequantize_hint_on_error, find_quantized_tensors
from ckptctl.storage.destinations import Replaceable
from ckptctl.storage.paths import parse_path
from ckptctl.storage.sources import raise_changed_if, require_same_file
from ckptctl.tree import TreePath


def open_draft(src: str | TreePath, dst: str | TreePath, options: ConversionOptions) -> Draft:
    """Check options and destination, open the source checkpoint, and start a draft."""
    target = formats.get_writable_format(options.to)
    require_valid_options(options, target)
    source = require_existing_source(src, dst)
    can_replace = Replaceable(is_replaceable, is_file=target.single_file)
    destination = require_destination(source, parse_path(dst), options.overwrite, can_replace)
    if not destination.is_upload:
        require_matching_suffix(destination.path, target)
    elif target.single_file and destination.path.parent == destination.path:
        raise RefusedError(
            "the destination has no file name",
            where=str(destination.typed_path),
            why=f"format {target.name} writes one file",
            hint=f"add a name, for example `{destination.typed_path}/model.pt`",
        )
    trusted = options.assets if options.trust_assets else None
    opened = open_source(
        source,
        options,
        partial=options.allow_missing,
        replicas=options.verify_replicas,
        documents=read_config_files(find_assets_folder(trusted)) if trusted else None,
    )
    opened = strip_wrappers(opened) if options.only == "model" else opened
    assets = gather_assets(opened, options.assets, options.carry)
    selected = options.model_type, options.from_layout, options.root, options.sizes
    request = ModelRequest(*selected, reference=options.reference or DEFAULT_REFERENCE)
    model = Model(opened, request, assets.documents)
    return Draft(options, target, destination, opened, assets, model, opened)


def detect_model(draft: Draft) -> Draft:
    """Recognize the type, layout and prefix of the draft's model, after the steps at ``source``."""
    try:
        model = recognize_model(draft.catalog, draft.assets.documents, draft.model.request)
    except MappingError as error:
        if draft.model.request.layout and not error.hint and find_quantized_tensors(draft.catalog):
            error.hint = (
                f"omit {format_option('--from-layout')}, or pass "
                f"{format_option('--dequantize bf16')}: the checkpoint is quantized"
            )
        raise
    return replace(draft, model=replace(model, described=draft.assets.described))


@contextmanager
def explain_errors(draft: Draft) -> Iterator[None]:
    """Add explanations to errors in the block.

    An error may be caused by a source that was replaced while it was read, or that is quantized.
    """
    opened = draft.source.opened
    with raise_changed_if(lambda: require_same_file(opened)), dequantize_hint_on_error(draft.model):
        yield
