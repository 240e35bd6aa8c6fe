"""Join the shards of formats that have one file per model-parallel rank.

The files do not record how tensors are sharded, so the model family declares it, as described in
:mod:`ckptctl.planner.model_parallel`. The copies of replicated tensors are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from ckptctl import families
from ckptctl.catalog import Catalog, Extent, TensorEntry
from ckptctl.errors import MappingError, UnsupportedError, format_option, quote_names
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.shared.joined_tensors import JoinedTensor, make_standalone_entry, slice_extent
from ckptctl.formats.sidecar_files import replace_model_param, scan_sidecar_files
from ckptctl.planner.axes import AxisSizes, solve_axis_sizes
from ckptctl.planner.config_facts import read_sizes
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.detect import detect_layouts
from ckptctl.planner.model_parallel import (
    RankShard,
    ShardPiece,
    compute_full_shape,
    compute_unrepeated_sizes,
    find_owner_axis,
    iterate_observed_shapes,
    list_part_splits,
    list_possible_repeats,
    solve_stored_sizes,
    split_tensor,
)
from ckptctl.storage.compare import have_same_elements
from ckptctl.storage.files import SourceFiles
from ckptctl.units import pluralize

RankTensors = Mapping[str, TensorEntry]
Documents = Mapping[str, Mapping[str, object]]


def join_shards(
    files: SourceFiles,
    format: str,
    layout: str,
    shards: Mapping[str, RankTensors],
    options: ReadOptions,
) -> Catalog:
    """Join the shards of all ranks into one catalog.

    Args:
        files: Files of the checkpoint.
        format: Name of the format.
        layout: Name of the layout of the tensors.
        shards: Tensors in each file, by file name, with the files in rank order.
        options: Read options, such as the model family.
    """
    names = list(shards)
    sidecars = scan_sidecar_files(files.root, names)
    documents = options.documents or sidecars.documents
    joiner = ShardJoiner(list(shards.values()), names, layout, documents, options.model_type)
    tensors = joiner.join_tensors(files)
    return replace(
        sidecars.start_catalog(files.root, format),
        files={name: files.size(name) for name in names},
        tensors=tensors,
        documents=sidecars.documents if options.documents else joiner.documents,
        notes=joiner.notes,
    )


class ShardJoiner:
    """Joiner of the shards of all ranks, according to the sharding that the model family declares.

    Attributes:
        documents: Parsed ``config.json`` and ``params.json``, where ``params.json`` is adjusted to
            the joined tensors.
        notes: Messages for the user.
    """

    def __init__(
        self,
        shards: Sequence[RankTensors],
        names: Sequence[str],
        layout: str,
        described: Documents,
        model_type: str | None,
    ) -> None:
        self.shards, self.names, self.layout = shards, names, layout
        self.documents = dict(described)
        self.notes: tuple[str, ...] = ()
        self.ranks = len(shards)
        self.first_entries = {
            key: entry for shard in reversed(shards) for key, entry in shard.items()
        }
        self.key_order = list(dict.fromkeys(key for shard in shards for key in shard))
        self._require_equal_shapes()
        self.candidate_families = self._detect_families(model_type)
        self._require_same_keys()

    def join_tensors(self, files: SourceFiles) -> dict[str, TensorEntry]:
        """Join the shards, and return the catalog entries of the global tensors by key."""
        self.notes += tuple(self._find_copied_files())
        if self.ranks == 1:
            joined_tensors = dict(self.shards[0])
        else:
            repeats = self._count_repeats(files)
            sizes = compute_unrepeated_sizes(self.family, self.axis_sizes, repeats)
            joined_tensors = {
                key: self._join_tensor(files, key, sizes, repeats) for key in self.key_order
            }
        if self.candidate_families:
            self._check_shapes(joined_tensors)
        return joined_tensors

    def _find_copied_files(self) -> Iterator[str]:
        """Yield a note for each file whose recorded checksums equal those of an earlier file."""
        seen: dict[tuple[int | None, ...], str] = {}
        for shard, name in zip(self.shards, self.names, strict=True):
            crcs = tuple(entry.extents[0].crc32 for entry in shard.values())
            first = seen.setdefault(crcs, name)
            if first != name and crcs and None not in crcs:
                yield (
                    f"`{name}` records the same checksums as `{first}`; one may be a copy of the "
                    "other"
                )

    @property
    def family(self) -> Family:
        """Model family that declares how the tensors are sharded.

        Raises MappingError if no known family matches.
        """
        candidate = self.candidate_families[0] if self.candidate_families else None
        if candidate and any(self._has_key(candidate, key) for key in self.key_order):
            return candidate
        message, hint = "no known model type matches", f"set {format_option('--model-type')}"
        if candidate:
            message = f"model type `{candidate.name}` does not match"
            hint = f"set another {format_option('--model-type')}"
        head = f"{self.key_order[0].partition('.')[0]}."
        stripped_key = self.key_order[0].removeprefix(head)
        if any(self._has_key(family, stripped_key) for family in families.load_families().values()):
            hint = f"save the shards without the prefix `{head}`"
        raise MappingError(
            f"{message} these {pluralize(self.ranks, 'shard')}",
            where=self.names[0],
            why=f"their keys are {quote_names(self.key_order)}",
            hint=f"{hint}, or copy a missing shard",
        )

    def _has_key(self, family: Family, key: str) -> bool:
        has_layout = self.layout in family.layouts
        return has_layout and family.get_layout(self.layout).table.find_match(key) is not None

    @cached_property
    def axis_sizes(self) -> AxisSizes:
        """Sizes of the family's axes, where each copy of a replicated key/value head is counted."""
        shapes = {key: self.first_entries[key].shape for key in self.key_order}
        try:
            return solve_stored_sizes(
                self.family, self.layout, shapes, self.ranks, self._configured_sizes
            )
        except MappingError as error:
            raise self._other_model_error(error) from error

    @property
    def _configured_sizes(self) -> dict[str, int]:
        """Axis sizes of the stored tensors according to ``params.json`` or ``config.json``."""
        params, config = self.documents.get("params.json"), self.documents.get("config.json")
        if params is not None or config is None:
            return read_sizes(self.family, params=params)
        repeated = self.family.repeated if self.ranks > 1 else ()
        sizes = read_sizes(self.family, config)
        return {axis: size for axis, size in sizes.items() if axis not in repeated}

    def _detect_families(self, model_type: str | None) -> tuple[Family, ...]:
        """Return the families that match the shards, or only the family *model_type* if given.

        Raises MappingError if the matching families shard the tensors differently.
        """
        if model_type:
            return (families.family(model_type),)
        shapes = {key: self.first_entries[key].shape for key in self.key_order}
        candidates = detect_layouts(
            shapes,
            families.load_families(),
            self.documents.get("config.json"),
            self.documents.get("params.json"),
            ranks=self.ranks,
            prefer=self.layout,
        )
        matching = [c for c in candidates if self.layout in (c.layout, *c.alike)]
        matches = {c.family: families.family(c.family) for c in matching}
        splits = {
            tuple(self._describe_division(f, key) for key in shapes) for f in matches.values()
        }
        if len(splits) > 1 and self.ranks > 1:
            raise MappingError(
                f"the model type is ambiguous: {' and '.join(matches)} divide tensors differently",
                where=self.names[0],
                hint="set the model type, for example "
                f"{format_option(f'--model-type {next(iter(matches))}')}",
            )
        return tuple(matches.values())

    def _describe_division(self, family: Family, key: str) -> str:
        if family.get_layout(self.layout).table.find_match(key) is None:
            return ""
        return str(
            [(cut.dim, len(cut.outer_axes)) for cut in list_part_splits(family, self.layout, key)]
        )

    def _require_equal_shapes(self) -> None:
        """Raise if two ranks store a tensor with different dtypes or local shapes."""
        for shard, name in zip(self.shards, self.names, strict=True):
            for key, entry in shard.items():
                first = self.first_entries[key]
                if (entry.dtype, entry.shape) != (first.dtype, first.shape):
                    kinds = f"{first.dtype} {list(first.shape)}, {entry.dtype} {list(entry.shape)}"
                    raise UnsupportedError(
                        f"the ranks disagree on `{key}`",
                        where=f"{self.names[0]} and {name}",
                        why=kinds,
                    )

    def _require_same_keys(self) -> None:
        """Raise if a rank does not store a tensor that all ranks should store."""
        if all(len(shard) == len(self.key_order) for shard in self.shards):
            return
        replicated_keys = [key for key in self.key_order if not self._is_distributed(key)]
        for shard, name in zip(self.shards, self.names, strict=True):
            missing_keys = [key for key in replicated_keys if key not in shard]
            if missing_keys:
                raise UnsupportedError(
                    f"`{name}` is missing tensors that other ranks have",
                    where=name,
                    why=quote_names(missing_keys),
                )

    def _is_distributed(self, key: str) -> bool:
        if (
            not self.candidate_families
            or self.candidate_families[0].get_layout(self.layout).table.find_match(key) is None
        ):
            return False
        return find_owner_axis(self.candidate_families[0], self.layout, key) is not None

    def _count_repeats(self, files: SourceFiles) -> int:
        """Return on how many consecutive ranks each key/value head is replicated.

        The number is computed from ``config.json`` if possible, and otherwise found by comparing
        the bytes. If all heads are equal, for example zeros, the bytes do not determine it.
        """
        params, config = self.documents.get("params.json"), self.documents.get("config.json")
        heads = read_sizes(self.family, params=params) if params else self.axis_sizes.axes
        possible = list_possible_repeats(heads, self.ranks)
        family, layout = self.family, self.layout
        keys_with_repeats = [
            key
            for key in self.key_order
            if any(cut.axis in family.repeated for cut in list_part_splits(family, layout, key))
        ]
        if not keys_with_repeats or not possible:
            return 1
        configured_heads = read_sizes(self.family, config).get("k") if config else None
        if configured_heads is not None:
            repeats = self.ranks // configured_heads if self.ranks % configured_heads == 0 else 1
            differ = [
                key for key in keys_with_repeats if not self._has_equal_repeats(files, key, repeats)
            ]
            if differ:
                raise UnsupportedError(
                    f"the ranks disagree on `{differ[0]}`",
                    where=quote_names(self.names),
                    why=f"according to config.json, {repeats} neighboring ranks have copies of one "
                    "head",
                    hint="check that config.json belongs to this model",
                )
        else:
            matching = (
                n
                for n in possible
                if all(self._has_equal_repeats(files, k, n) for k in keys_with_repeats)
            )
            repeats = next(matching, 1)
            if repeats == self.ranks:
                self.notes += ("all key/value heads are equal; they are kept as stored",)
                return 1
        if repeats > 1:
            self.notes += (
                f"each key/value head is stored {pluralize(repeats, 'time')}; one copy is used",
            )
            if params is not None:
                head_count = self.ranks // repeats
                self.documents["params.json"] = replace_model_param(
                    params, "n_kv_heads", head_count
                )
        return repeats

    def _has_equal_repeats(self, files: SourceFiles, key: str, repeats: int) -> bool:
        """Return whether each group of *repeats* consecutive ranks stores equal heads in *key*."""
        shares = self._compute_rank_shards(key, self.axis_sizes, 1)
        for rank, share in enumerate(shares):
            first_rank = rank - rank % repeats
            for n, piece in enumerate(share.pieces if share and rank != first_rank else ()):
                first = shares[first_rank]
                if piece.axis in self.family.repeated and first:
                    kept_extent = _slice_piece(self.shards[first_rank][key], first.pieces[n])
                    extent = _slice_piece(self.shards[rank][key], piece)
                    if not self._has_same_elements(files, key, kept_extent, extent):
                        return False
        return True

    def _compute_rank_shards(
        self, key: str, sizes: AxisSizes, repeats: int
    ) -> tuple[RankShard | None, ...]:
        stored_shape, shape = (
            self.first_entries[key].shape,
            self._compute_global_shape(key, sizes, repeats),
        )
        shares = split_tensor(self.family, self.layout, key, shape, sizes, self.ranks, repeats)
        for share, name, shard in zip(shares, self.names, self.shards, strict=True):
            if (share is None) != (key not in shard):
                raise UnsupportedError(f"`{key}` is on the wrong rank", where=name)
            if share and share.shape != stored_shape:
                raise UnsupportedError(
                    f"`{key}` has the shape {list(stored_shape)}, expected {list(share.shape)}",
                    where=name,
                    hint="check that the configuration belongs to this model",
                )
        return shares

    def _compute_global_shape(self, key: str, sizes: AxisSizes, repeats: int) -> tuple[int, ...]:
        stored_shape = self.first_entries[key].shape
        return compute_full_shape(
            self.family, self.layout, key, stored_shape, sizes, self.ranks, repeats
        )

    def _join_tensor(
        self, files: SourceFiles, key: str, sizes: AxisSizes, repeats: int
    ) -> TensorEntry:
        first, shape = self.first_entries[key], self._compute_global_shape(key, sizes, repeats)
        tensor = JoinedTensor(first.dtype, shape, first.path, self.names[0])
        for rank, share in enumerate(self._compute_rank_shards(key, sizes, repeats)):
            for piece in share.pieces if share else ():
                extent = _slice_piece(self.shards[rank][key], piece)
                earlier = tensor.add_extent(extent)
                # Pieces of a divided axis are compared in `_count_repeats`.
                if (
                    earlier
                    and piece.axis is None
                    and not self._has_same_elements(files, key, earlier, extent)
                ):
                    self._raise_or_note_difference(key, rank)
        extents = tuple(tensor.extents.values())
        alias = first.alias_of if extents == first.extents else None
        return replace(first, shape=shape, extents=extents, alias_of=alias)

    def _has_same_elements(
        self, files: SourceFiles, key: str, first: Extent, second: Extent
    ) -> bool:
        dtype = self.first_entries[key].dtype
        entries = (make_standalone_entry(key, dtype, extent) for extent in (first, second))
        return have_same_elements(files, *entries, of_any_size=True) is True

    def _raise_or_note_difference(self, key: str, rank: int) -> None:
        """Raise an error because copies of the tensor *key* differ between ranks.

        If no axis of the tensor is sharded, only a note is added.
        """
        if list_part_splits(self.family, self.layout, key):
            raise UnsupportedError(
                f"the ranks disagree on `{key}`",
                where=f"{self.names[0]} and {self.names[rank]}",
                why="every rank has a copy, but these two differ",
            )
        self.notes += (f"`{key}` differs between ranks; the value of the first rank is used",)

    def _check_shapes(self, tensors: RankTensors) -> None:
        """Raise if the joined shapes contradict the config, for example if shards are missing."""
        params = self.documents.get("params.json")
        shapes = {key: entry.shape for key, entry in tensors.items()}
        sizes = self._configured_sizes if params is None else read_sizes(self.family, params=params)
        try:
            solve_axis_sizes(
                self.family, iterate_observed_shapes(self.family, self.layout, shapes, 1), sizes
            )
        except MappingError as error:
            raise self._other_model_error(error) from error

    def _other_model_error(self, error: MappingError) -> UnsupportedError:
        file = "params.json" if "params.json" in self.documents else "config.json"
        return UnsupportedError(
            f"the tensors do not match the model described in {file}",
            where=", ".join(filter(None, (quote_names(self.names), error.where))),
            why=error.why if error.where else error.summary,
            hint="check for missing shards, or pass "
            f"{format_option('--assets DIR', '--trust-assets')} with the right {file}",
        )


def _slice_piece(entry: TensorEntry, piece: ShardPiece) -> Extent:
    """Return the extent of *piece*, a box in the local tensor *entry* of one rank."""
    return slice_extent(entry.extents[0], entry.dtype, entry.shape, piece.offsets, piece.box)
