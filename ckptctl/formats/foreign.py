"""Detect files in unsupported formats, and advise how to convert them to a supported one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckptctl.errors import FormatError, format_option, quote_names
from ckptctl.storage.stand_ins import GIT_LFS, GIT_LFS_HINT, HDF5, LEGACY_TORCH
from ckptctl.tree import TreePath
from ckptctl.units import sort_naturally

_CONVERSION_ADVICE = {
    "ONNX": "export the weights from the framework that made the model",
    "TensorFlow": "load it with transformers (`from_tf=True`) and save it with `save_pretrained`",
    "HDF5 (Keras)": "load it with Keras or transformers and save the weights as safetensors",
    "a legacy torch file (not a zip)": (
        "load it with `torch.load(..., weights_only=True)` and save it again with `torch.save`"
    ),
    "a tar archive": "unpack it and pass the checkpoint inside",
    "a Git LFS pointer, not the file": GIT_LFS_HINT,
    "a bare pickle": "save the tensors with `torch.save` (reading a bare pickle would execute it)",
    "Flax (msgpack)": "load it with transformers (`from_flax=True`) and save it with "
    "`save_pretrained`",
}


def identify_foreign_format(path: TreePath) -> str | None:
    """Return the name of the unsupported format of *path*, such as ``ONNX``, or None if unknown."""
    return _identify_folder(path) if path.is_dir() else _identify_file(path)


def unrecognized_format_error(
    path: TreePath, format_names: Sequence[str], nested: Sequence[TreePath] = ()
) -> FormatError:
    """Build the error for a path that matches no format, with advice on how to continue.

    Args:
        path: The unrecognized file or folder.
        format_names: Names of the supported formats.
        nested: Checkpoints in subfolders of *path*, which the error lists.
    """
    kind = identify_foreign_format(path)
    if kind:
        return FormatError(f"this is {kind}", where=str(path), hint=_CONVERSION_ADVICE[kind])
    if nested:
        return FormatError(
            "this folder is not a checkpoint",
            where=str(path),
            why="subfolders contain "
            f"{quote_names([str(item.relative_to(path)) for item in nested])}",
            hint=f"pass one of them, such as `{nested[-1]}`",
        )
    contents = ""
    if path.is_dir():
        names = sort_naturally([_display_name(item) for item in path.iterdir()])
        contents = (
            f"; the folder contains {quote_names(names)}" if names else "; the folder is empty"
        )
    return FormatError(
        "not a recognized checkpoint",
        where=str(path),
        why=f"none of the {len(format_names)} supported formats match{contents}",
        hint="pass the directory with the weights, or set the format with "
        f"{format_option('--from')} (`ckptctl formats NAME` shows how a format is detected)",
    )


def _display_name(item: TreePath) -> str:
    """Return the name of *item* for messages, with a trailing slash if it is a folder.

    A broken link is shown with its target.
    """
    if item.is_symlink() and not item.exists():
        return f"{item.name} -> {item.readlink()}"
    return f"{item.name}/" if item.is_dir() else item.name


def _identify_folder(path: TreePath) -> str | None:
    names = {item.name for item in path.iterdir() if item.is_file()}
    if (
        "saved_model.pb" in names
        or "checkpoint" in names
        or any(name.endswith((".ckpt.index", "tf_model.h5")) for name in names)
    ):
        return "TensorFlow"
    suffixes = {Path(name).suffix for name in names}
    by_suffix = {".onnx": "ONNX", ".msgpack": "Flax (msgpack)"}
    return next((kind for suffix, kind in by_suffix.items() if suffix in suffixes), None)


def _identify_file(path: TreePath) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        head = file.read(512)
    if head.startswith(GIT_LFS):
        return "a Git LFS pointer, not the file"
    if head.startswith(HDF5):
        return "HDF5 (Keras)"
    if head.startswith(LEGACY_TORCH):
        return "a legacy torch file (not a zip)"
    if head[257:262] == b"ustar" or _is_tar(path):
        return "a tar archive"
    if path.suffix == ".onnx":
        return "ONNX"
    if path.suffix in {".pb", ".h5", ".index"} or path.name.startswith("saved_model"):
        return "TensorFlow"
    if path.suffix == ".msgpack":
        return "Flax (msgpack)"
    return "a bare pickle" if head[:1] == b"\x80" and head[1:2] in b"\2\3\4\5" else None


def _is_tar(path: TreePath) -> bool:
    try:
        import tarfile

        return tarfile.is_tarfile(path)
    except OSError:
        return False
