"""One rank's ``torch.save`` file: plain tensors, shards of larger ones, and other leaves."""

from __future__ import annotations

from collections.abc import Iterator

from ckptctl.catalog import Blob, Path
from ckptctl.errors import CkptError
from ckptctl.formats.shared import dtensor, sharded_tensor
from ckptctl.formats.shared.device_mesh import Meshes
from ckptctl.formats.shared.dtensor import Sharded, read_dtensor
from ckptctl.formats.shared.malformed import malformed
from ckptctl.formats.shared.sharded_tensor import read_sharded_tensor, refuse_flat
from ckptctl.formats.shared.structure import flatten, join
from ckptctl.formats.shared.unknown_classes import require_known
from ckptctl.formats.torch_file import is_stored, refuse_hidden_tensors
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.pickles.reader import TORCH_TABLE, Global, Inert, Table
from ckptctl.storage.zips.reader import StoredTensor, read_archive

Leaf = Sharded | StoredTensor | object
_NAMED = (dtensor.CLASSES, sharded_tensor.CLASSES)
TABLE: Table = {
    **TORCH_TABLE,
    **{
        (module, name): Global(module, name)
        for classes in _NAMED
        for module, names in classes.items()
        for name in names
    },
    ("builtins", "getattr"): sharded_tensor.GETATTR,
}
_WRAPPED = Global("torch._utils", "_rebuild_wrapper_subclass")


def read_rank_file(files: SourceFiles, name: str) -> Iterator[tuple[Path, Leaf]]:
    """Yield the leaves of one rank's file with their paths.

    Args:
        files: The checkpoint's files.
        name: The file.

    Raises:
        DamagedError: It is truncated, malformed, hostile, or a shard contradicts itself.
        FormatError: It is no zip, or a tensor is sharded in a way that is not supported.
    """
    archive = read_archive(files, name, table=TABLE, unknown="inert")
    if isinstance(archive.root, Inert) and not _is_tensor(archive.root):
        require_known([Blob(name, (), value=archive.root)])
    meshes, where = Meshes(), str(files.root / name)
    for path, leaf in flatten(archive.root, _is_tensor):
        key = join(path)
        if _is_sharded(leaf):
            yield path, _sharded(leaf, key, where, meshes)
        else:
            if not is_stored(leaf):
                refuse_hidden_tensors(leaf, key, where)
            yield path, leaf


def _is_tensor(node: object) -> bool:
    return is_stored(node) or _is_sharded(node)


def _is_sharded(node: object) -> bool:
    """Whether *node* is ``_rebuild_from_type_v2(_rebuild_wrapper_subclass, class, ...)``."""
    if not isinstance(node, Inert) or node.name != "_rebuild_from_type_v2":
        return False
    return len(node.args) == 4 and node.args[0] == _WRAPPED


def _sharded(node: object, key: str, where: str, meshes: Meshes) -> Sharded:
    assert isinstance(node, Inert)
    refuse_flat(key)
    _, kind, args, state = node.args
    where = f"{where}, tensor `{key}`"
    try:
        with malformed(f"`{key}` is not a sharded tensor as torch writes it", where):
            if isinstance(kind, Global) and kind.name == "DTensor":
                return read_dtensor(args, state, meshes)
            if isinstance(kind, Global) and kind.name == "ShardedTensor":
                return read_sharded_tensor(args, state)
            raise TypeError(f"`{kind}` is no class of sharded tensors")
    except CkptError as error:
        error.where = where
        raise
