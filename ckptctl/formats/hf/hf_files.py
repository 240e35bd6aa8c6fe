"""Find the files of a Hugging Face model in a directory, and check that no shard is missing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from ckptctl.errors import CkptError, FormatError, quote_names
from ckptctl.formats.base import Listing
from ckptctl.formats.hf.shards import ShardContent, read_shard
from ckptctl.formats.shared.findings import missing_files_error
from ckptctl.storage.crc import is_digest_of
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.read_ahead import prefetch_heads
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

TEXT_ENDINGS = ("\n", "")
IndexContent = dict[str, dict[str, object]]
INDEX_SUFFIX = ".safetensors.index.json"
BIN_FILES = ("pytorch_model.bin.index.json", "pytorch_model.bin")
_EXPECTED = f"expected *.safetensors, *{INDEX_SUFFIX} or {' or '.join(BIN_FILES)}"
_NUMBERED_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.(safetensors|bin)")
DEEPSEEK_SHARD = re.compile(r"model(\d+)-mp(\d+)\.safetensors")
RANK_SHARD = re.compile(r"shard-(\d{5,})-model-(\d{5,})-of-(\d{5,})\.safetensors")
RANK_FILE = re.compile(f"{DEEPSEEK_SHARD.pattern}|{RANK_SHARD.pattern}")
"""Pattern for names of files that contain the shards of a single rank."""
_OTHER_PREFIXES = ("adapter_model", "consolidated", "optimizer", "model.sharded")


def find_main_files(listing: Listing) -> list[str]:
    """Return the name of the index, or the names of the weight files if no index exists.

    Several names are returned for shards without an index, or if the model is ambiguous.
    """
    path, names = listing.path, listing.files
    indices = [n for n in names if n.endswith(INDEX_SUFFIX) and not n.startswith(_OTHER_PREFIXES)]
    singles = [n for n in names if n.endswith(".safetensors") and not n.startswith(_OTHER_PREFIXES)]
    singles = [n for n in singles if not RANK_FILE.fullmatch(n)]
    if indices:
        return indices + [
            n for n in singles if n == "model.safetensors" and _is_in_no_index(path, n)
        ]
    if singles:
        return singles
    return [n for n in BIN_FILES if n in names][:1]


def _is_in_no_index(path: TreePath, name: str) -> bool:
    return not any(
        f'"{name}"' in (path / index.name).read_text(errors="replace")
        for index in path.glob(f"*{INDEX_SUFFIX}")
        if index.stat().st_size < 100_000_000
    )


def find_files_to_read(path: TreePath) -> list[str]:
    """Return the name of the index or weight file to read, or the names of unindexed shards.

    Raises FormatError if *path* contains no weight file, or several that may each be the model.
    """
    if path.is_file():
        if path.suffix == ".json" and not path.name.endswith("index.json"):
            raise FormatError("this is not a weight file", where=str(path), why=_EXPECTED)
        if RANK_SHARD.fullmatch(path.name):
            raise FormatError(
                "this is the shard of a single rank",
                where=str(path),
                hint=f"pass the directory `{path.parent}`",
            )
        require_complete_set(path, [path.name], f"pass the directory `{path.parent}`, or its index")
        return [path.name]
    main = find_main_files(Listing(path))
    if not main:
        raise FormatError("no weight files were found", where=str(path), why=_EXPECTED)
    is_index = len(main) == 1 and main[0].endswith(INDEX_SUFFIX)
    if is_index or _is_complete_set(main):
        return main
    require_complete_set(path, main, "download the missing shards, and the index")
    if len(main) == 1:
        return main
    raise FormatError(
        "several files may contain the model",
        where=str(path),
        why=quote_names(main),
        hint=f"pass one of them, such as `{path / main[0]}`",
    )


def require_complete_set(path: TreePath, names: Sequence[str], hint: str) -> None:
    """Raise if *names* are shards such as ``model-00001-of-00002`` and some are missing."""
    matches = [match for name in names if (match := _NUMBERED_SHARD.fullmatch(name))]
    kinds = {(match[1], match[3], match[4]) for match in matches}
    if len(matches) < len(names) or len(kinds) != 1:
        return
    stem, total, suffix = next(iter(kinds))
    numbers = {int(match[2]) for match in matches}
    first, last, width = min(1, *numbers), int(total), len(total)
    if first == 0 and last not in numbers:  # as in weight updates of slime and SGLang
        last -= 1
    required = range(first, last + 1)

    def format_name(number: int) -> str:
        return f"{stem}-{number:0{width}d}-of-{total}.{suffix}"

    error = missing_files_error(path, numbers, required, format_name, "shards", hint)
    if error and max(numbers) in required:
        count = pluralize(required.stop - required.start, "shard")
        error.what = f"found only {len(names)} of {count}: {quote_names(names)}"
        error.why = f"missing: {error.why}"
        raise error


def find_index_of_shard(path: TreePath) -> str | None:
    """Return the name of the index next to the numbered shard *path*, or None."""
    match = _NUMBERED_SHARD.fullmatch(path.name)
    name = f"{match[1]}{INDEX_SUFFIX}" if match else ""
    return name if name and (path.parent / name).is_file() else None


def _is_complete_set(names: Sequence[str]) -> bool:
    """Return whether *names* are all N shards ``stem-00001-of-0000N.safetensors`` of a model."""
    stems = {name.rsplit("-", 3)[0] for name in names}
    expected = {
        f"{stem}-{i + 1:05d}-of-{len(names):05d}.safetensors"
        for stem in stems
        for i in range(len(names))
    }
    return len(stems) == 1 and set(names) == expected


def list_torch_consolidation_notes(root: TreePath) -> tuple[str, ...]:
    """Return a note if torch consolidated the model in *root* from shards in ``sharded/``.

    Torch 2.13's ``consolidate_safetensors_files`` wrongly writes zeros for 0-d tensors.
    """
    folder = root / "sharded"
    if not any(RANK_SHARD.fullmatch(item.name) for item in folder.glob("shard-*.safetensors")):
        return ()
    return (
        "torch consolidated this model from `sharded`, and torch 2.13 writes every 0-d tensor as "
        "0; "
        "pass `sharded` for exact values",
    )


def read_indexed_shards(files: SourceFiles, index_name: str) -> dict[str, ShardContent]:
    """Map the file names of the shards next to an index to the content of the shards.

    The result is empty if a shard is missing or cannot be read.
    """
    stem = index_name.removesuffix(INDEX_SUFFIX)
    matches = (_NUMBERED_SHARD.fullmatch(item.name) for item in files.root.iterdir())
    names = sorted(m[0] for m in matches if m and (m[1], m[4]) == (stem, "safetensors"))
    if not _is_complete_set(names):
        return {}
    try:
        return {name: read_shard(files, name) for name in prefetch_heads(files, names)}
    except CkptError:
        return {}  # the error is raised again when the shards in the index are read


def derive_index(
    files: SourceFiles, index_name: str, shards: Mapping[str, ShardContent]
) -> IndexContent | None:
    """Reconstruct the index *index_name* from the shards instead of reading it.

    Returns None if the digest of the index is not known, or matches no reconstruction.
    """
    digest, size = files.find_digest(index_name), files.size(index_name)
    if digest is None or not shards:
        return None
    for index, text in _iterate_candidate_indexes(shards):
        if len(text) == size and is_digest_of(digest, text):
            return index
    return None


def _iterate_candidate_indexes(
    shards: Mapping[str, ShardContent],
) -> Iterator[tuple[IndexContent, bytes]]:
    """Yield the index that each common writer creates for *shards*, parsed and as JSON text."""
    weight_map: dict[str, object] = {
        key: name for name, shard in shards.items() for key in shard[0]
    }
    tensors = [entry for shard in shards.values() for entry in shard[0].values()]
    size: dict[str, object] = {"total_size": sum(entry.nbytes for entry in tensors)}
    sizes_and_counts = {"total_parameters": sum(entry.numel for entry in tensors), **size}
    for order in (dict(sorted(weight_map.items())), weight_map):
        rest = json.dumps({"weight_map": order}, indent=2)[1:]
        for metadata, end in product((size, sizes_and_counts, {}), TEXT_ENDINGS):
            first = json.dumps({"metadata": metadata}, indent=2)[: -len("\n}")]
            text = f"{first},{rest}{end}"
            yield {"metadata": metadata, "weight_map": order}, text.encode()
