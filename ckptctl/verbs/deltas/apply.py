"""Apply deltas to a checkpoint, while the result is converted.

The changed tensors are virtual files (:mod:`ckptctl.numerics.kinds.delta`) in the catalog of the
base. Otherwise, this is an ordinary conversion. Before it begins, all data of the base and of the
deltas is read and compared with the digests of base and result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from ckptctl import families, formats
from ckptctl.catalog import ComputedTensor, ComputeInput, TensorEntry, build_computed_name
from ckptctl.conversion.convert import ConversionPlan, Step, plan_with_steps
from ckptctl.conversion.destinations import (
    is_replaceable,
    require_destination,
    require_writable_format,
)
from ckptctl.conversion.draft import Draft
from ckptctl.conversion.plan import Reasons
from ckptctl.conversion.recognition.model import ModelDescription
from ckptctl.formats.delta import ASSETS_FOLDER
from ckptctl.formats.sidecar_files import CONFIG_FILES
from ckptctl.numerics.kinds.delta import DeltaArguments
from ckptctl.results import JsonField, Result
from ckptctl.storage.paths import parse_path
from ckptctl.storage.threads import Advance
from ckptctl.tree import TreePath
from ckptctl.verbs.deltas.canonical import CanonicalCheckpoint
from ckptctl.verbs.deltas.chain import Chain, ResolvedTensor, open_delta
from ckptctl.verbs.deltas.check import check_chain, open_base, require_same_model
from ckptctl.verbs.deltas.delta_options import DeltaApplyOptions


@dataclass(frozen=True, slots=True)
class DeltaApplyPlan(Result):
    """Plan of applying deltas, including the plan of the conversion.

    Attributes:
        conversion: The conversion of the result.
        chain: The deltas.
        canonical: The base.
    """

    conversion: ConversionPlan
    deltas: Annotated[tuple[str, ...], JsonField("absolute paths of the deltas, in order")]
    changed: Annotated[int, JsonField("number of tensors that the deltas change or add")]
    base_sha256: Annotated[str, JsonField("digest of the tensors of the base")]
    result_sha256: Annotated[str, JsonField("digest of the tensors of the result")]
    delta_left_out: Annotated[
        Reasons,
        JsonField(
            "values and files of the result that the deltas do not include, such as optimizer "
            "state, by name"
        ),
    ]
    chain: Chain
    canonical: CanonicalCheckpoint

    @property
    def checked_bytes(self) -> int:
        """Number of bytes that :meth:`check` reads, about."""
        return self.canonical.catalog.nbytes

    def check(self, progress: Advance | None = None) -> None:
        """Read base and deltas, and raise unless all digests match."""
        jobs = self.conversion.options.jobs
        check_chain(self.chain, self.canonical, progress or (lambda _: None), jobs)


def plan_apply(
    base: str | TreePath,
    deltas: Sequence[str | TreePath],
    dst: str | TreePath,
    options: DeltaApplyOptions,
) -> DeltaApplyPlan:
    """Plan to apply *deltas* in turn, keeping the base's format unless *options* set ``to``.

    Raises:
        MappingError: The deltas belong to another model.
        RefusedError: The deltas do not follow each other.
    """
    base_path = formats.to_existing_path(base)
    chain = Chain([open_delta(path) for path in deltas])
    for delta in chain.deltas:
        require_destination(delta.root, parse_path(dst), options.overwrite, is_replaceable)
    with families.use_converter_file(options.converter):
        conversion_options = options.with_target_format(
            options.to or require_writable_format(base_path, options.from_format)
        )
        canonical_options = options.with_target_format(
            "peft" if _is_adapter_format(base_path, options) else "hf",
            **dict.fromkeys(("to_layout", "dtype", "dequantize", "quantize", "vocab_size")),
            **dict.fromkeys(("like", "max_shard_size", "tied"), None),
            **dict.fromkeys(("quantize_also", "quantize_not", "include", "exclude"), ()),
            mp=1,
            untie=False,
            stack_layers=False,
        )
        canonical = open_base(base_path, replace(canonical_options, overwrite=False), chain)
        require_same_model(chain, canonical, options.jobs)
        step = DeltaStep(chain, canonical)
        plan = plan_with_steps(
            base_path,
            dst,
            replace(conversion_options, from_layout=None, root=None),
            Step("delta", "source", 5, step.apply),
        )
        plan = _add_inputs(plan, chain)
    return DeltaApplyPlan(
        conversion=plan,
        deltas=tuple(str(delta.root) for delta in chain.deltas),
        changed=sum(1 for item in chain.tensors.values() if item.patches),
        base_sha256=chain.deltas[0].manifest.base_sha256,
        result_sha256=chain.result_sha256,
        delta_left_out=chain.deltas[-1].manifest.left_out_reasons,
        chain=chain,
        canonical=canonical,
    )


def _add_inputs(plan: ConversionPlan, chain: Chain) -> ConversionPlan:
    """Return *plan* with all files of the deltas as inputs, as they were when they were opened.

    The conversion raises if an input changed until its output is published. So it used the files
    that were checked.
    """
    inputs = dict(plan.plan.inputs)
    for delta in chain.deltas:
        for path, identity in delta.identities.items():
            name = path.removeprefix(f"{ASSETS_FOLDER}/")
            root = delta.root if name == path else delta.root / ASSETS_FOLDER
            inputs[root, name] = identity
    return replace(plan, plan=replace(plan.plan, inputs=inputs))


def _is_adapter_format(path: TreePath, options: DeltaApplyOptions) -> bool:
    source = (
        formats.get_format(options.from_format)
        if options.from_format
        else formats.detect_format(path)
    )
    return source.adapters


class DeltaStep:
    """Step of a conversion that replaces the base by the result of the deltas."""

    def __init__(self, chain: Chain, base: CanonicalCheckpoint) -> None:
        self._chain, self._base = chain, base

    def apply(self, draft: Draft) -> Draft:
        """Return *draft* with the tensors and sidecar files of the result."""
        catalog = self._base.catalog
        computed = dict(catalog.computed)
        tensors: dict[str, TensorEntry] = {}
        for name, resolved in self._chain.tensors.items():
            if resolved.record.alias_of is None:
                tensors[name] = self._build_entry(name, resolved, computed)
        for name, resolved in self._chain.tensors.items():
            if alias := resolved.record.alias_of:
                tensors[name] = replace(tensors[alias], name=name, path=(name,), alias_of=alias)
        ordered = {name: tensors[name] for name in self._chain.tensors}
        draft.notes.explain("skipped", self._base.left_out_values)
        draft = self._replace_assets(draft)
        result = replace(
            catalog,
            tensors=ordered,
            computed=computed,
            documents=draft.assets.documents,
        )
        manifest = self._chain.deltas[-1].manifest
        request = replace(
            draft.model.request,
            model_type=draft.options.model_type or manifest.model_type,
            layout=manifest.layout,
            root=None,
        )
        return replace(draft, model=replace(draft.model, catalog=result, request=request))

    def _build_entry(
        self, name: str, resolved: ResolvedTensor, computed: dict[str, ComputedTensor]
    ) -> TensorEntry:
        catalog = self._base.catalog
        if not resolved.patches:
            entry = catalog.tensors[resolved.base_name or name]
            return replace(entry, name=name, path=(name,), alias_of=None)
        record = resolved.record
        inputs = [] if resolved.base_name is None else [catalog.tensors[resolved.base_name]]
        file = build_computed_name(f"{name}@delta")
        manifests = [delta.manifest for delta, _ in resolved.patches]
        computed[file] = ComputedTensor(
            "delta",
            record.dtype,
            record.shape,
            (
                *(ComputeInput(catalog.root, entry) for entry in inputs),
                *(
                    ComputeInput(delta.root, delta.payloads[payload])
                    for delta, payload in resolved.patches
                ),
            ),
            DeltaArguments(
                resolved.base_name is not None,
                tuple(manifest.codec for manifest in manifests),
                tuple(manifest.block_bytes for manifest in manifests),
                record.nbytes,
            ),
        )
        return computed[file].to_entry(name, (name,), file)

    def _replace_assets(self, draft: Draft) -> Draft:
        """Replace the sidecar files that the deltas carry, except those from ``--assets``."""
        assets = draft.assets
        roots, sizes = dict(assets.roots), dict(assets.sizes)
        documents: dict[str, Mapping[str, object]] = dict(assets.documents)
        described = list(assets.described)
        given = {item.name for item in described if item.assets}
        for delta in self._chain.deltas:
            root = delta.root / ASSETS_FOLDER
            names = delta.manifest.assets
            for name in names:
                if draft.options.assets and name in roots and roots[name] != draft.source.root:
                    continue
                roots[name] = root
                sizes[name] = delta.manifest.files[f"{ASSETS_FOLDER}/{name}"].size
            for name in CONFIG_FILES:
                if name in given or name not in names:
                    continue
                content = delta.read_config(name)
                documents[name] = content
                described = [item for item in described if item.name != name]
                described.append(ModelDescription(name, str(root / name), content))
        changed = replace(
            assets, roots=roots, sizes=sizes, documents=documents, described=tuple(described)
        )
        return replace(draft, assets=changed)
