"""Join shards of formats with one file per model-parallel rank.

The files do not record the division of tensors; the family defines it
(:mod:`ckptctl.planner.model_parallel`). Replicated tensors are compared between all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from ckptctl import families
from ckptctl.catalog import Catalog, Extent, TensorEntry
from ckptctl.errors import MappingError, UnsupportedError, quote_names, spell_option
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.shared.joined_tensors import JoinedTensor, part_extent, separate_entry
from ckptctl.formats.sidecar_files import amended, beside
from ckptctl.planner.axes import AxisSizes, solve_axis_sizes
from ckptctl.planner.config_facts import read_sizes
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.detect import detect_layouts
from ckptctl.planner.model_parallel import (
    RankShard,
    ShardPiece,
    compute_full_shape,
    find_owner_axis,
    iterate_observations,
    list_part_splits,
    list_possible_repeats,
    solve_stored_sizes,
    split_tensor,
    without_repeats,
)
from ckptctl.storage.compare import have_same_elements
from ckptctl.storage.files import SourceFiles
from ckptctl.units import pluralize

RankTensors = Mapping[str, TensorEntry]
Documents = Mapping[str, Mapping[str, object]]


def joined_catalog(
    files: SourceFiles,
    format: str,
    layout: str,
    shards: Mapping[str, RankTensors],
    asked: ReadOptions,
) -> Catalog:
    """Return the catalog of the tensors joined from *shards*, which are by file in rank order."""
    names = list(shards)
    around = beside(files.root, names)
    described = asked.documents or around.documents
    joined = JoinedShards(list(shards.values()), names, layout, described, asked.model_type)
    tensors = joined.tensors(files)
    return replace(
        around.catalog(files.root, format),
        files={name: files.size(name) for name in names},
        tensors=tensors,
        documents=around.documents if asked.documents else joined.documents,
        notes=joined.notes,
    )


class JoinedShards:
    """Shards of all ranks, joined according to the model family.

    Attributes:
        documents: The *described* ones, with params.json adjusted to the joined tensors.
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
        self.first = {key: entry for shard in reversed(shards) for key, entry in shard.items()}
        self.order = list(dict.fromkeys(key for shard in shards for key in shard))
        self._require_alike()
        self.known = self._known(model_type)
        self._require_same_keys()

    def tensors(self, files: SourceFiles) -> dict[str, TensorEntry]:
        """Return the global tensors."""
        self.notes += tuple(self._copies_of_files())
        if self.ranks == 1:
            joined = dict(self.shards[0])
        else:
            repeats = self._repeats(files)
            sizes = without_repeats(self.family, self.stored, repeats)
            joined = {key: self._join(files, key, sizes, repeats) for key in self.order}
        if self.known:
            self._check(joined)
        return joined

    def _copies_of_files(self) -> Iterator[str]:
        """Yield a note for each file whose recorded checksums equal those of another."""
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
        """Family that defines how to join the shards."""
        known = self.known[0] if self.known else None
        if known and any(self._has(known, key) for key in self.order):
            return known
        what, hint = "no known model type matches", f"set {spell_option('--model-type')}"
        if known:
            what = f"model type `{known.name}` does not match"
            hint = f"set another {spell_option('--model-type')}"
        head = f"{self.order[0].partition('.')[0]}."
        bare = self.order[0].removeprefix(head)
        if any(self._has(family, bare) for family in families.load_families().values()):
            hint = f"save the shards without the prefix `{head}`"
        raise MappingError(
            f"{what} these {pluralize(self.ranks, 'shard')}",
            where=self.names[0],
            why=f"their keys are {quote_names(self.order)}",
            hint=f"{hint}, or copy a missing shard",
        )

    def _has(self, family: Family, key: str) -> bool:
        held = self.layout in family.layouts
        return held and family.get_layout(self.layout).table.find_meaning(key) is not None

    @cached_property
    def stored(self) -> AxisSizes:
        """Axis sizes, with heads counted as often as they are stored."""
        shapes = {key: self.first[key].shape for key in self.order}
        try:
            return solve_stored_sizes(
                self.family, self.layout, shapes, self.ranks, self._configured
            )
        except MappingError as error:
            raise self._other_model(error) from error

    @property
    def _configured(self) -> dict[str, int]:
        """Axis sizes of the stored tensors according to the configuration."""
        params, config = self.documents.get("params.json"), self.documents.get("config.json")
        if params is not None or config is None:
            return read_sizes(self.family, params=params)
        repeated = self.family.repeated if self.ranks > 1 else ()
        sizes = read_sizes(self.family, config)
        return {axis: size for axis, size in sizes.items() if axis not in repeated}

    def _known(self, model_type: str | None) -> tuple[Family, ...]:
        """Return the families that match the shards and divide tensors alike."""
        if model_type:
            return (families.family(model_type),)
        shapes = {key: self.first[key].shape for key in self.order}
        found = detect_layouts(
            shapes,
            families.load_families(),
            self.documents.get("config.json"),
            self.documents.get("params.json"),
            ranks=self.ranks,
            prefer=self.layout,
        )
        fitting = [c for c in found if self.layout in (c.layout, *c.alike)]
        known = {c.family: families.family(c.family) for c in fitting}
        splits = {tuple(self._division(f, key) for key in shapes) for f in known.values()}
        if len(splits) > 1 and self.ranks > 1:
            raise MappingError(
                f"the model type is ambiguous: {' and '.join(known)} divide tensors differently",
                where=self.names[0],
                hint="set the model type, for example "
                f"{spell_option(f'--model-type {next(iter(known))}')}",
            )
        return tuple(known.values())

    def _division(self, family: Family, key: str) -> str:
        if family.get_layout(self.layout).table.find_meaning(key) is None:
            return ""
        return str(
            [(cut.dim, len(cut.outer_axes)) for cut in list_part_splits(family, self.layout, key)]
        )

    def _require_alike(self) -> None:
        """Require that all ranks with a tensor have it in one dtype and shape."""
        for shard, name in zip(self.shards, self.names, strict=True):
            for key, entry in shard.items():
                first = self.first[key]
                if (entry.dtype, entry.shape) != (first.dtype, first.shape):
                    kinds = f"{first.dtype} {list(first.shape)}, {entry.dtype} {list(entry.shape)}"
                    raise UnsupportedError(
                        f"the ranks disagree on `{key}`",
                        where=f"{self.names[0]} and {name}",
                        why=kinds,
                    )

    def _require_same_keys(self) -> None:
        """Raise if a rank is missing a tensor that is not distributed among ranks."""
        if all(len(shard) == len(self.order) for shard in self.shards):
            return
        copied = [key for key in self.order if not self._shared_out(key)]
        for shard, name in zip(self.shards, self.names, strict=True):
            lacking = [key for key in copied if key not in shard]
            if lacking:
                raise UnsupportedError(
                    f"`{name}` is missing tensors that other ranks have",
                    where=name,
                    why=quote_names(lacking),
                )

    def _shared_out(self, key: str) -> bool:
        if not self.known or self.known[0].get_layout(self.layout).table.find_meaning(key) is None:
            return False
        return find_owner_axis(self.known[0], self.layout, key) is not None

    def _repeats(self, files: SourceFiles) -> int:
        """Return the number of neighboring ranks with the same key/value head.

        It is taken from config.json, or else found by comparing the bytes. If all heads are equal,
        for example zeros, the bytes do not determine it.
        """
        params, config = self.documents.get("params.json"), self.documents.get("config.json")
        heads = read_sizes(self.family, params=params) if params else self.stored.axes
        possible = list_possible_repeats(heads, self.ranks)
        family, layout = self.family, self.layout
        repeated = [
            key
            for key in self.order
            if any(cut.axis in family.repeated for cut in list_part_splits(family, layout, key))
        ]
        if not repeated or not possible:
            return 1
        stated = read_sizes(self.family, config).get("k") if config else None
        if stated is not None:
            repeats = self.ranks // stated if self.ranks % stated == 0 else 1
            differ = [key for key in repeated if not self._copies(files, key, repeats)]
            if differ:
                raise UnsupportedError(
                    f"the ranks disagree on `{differ[0]}`",
                    where=quote_names(self.names),
                    why=f"according to config.json, {repeats} neighboring ranks have copies of one "
                    "head",
                    hint="check that config.json belongs to this model",
                )
        else:
            shown = (n for n in possible if all(self._copies(files, k, n) for k in repeated))
            repeats = next(shown, 1)
            if repeats == self.ranks:
                self.notes += ("all key/value heads are equal; they are kept as stored",)
                return 1
        if repeats > 1:
            self.notes += (
                f"each key/value head is stored {pluralize(repeats, 'time')}; one copy is used",
            )
            if params is not None:
                kept = self.ranks // repeats
                self.documents["params.json"] = amended(params, "n_kv_heads", kept)
        return repeats

    def _copies(self, files: SourceFiles, key: str, repeats: int) -> bool:
        """Return whether neighboring ranks have equal data in the repeated parts."""
        shares = self._shares(key, self.stored, 1)
        for rank, share in enumerate(shares):
            kept = rank - rank % repeats
            for n, piece in enumerate(share.pieces if share and rank != kept else ()):
                first = shares[kept]
                if piece.axis in self.family.repeated and first:
                    one = _piece_extent(self.shards[kept][key], first.pieces[n])
                    other = _piece_extent(self.shards[rank][key], piece)
                    if not self._is_same(files, key, one, other):
                        return False
        return True

    def _shares(self, key: str, sizes: AxisSizes, repeats: int) -> tuple[RankShard | None, ...]:
        held, shape = self.first[key].shape, self._whole(key, sizes, repeats)
        shares = split_tensor(self.family, self.layout, key, shape, sizes, self.ranks, repeats)
        for share, name, shard in zip(shares, self.names, self.shards, strict=True):
            if (share is None) != (key not in shard):
                raise UnsupportedError(f"`{key}` is on the wrong rank", where=name)
            if share and share.shape != held:
                raise UnsupportedError(
                    f"`{key}` has the shape {list(held)}, expected {list(share.shape)}",
                    where=name,
                    hint="check that the configuration belongs to this model",
                )
        return shares

    def _whole(self, key: str, sizes: AxisSizes, repeats: int) -> tuple[int, ...]:
        held = self.first[key].shape
        return compute_full_shape(self.family, self.layout, key, held, sizes, self.ranks, repeats)

    def _join(self, files: SourceFiles, key: str, sizes: AxisSizes, repeats: int) -> TensorEntry:
        first, shape = self.first[key], self._whole(key, sizes, repeats)
        joined = JoinedTensor(first.dtype, shape, first.path, self.names[0])
        for rank, share in enumerate(self._shares(key, sizes, repeats)):
            for piece in share.pieces if share else ():
                extent = _piece_extent(self.shards[rank][key], piece)
                before = joined.add(extent)
                # Pieces of a divided axis are compared in `_repeats`.
                if before and piece.axis is None and not self._is_same(files, key, before, extent):
                    self._disagree(key, rank)
        extents = tuple(joined.extents.values())
        alias = first.alias_of if extents == first.extents else None
        return replace(first, shape=shape, extents=extents, alias_of=alias)

    def _is_same(self, files: SourceFiles, key: str, one: Extent, other: Extent) -> bool:
        dtype = self.first[key].dtype
        entries = (separate_entry(key, dtype, extent) for extent in (one, other))
        return have_same_elements(files, *entries, of_any_size=True) is True

    def _disagree(self, key: str, rank: int) -> None:
        """Raise if copies differ, or add a note for tensors without any divided axis."""
        if list_part_splits(self.family, self.layout, key):
            raise UnsupportedError(
                f"the ranks disagree on `{key}`",
                where=f"{self.names[0]} and {self.names[rank]}",
                why="every rank has a copy, but these two differ",
            )
        self.notes += (f"`{key}` differs between ranks; the value of the first rank is used",)

    def _check(self, joined: RankTensors) -> None:
        """Compare the joined shapes with the configuration, which reveals missing shards."""
        params = self.documents.get("params.json")
        shapes = {key: entry.shape for key, entry in joined.items()}
        known = self._configured if params is None else read_sizes(self.family, params=params)
        try:
            solve_axis_sizes(
                self.family, iterate_observations(self.family, self.layout, shapes, 1), known
            )
        except MappingError as error:
            raise self._other_model(error) from error

    def _other_model(self, error: MappingError) -> UnsupportedError:
        file = "params.json" if "params.json" in self.documents else "config.json"
        return UnsupportedError(
            f"the tensors do not match the model described in {file}",
            where=", ".join(filter(None, (quote_names(self.names), error.where))),
            why=error.why if error.where else error.summary,
            hint="check for missing shards, or pass "
            f"{spell_option('--assets DIR', '--trust-assets')} with the right {file}",
        )


def _piece_extent(entry: TensorEntry, piece: ShardPiece) -> Extent:
    """Return the extent of a piece of a rank's tensor."""
    return part_extent(entry.extents[0], entry.dtype, entry.shape, piece.offsets, piece.box)
