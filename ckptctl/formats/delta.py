"""Recognize deltas, which store the difference between two checkpoints, and read their manifests.

A delta is a folder, which ``ckptctl delta make`` writes::

    ckptctl.delta.json         the manifest: names, dtypes, shapes and digests of all tensors
    delta-00001.safetensors    for each changed tensor, a payload of the same name with dtype U8
    assets/                    configuration and tokenizer files that differ

A delta is not a checkpoint, so nothing converts it or counts it as a checkpoint of a run. The page
``docs/reference/delta.md`` describes the payloads and the digests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal

from ckptctl import dtypes
from ckptctl.errors import CkptError, DamagedError, UnsupportedError, format_command
from ckptctl.formats.base import OtherFolder
from ckptctl.formats.sidecar_files import MAX_SIDECAR_BYTES, may_be_sidecar_file
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.json_reader import MAX_BYTES, read_json
from ckptctl.storage.schema import (
    Constraint,
    Natural,
    Schema,
    read_as,
    wrap_malformed_errors,
)
from ckptctl.tree import TreePath
from ckptctl.units import format_bytes, pluralize

MANIFEST = "ckptctl.delta.json"
SCHEMA = "ckptctl.delta/1"
ASSETS_FOLDER = "assets"
PAYLOAD_FILE = "delta-{:05d}.safetensors"
PAYLOAD_NAMES = re.compile(r"delta-\d{5}\.safetensors")
MAX_MANIFEST_BYTES = MAX_BYTES
"""Maximum size of a manifest, which has about 400 bytes per tensor."""
MIN_BLOCK_BYTES, MAX_BLOCK_BYTES = 1 << 10, 1 << 24
Codec = Literal["zstd", "deflate"]
Sha256 = Annotated[
    str, Constraint("a SHA-256 digest", lambda text: bool(re.fullmatch("[0-9a-f]{64}", text)))
]
_DType = Annotated[str, Constraint("a dtype of torch", lambda text: text in dtypes.BY_NAME)]
_BlockBytes = Annotated[
    int,
    Constraint(
        f"a multiple of 16 from {MIN_BLOCK_BYTES} to {MAX_BLOCK_BYTES}",
        lambda value: MIN_BLOCK_BYTES <= value <= MAX_BLOCK_BYTES and value % 16 == 0,
    ),
]
_PayloadName = Annotated[
    str, Constraint("the name of a payload file", lambda text: bool(PAYLOAD_NAMES.fullmatch(text)))
]


@dataclass(frozen=True, slots=True)
class TensorRecord(Schema):
    """Dtype, shape and digest of one tensor.

    Attributes:
        sha256: SHA-256 of the elements in row-major order, little-endian.
        alias_of: Name of the tensor that shares its memory, or None.
    """

    dtype: _DType
    shape: tuple[Natural, ...]
    sha256: Sha256
    alias_of: str | None = None

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        size = dtypes.get_itemsize(self.dtype)
        for dim in self.shape:
            size *= dim
        return size

    def has_elements_of(self, other: TensorRecord | None) -> bool:
        """Return whether *other* has the same dtype, shape and elements."""
        return other is not None and (self.dtype, self.shape, self.sha256) == (
            other.dtype,
            other.shape,
            other.sha256,
        )


@dataclass(frozen=True, slots=True)
class TensorChange(Schema):
    """State of one tensor before and after a delta.

    Attributes:
        base: The tensor in the base, or None if the delta adds it.
        result: The tensor in the result, or None if the delta removes it.
        file: File with the payload, or None if the elements do not change.
    """

    base: TensorRecord | None = None
    result: TensorRecord | None = None
    file: _PayloadName | None = None

    @property
    def is_replaced(self) -> bool:
        """Whether the result does not depend on the elements of the base."""
        base, result = self.base, self.result
        return (
            base is None
            or result is None
            or (base.dtype, base.shape) != (result.dtype, result.shape)
        )


@dataclass(frozen=True, slots=True)
class FileRecord(Schema):
    """Size and digest of one file of a delta, relative to its folder."""

    size: Natural
    sha256: Sha256


@dataclass(frozen=True, slots=True)
class DeltaManifest(Schema):
    """Content of ``ckptctl.delta.json``.

    Attributes:
        schema: Name and version of the layout.
        codec: Compression of the blocks.
        block_bytes: Size of the blocks of a tensor in bytes; the last one may be smaller. Elements
            have at most 16 bytes.
        model_type: Model type, or None if it is unknown.
        layout: Layout of the tensors, or None if it is unknown.
        base_sha256: Digest of all tensors of the base.
        result_sha256: Digest of all tensors of the result.
        tensors: All tensors of base and result, by name.
        files: All other files of the delta, by relative path.
        left_out: Values and files of the new checkpoint that the delta does not include, such as
            optimizer state, by reason.
        sha256: Digest of the manifest without this field.
    """

    schema: str
    codec: Codec
    block_bytes: _BlockBytes
    base_sha256: Sha256
    result_sha256: Sha256
    tensors: dict[str, TensorChange]
    files: dict[str, FileRecord]
    model_type: str | None = None
    layout: str | None = None
    left_out: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sha256: str = field(default="", compare=False)

    @property
    def changed(self) -> list[str]:
        """Names of the tensors that have a payload."""
        return [name for name, change in self.tensors.items() if change.file]

    @property
    def nbytes(self) -> int:
        """Size of all files but the manifest in bytes."""
        return sum(record.size for record in self.files.values())

    @property
    def assets(self) -> list[str]:
        """Names of the configuration and tokenizer files that the delta carries."""
        prefix = f"{ASSETS_FOLDER}/"
        return [name.removeprefix(prefix) for name in self.files if name.startswith(prefix)]

    @property
    def left_out_reasons(self) -> dict[str, str]:
        """Reason for each value or file that the delta does not include, by name."""
        return {name: why for why, names in self.left_out.items() for name in names}

    def encode(self) -> bytes:
        """Encode the manifest as JSON, with its own digest."""
        content = asdict(self)
        del content["sha256"]
        return _encode_json({**content, "sha256": _hash_json(content)})


def compute_digest(records: Iterable[tuple[str, TensorRecord]]) -> str:
    """Compute the digest of a checkpoint from names, dtypes, shapes and digests of its tensors."""
    from hashlib import sha256

    lines = sorted(
        [name, record.dtype, list(record.shape), record.sha256] for name, record in records
    )
    return sha256(json.dumps(lines, separators=(",", ":")).encode()).hexdigest()


def read_manifest(files: SourceFiles) -> DeltaManifest:
    """Read and check the manifest of the delta in the root of *files*.

    Raises:
        DamagedError: The manifest does not match its own digests.
        UnsupportedError: It is malformed, or of a later version.
    """
    where = str(files.root / MANIFEST)
    content = read_json(files, MANIFEST, max_bytes=MAX_MANIFEST_BYTES)
    with wrap_malformed_errors("malformed delta", where, "copy the delta again from its source"):
        version = read_as(_Version, content)
        if version.schema != SCHEMA:
            raise UnsupportedError(
                f"the delta has the layout `{version.schema[:40]}`",
                where=where,
                why=f"this version reads `{SCHEMA}`",
                hint="update ckptctl",
            )
        manifest = read_as(DeltaManifest, content)
    assert isinstance(content, dict)
    stated = {key: value for key, value in content.items() if key != "sha256"}
    if _hash_json(stated) != manifest.sha256:
        raise _damaged_error("the manifest does not match its digest", where)
    for side, digest in (("base", manifest.base_sha256), ("result", manifest.result_sha256)):
        records = (
            (name, record)
            for name, change in manifest.tensors.items()
            if (record := getattr(change, side))
        )
        if compute_digest(records) != digest:
            raise _damaged_error(f"the digest of the {side} does not match its tensors", where)
    _require_consistent(manifest, where)
    return manifest


def _require_consistent(manifest: DeltaManifest, where: str) -> None:
    """Raise if records of the manifest contradict each other."""
    for name, change in manifest.tensors.items():
        if change.base is None and change.result is None:
            raise _damaged_error(f"`{name}` is neither in the base nor in the result", where)
        if change.result is None:
            expects_payload = False
        else:
            expects_payload = change.result.alias_of is None and not change.result.has_elements_of(
                change.base
            )
            if change.result.alias_of is not None:
                original = manifest.tensors.get(change.result.alias_of, TensorChange()).result
                if original is None or original.alias_of is not None:
                    raise _damaged_error(
                        f"`{name}` is tied to a tensor that is missing or tied itself", where
                    )
                if not original.has_elements_of(change.result):
                    raise _damaged_error(f"`{name}` differs from the tensor it is tied to", where)
        if expects_payload != (change.file is not None):
            raise _damaged_error(f"the records of `{name}` contradict each other", where)
        if change.file is not None and change.file not in manifest.files:
            raise _damaged_error(f"the payload file of `{name}` has no record", where)
    for path, record in manifest.files.items():
        folder, _, name = path.partition("/")
        is_asset = (
            folder == ASSETS_FOLDER
            and all(name.split("/"))
            and name.isprintable()
            and not name.startswith("ckptctl.")
            and may_be_sidecar_file(name)
        )
        if not (is_asset or PAYLOAD_NAMES.fullmatch(path)):
            raise _damaged_error(f"`{path[:80]}` is not the path of a file of a delta", where)
        if is_asset and record.size > MAX_SIDECAR_BYTES:
            raise _damaged_error(
                f"`{path[:80]}` is larger than a configuration or tokenizer file", where
            )


@dataclass(frozen=True, slots=True)
class _Version(Schema):
    schema: str


def _damaged_error(what: str, where: str) -> DamagedError:
    return DamagedError(what, where=where, hint="copy the delta again from its source")


def _encode_json(content: Mapping[str, object]) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=True) + "\n").encode()


def _hash_json(content: Mapping[str, object]) -> str:
    from hashlib import sha256

    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return sha256(text.encode()).hexdigest()


def describe_manifest(manifest: DeltaManifest) -> str:
    """Describe a delta in one line."""
    total = sum(1 for change in manifest.tensors.values() if change.result)
    return (
        f"{len(manifest.changed):,} of {pluralize(total, 'tensor')} change, "
        f"{format_bytes(manifest.nbytes)}, base {manifest.base_sha256[:12]}, "
        f"result {manifest.result_sha256[:12]}"
    )


def _build_error(path: TreePath) -> CkptError:
    if not path.is_dir():
        command = format_command("delta", "apply", "BASE", path.parent, "DST")
        return UnsupportedError(
            f"`{path.name}` is one file of a delta",
            where=str(path),
            hint=f"pass its folder to {command}",
        )
    try:
        with source_files(path) as files:
            why = describe_manifest(read_manifest(files))
    except CkptError as error:
        why = f"its manifest cannot be read: {error.what}"
    return UnsupportedError(
        "this is a delta, not a checkpoint",
        where=str(path),
        why=why,
        hint=f"apply it with {format_command('delta', 'apply', 'BASE', path, 'DST')}",
    )


OTHER_FOLDER = OtherFolder(MANIFEST, PAYLOAD_NAMES, _build_error)
