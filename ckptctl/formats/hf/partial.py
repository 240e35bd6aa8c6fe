"""What is left of a Hugging Face model some of whose shards are missing or damaged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ckptctl.catalog import Box, Finding, TensorEntry
from ckptctl.errors import CkptError, UnsafePickleError
from ckptctl.formats.hf.shards import (
    Strings,
    keys_by_file,
    read_bin,
    read_shard,
    unnamed,
)
from ckptctl.formats.shared.findings import of_error
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.read_ahead import heads_ahead


@dataclass(slots=True)
class Usable:
    """What can be read, and what is wrong with the rest.

    Attributes:
        tensors: The tensors of readable shards, as far as the index places them there.
        metadata: The strings of the index and of the shards' headers.
        sizes: The shards that are there, with their sizes in bytes.
        notes: What a reader should know.
        findings: What is wrong with the other shards, and the tensors that are lost with them.
        lost: Tensors of shards that are not those of the index, and these.
    """

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    metadata: Strings = field(default_factory=Strings)
    sizes: dict[str, int] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    lost: dict[str, tuple[tuple[Box, str], ...]] = field(default_factory=dict)


def usable(
    files: SourceFiles, weight_map: Mapping[str, str], strings: Mapping[str, str], where: str
) -> Usable:
    """Read one shard after the other, and name all that is missing.

    Args:
        files: The model's files.
        weight_map: The file of each tensor, by the index.
        strings: Those of the index's metadata.
        where: Path of the index, for errors.
    """
    found = Usable(metadata=Strings(strings))
    shards = keys_by_file(weight_map)
    for name in heads_ahead(files, shards):
        expected = shards[name]
        kept: dict[str, TensorEntry] = {}
        try:
            found.sizes[name] = files.size(name)
            shard = _read(found, files, name)
            kept = {key: entry for key, entry in shard.items() if key in expected}
            kept |= unnamed(weight_map, shard, name, where)
        except UnsafePickleError:
            raise
        except CkptError as error:
            found.findings.append(of_error(error, files.root, file=name))
            found.findings += _missing(expected - kept.keys(), name)
            found.lost |= {key: ((Box.whole(t.shape), name),) for key, t in kept.items()}
        found.tensors |= kept
    ties = {key: kept for key, kept in found.metadata.agreed.items() if kept in weight_map}
    for dropped, original in ties.items():
        if dropped not in weight_map and original not in found.tensors:
            why = f"it is recorded as the same as `{original}`"
            found.findings.append(
                Finding("a tensor is missing", why, "error", weight_map[original], dropped)
            )
    return found


def _read(found: Usable, files: SourceFiles, name: str) -> Mapping[str, TensorEntry]:
    if name.endswith(".safetensors"):
        tensors, strings = read_shard(files, name)
        found.metadata.add({key: text for key, text in strings.items() if key != "format"})
        return tensors
    contents = read_bin(files, name)
    found.notes |= dict.fromkeys(contents.notes)
    return contents.tensors


def _missing(keys: set[str], file: str) -> Iterator[Finding]:
    for key in sorted(keys):
        yield Finding("a tensor is missing", "the index places it there", "error", file, key)
