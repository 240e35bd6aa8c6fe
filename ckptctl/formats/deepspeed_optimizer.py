"""What surrounds the model: moments of the optimizer by parameter, settings, the trainer's state.

The names are those of ``torch.distributed.checkpoint.state_dict``: ``optimizer.state.<name>.<key>``
and ``optimizer.param_groups``, whose ``params`` are names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptctl.catalog import Blob, Index, TensorEntry
from ckptctl.catalog import Path as KeyPath
from ckptctl.errors import DamagedError, listed
from ckptctl.formats.deepspeed_partitions import Segment, Strip, extents
from ckptctl.formats.deepspeed_states import INDEX, OptimState
from ckptctl.formats.deepspeed_zero import Save, strips_of
from ckptctl.formats.structure import flatten, join
from ckptctl.formats.torch_file import extent_of, is_stored
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.inert import Global, Inert, walk
from ckptctl.storage.torch_globals import TORCH_TABLE
from ckptctl.storage.torch_zip import StoredTensor

OPTIMIZER = "optimizer"


@dataclass(slots=True)
class Leaves:
    """Tensors and other leaves outside the model.

    Attributes:
        tensors: By name.
        blobs: By name.
        notes: What is not carried along.
    """

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    blobs: dict[str, Blob] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, value: object, path: KeyPath, file: str, where: str) -> None:
        """Add all leaves of *value*; those of classes that only their code knows are left out.

        Args:
            value: Anything in a file of states.
            path: Where it lies in the checkpoint.
            file: That file, relative to the checkpoint's root.
            where: The same, for errors.

        Raises:
            DamagedError: Two leaves have one name.
        """
        for place, leaf in flatten(value, is_stored, path):
            name = join(place)
            if name in self.tensors or name in self.blobs:
                raise DamagedError(f"two leaves are both called `{name}`", where=where)
            if isinstance(leaf, StoredTensor):
                self.tensors[name] = stored_entry(place, leaf, file)
            elif not any(map(is_stored, walk(leaf))):
                self._add_blob(Blob(name, place, value=leaf))
            elif isinstance(leaf, list | tuple):
                for number, item in enumerate(leaf):
                    self.add(item, (*place, Index(number)), file, where)
            else:
                self.notes.append(f"not carried along: `{name}`, tensors inside an object")

    def _add_blob(self, blob: Blob) -> None:
        strange = _strange(blob.value)
        if strange is None:
            self.blobs[blob.name] = blob
        else:
            self.notes.append(f"not carried along: `{blob.name}`, an object of class `{strange}`")


def stored_entry(path: KeyPath, tensor: StoredTensor, file: str) -> TensorEntry:
    """Return the entry of a tensor that lies whole in one file."""
    boxes = (extent_of(tensor, file),)
    return TensorEntry(join(path), tensor.dtype, tensor.shape, boxes, path)


def _strange(value: object) -> str | None:
    """The first class in *value* that plain torch would not read."""
    for node in walk(value):
        if isinstance(node, Inert | Global) and (node.module, node.name) not in TORCH_TABLE:
            return f"{node.module}.{node.name}"
    return None


def surroundings(save: Save, files: SourceFiles) -> Leaves:
    """Return everything outside the model: rank 0's, where every rank has its own copy.

    Raises:
        DamagedError: The ranks' optimizers have done different numbers of steps.
    """
    found = Leaves()
    model, root = save.models[0], files.root
    rest = {key: value for key, value in model.content.items() if key not in INDEX}
    if rest.get(OPTIMIZER, save) is None:
        del rest[OPTIMIZER]
    found.add(rest, (), model.file, str(root / model.file))
    if save.optims:
        _add_states(save, files, found)
        first = save.optims[0]
        owners = ((name, part.owner) for name, part in save.parts.items())
        settings = plain_settings(first.rest, first.settings, owners)
        found.add(settings, (OPTIMIZER,), first.file, str(root / first.file))
    return found


def plain_settings(
    rest: Mapping[str, object], groups: Sequence[object], owners: Iterable[tuple[str, int]]
) -> dict[str, object]:
    """Return the optimizer's settings as plain values.

    Args:
        rest: Loss scaler, gradient clipping, ...
        groups: ``param_groups`` of the inner optimizer, whose ``params`` are numbers of partitions.
        owners: Each parameter with the number of the partition that it lies in.
    """
    members: dict[object, list[str]] = {}
    for name, owner in owners:
        members.setdefault(owner, []).append(name)
    named = [_named(group, members) for group in groups if isinstance(group, dict)]
    plain = {key: _plain(value) for key, value in rest.items()}
    return {**({"param_groups": named} if named else {}), **plain}


def _named(
    group: Mapping[str, object], members: Mapping[object, Sequence[str]]
) -> dict[str, object]:
    numbers = group.get("params")
    own = [number for number in numbers if type(number) is int] if isinstance(numbers, list) else []
    return {**group, "params": [name for number in own for name in members.get(number, ())]}


def _plain(value: object) -> object:
    """A loss scaler as the numbers in it; loading it as an object would need DeepSpeed."""
    if isinstance(value, Inert) and value.module.startswith("deepspeed."):
        return value.state if isinstance(value.state, dict) else value
    return value


def _add_states(save: Save, files: SourceFiles, found: Leaves) -> None:
    """Add moments and counters of every parameter."""
    owners = range(len(save.optims[0].partitions))
    keys = dict.fromkeys(key for owner in owners for key in save.optims[0].states[owner])
    for key in keys:
        having = {owner for owner in owners if key in save.optims[0].states[owner]}
        if all(_is_counter(key, save.optims[0].states[owner][key]) for owner in having):
            for owner in sorted(having):
                _require_same(save, owner, key, files)
            _add_counters(save, key, having, found, files.root)
        else:
            _add_moments(save, key, having, found)


def _is_counter(key: str, value: object) -> bool:
    return not isinstance(value, StoredTensor) or not value.shape or key == "step"


def _require_same(save: Save, owner: int, key: str, files: SourceFiles) -> None:
    values = [_value(optim.states[owner].get(key), optim.file, files) for optim in save.optims]
    for optim, value in zip(save.optims, values, strict=True):
        if value != values[0]:
            raise DamagedError(
                "the ranks do not belong to one save",
                where=str(files.root / optim.file),
                why=f"its optimizer has another `{key}` than that of `{save.optims[0].file}`",
                hint="a file may be of an earlier save under the same tag",
            )


def _value(value: object, file: str, files: SourceFiles) -> object:
    if isinstance(value, StoredTensor):
        return value.dtype, value.shape, files.read(file, value.offset, value.nbytes)
    return value


def _add_counters(save: Save, key: str, having: set[int], found: Leaves, root: Path) -> None:
    file = save.optims[0].file
    for name, part in save.parts.items():
        if part.owner not in having:
            continue
        path = (OPTIMIZER, "state", name, key)
        value = save.optims[0].states[part.owner][key]
        if isinstance(value, StoredTensor):
            found.tensors[join(path)] = stored_entry(path, value, file)
        else:
            found.add(value, path, file, str(root / file))


def _add_moments(save: Save, key: str, having: set[int], found: Leaves) -> None:
    strips = _moment_strips(save, key, sorted(having))
    names = [name for name, part in save.parts.items() if part.owner in having]
    if not strips:
        found.notes.append(
            f"not carried along: `{key}` in the optimizer's state of {listed(names)}: "
            "it is not one element per element of a parameter"
        )
        return
    for name in names:
        part, path = save.parts[name], (OPTIMIZER, "state", name, key)
        dtype = strips[part.spans[0][0] if part.spans else 0].dtype
        boxes = extents(part, strips)
        found.tensors[join(path)] = TensorEntry(join(path), dtype, part.shape, boxes, path)


def _moment_strips(save: Save, key: str, owners: Sequence[int]) -> Sequence[Strip]:
    """Return moments as flat vectors like those of the parameters; none where they are not such.

    Groups without this moment have another group's in their place.
    """
    by_rank = [list(_segments(optim, owners, key)) for optim in save.optims]
    ranked, groups = save.stage == 3, len(save.optims[0].partitions)
    if any(len(held) < len(owners) for held in by_rank) or (ranked and len(owners) < groups):
        return ()
    strips = strips_of(by_rank, ranked=ranked)
    if any(segment.tensor.dtype != strip.dtype for strip in strips for segment in strip.segments):
        return ()
    if ranked:
        return strips
    placed = dict(zip(owners, strips, strict=True))
    return [placed.get(owner, strips[0]) for owner in range(groups)]


def _segments(optim: OptimState, owners: Sequence[int], key: str) -> Iterator[Segment]:
    """Yield a rank's flat moments: as long as its partitions, before padding was stripped."""
    for owner in owners:
        value, partition = optim.states[owner].get(key), optim.partitions[owner]
        if isinstance(value, StoredTensor) and len(value.shape) == 1 and value.strides is None:
            surplus = value.shape[0] - partition.numel
            if surplus >= 0 and (surplus == 0 or optim.stage < 3):
                yield Segment(optim.file, value)
