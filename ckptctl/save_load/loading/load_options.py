"""Options of a load, and the report that a load returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ckptctl import option_checks as checks
from ckptctl import shared_options as opt
from ckptctl.catalog import Catalog
from ckptctl.conversion.recognition.model import ModelRequest
from ckptctl.conversion.recognition.roots import rename_leaves
from ckptctl.conversion.sources import open_source
from ckptctl.errors import MappingError, UsageError, find_nearest, rename_options_in_messages
from ckptctl.numerics.dequantizing import read_assets_quantization_configs
from ckptctl.numerics.quantized import dequantize_catalog
from ckptctl.options import Option, Options
from ckptctl.save_load.loading.state_mapping import MappingRequest
from ckptctl.storage.outcome import OutOfRange, require_in_range
from ckptctl.tree import TreePath

Strict = bool | Literal["model", "state"]
"""Keys that must match in the checkpoint and the state.

These are all keys (True), no keys (False), the model's keys, or the state's keys.
"""
Rename = Mapping[str, str] | Callable[[str], str]
"""Mapping or function from keys of a checkpoint to new keys."""


def _require_rename(value: Rename) -> Rename:
    if not isinstance(value, Mapping) and not callable(value):
        raise UsageError(f"{value!r} is neither a dictionary of keys nor a function")
    return value


@dataclass(frozen=True, kw_only=True)
class LoadOptions(Options):
    """Options for loading a checkpoint into a state dict."""

    model_type: Annotated[
        str | None, Option("Model type, required only if keys or axes change. Detected if None.")
    ] = None
    layout: Annotated[str | None, Option("Layout of the state's keys. Detected if None.")] = None
    from_layout: Annotated[
        str | None, Option("Layout of the checkpoint's keys. Detected if None.")
    ] = None
    format: Annotated[
        str | None, Option("Format of the checkpoint. Detected if None.", flags="--from")
    ] = None
    root: Annotated[
        str | None, Option("Prefix of the model's keys in the checkpoint. Detected if None.")
    ] = None
    weights: opt.Weights = None
    tag: opt.Tag = None
    rules: opt.Rules = None
    ranks: opt.Ranks = None
    sizes: opt.Sizes = None
    assets: opt.Assets = None
    trust_assets: opt.TrustAssets = False
    dequantize: opt.Dequantize = None
    cast: Annotated[
        bool,
        Option(
            "Allow floating-point tensors of the state to have a different dtype than in the "
            "checkpoint."
        ),
    ] = False
    allow_overflow: Annotated[
        bool,
        Option(
            "Allow elements to become infinite, NaN or saturated by a cast or by "
            "*dequantize*. Otherwise the load fails after it has filled the tensors."
        ),
    ] = False
    trusted: Annotated[
        bool,
        Option("Allow non-tensor values to run code when they are unpickled."),
    ] = False
    checksum: Annotated[
        bool, Option("Compare the recorded checksums of items that are read in full.")
    ] = False
    jobs: Annotated[
        int | None,
        Option(
            "Number of threads per rank. None uses its share of the host's cores, at most 16.",
            check=checks.build_minimum_check(0),
        ),
    ] = None
    rename: Annotated[
        Rename | None,
        Option(
            "Dictionary or function that maps keys of the checkpoint to keys of the "
            "state. Layouts are detected from the new keys.",
            check=_require_rename,
        ),
    ] = None
    strict: Strict = True  # missing and unexpected keys are errors

    @property
    def mapping(self) -> MappingRequest:
        """Options that concern the mapping of keys and layouts from the checkpoint to the state."""
        return MappingRequest(
            source=ModelRequest(self.model_type, self.from_layout, self.root, self.sizes),
            state=ModelRequest(layout=self.layout),
            assets=self.assets,
            trust_assets=self.trust_assets,
            dequantized=bool(self.dequantize),
            partial=False if self.strict else None,
        )

    def open_catalog(self, path: str | TreePath) -> Catalog:
        """Open the index of the checkpoint at *path*.

        Keys are renamed and quantized tensors are dequantized if the options request it.
        """
        catalog = open_source(path, self)
        if self.rename is not None:
            catalog = rename_keys(catalog, self.rename)
        if not self.dequantize:
            return catalog
        with rename_options_in_messages({"--dtype": "cast=True"}):
            return dequantize_catalog(
                catalog, self.dequantize, read_assets_quantization_configs(self.assets)
            )

    def require_in_range(self, out_of_range: Mapping[str, OutOfRange]) -> None:
        """Raise if a cast made elements infinite, NaN or saturated, unless this is allowed.

        The option ``allow_overflow`` allows it.
        """
        if not self.allow_overflow:
            require_in_range(out_of_range, "pass `allow_overflow=True` to load them anyway")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The report of a load on one rank.

    Attributes:
        loaded: Keys of the tensors and other values of the state that were filled.
        missing: Keys of the state, on any rank, that the checkpoint does not have.
        unexpected: Keys of the checkpoint that no rank has, next to keys of the state.
        left_out: Keys in other parts of the checkpoint, or dropped by a rule, and the reason.
        cast: Keys of tensors that were cast, with the old and the new dtype.
        notes: Notes for the user.
        format: Format of the checkpoint.
        model_type: Model type, if keys or axes changed.
        from_layout: Layout of the checkpoint, if keys or axes changed.
        layout: Layout of the state, if keys or axes changed.
        bytes_read: Bytes of tensors that this rank read.
        bytes_received: Bytes that other ranks read for this rank.
        out_of_range: Elements read by this rank that became infinite, NaN or saturated, by key of
            the state.
        inherited: Values that differ between the ranks that saved, and that this rank received
            from the lowest of them because it did not take part in the save.
        on_meta: Tensors of modules in the state that are still on the meta device, such as buffers
            that are not saved. The checkpoint does not contain them, so they must be initialized
            separately.
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    cast: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    format: str = ""
    model_type: str | None = None
    from_layout: str | None = None
    layout: str | None = None
    bytes_read: int = 0
    bytes_received: int = 0
    inherited: tuple[str, ...] = ()
    out_of_range: Mapping[str, OutOfRange] = field(default_factory=dict)
    on_meta: tuple[str, ...] = ()


def rename_keys(catalog: Catalog, rename: Rename) -> Catalog:
    """Return a copy of *catalog* whose tensors and values have the keys that *rename* gives.

    Raises:
        MappingError: A key is not in the checkpoint, or two keys get the same new key.
        UsageError: *rename* fails or returns something other than a non-empty string.
    """
    keys = (*catalog.tensors, *catalog.blobs)
    if isinstance(rename, Mapping):
        names = {name: rename.get(name, name) for name in keys}
        unknown_key = next((name for name in rename if name not in names), None)
        if unknown_key is not None:
            close = find_nearest(unknown_key, list(keys))
            raise MappingError(
                f"`rename` contains `{unknown_key}`, which is not in the checkpoint",
                where=catalog.path,
                hint=f"did you mean `{close}`?" if close else None,
            )
    else:
        names = {name: _rename_key(rename, name) for name in keys}
    old_names: dict[str, str] = {}
    for name, new in names.items():
        if not isinstance(new, str) or not new:
            raise UsageError(
                f"`rename` maps `{name}` to {new!r}", why="it must be a non-empty string"
            )
        if old_names.setdefault(new, name) != name:
            raise MappingError(
                f"`rename` maps two keys to `{new}`",
                where=catalog.path,
                why=f"both `{old_names[new]}` and `{name}`",
            )
    return rename_leaves(catalog, names)


def _rename_key(rename: Callable[[str], str], name: str) -> str:
    try:
        return rename(name)
    except Exception as error:
        raise UsageError(
            f"`rename` failed for `{name}`",
            where=f"`{name}`",
            why=f"{type(error).__name__}: {error}",
        ) from error
