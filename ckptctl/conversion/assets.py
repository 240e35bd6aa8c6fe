"""Sidecar files of a checkpoint, and the ``--assets`` and ``--carry`` options."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from ckptctl.catalog import Catalog
from ckptctl.conversion.recognition.model import ModelDescription, iterate_descriptions
from ckptctl.errors import CkptError, SourceNotFoundError, UsageError, format_option, quote_names
from ckptctl.formats.base import WritableFormat
from ckptctl.formats.sidecar_files import (
    HF_CONFIG_FOLDER,
    list_skipped_file_notes,
    read_config_files,
    scan_sidecar_files,
)
from ckptctl.notes import Notes
from ckptctl.planner.config_facts import Json
from ckptctl.planner.plan import RawCopy
from ckptctl.storage.paths import (
    build_path_hint,
    could_be_repository,
    expand_home,
    guess_hub_url,
    leads_outside,
    resolve_source_path,
)
from ckptctl.storage.urls import HUB_SCHEME, is_url
from ckptctl.tree import TreePath
from ckptctl.units import sort_naturally

CONFIG, PARAMS = "config.json", "params.json"


@dataclass(frozen=True, slots=True)
class Assets:
    """Configuration and sidecar files that a conversion writes next to the output tensors.

    Attributes:
        roots: Source directory of each sidecar file, by relative file name.
        sizes: Size of each sidecar file in bytes, by relative file name.
        documents: Parsed ``config.json`` and ``params.json``, or only those in the folder of
            ``--assets`` if it contains any.
        others: Reason why each remaining file in the source directories is not copied, by relative
            file name.
        changed: Names of documents whose contents differ from the files on disk.
        described: All descriptions of the model, including config files that ``--assets`` replaces.
    """

    roots: Mapping[str, TreePath]
    sizes: Mapping[str, int]
    documents: Mapping[str, Json]
    others: Mapping[str, str] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()
    described: tuple[ModelDescription, ...] = ()

    def iterate_copies_except(self, excluded_names: Collection[str]) -> Iterator[RawCopy]:
        """Yield the planned copy of each sidecar file whose name is not in *excluded_names*."""
        for name, size in self.sizes.items():
            if name not in excluded_names:
                yield RawCopy(name, 0, size, name, root=self.roots[name])


def find_assets_folder(location: str | TreePath) -> TreePath:
    """Resolve the folder that ``--assets`` names.

    *location* is a local folder or a URL. If it has the form ``ORG/NAME`` and no such local folder
    exists, it is a repository of the Hub.
    """
    if is_url(location):
        return _require_folder(resolve_source_path(location))
    if url := guess_hub_url(location):
        try:
            return _require_folder(resolve_source_path(url))
        except CkptError as error:
            error.why = "; ".join(
                filter(None, (f"there is no local folder `{location}`", error.why))
            )
            raise
    return _require_folder(expand_home(Path(location)).absolute())


def build_file_notes(
    assets: Assets,
    directory: str | TreePath | None,
    target: WritableFormat,
    written_names: Collection[str],
) -> Notes:
    """Build notes about the folder of ``--assets`` and about files that are not copied.

    *target* is the output format, and *written_names* are the names of written sidecar files.
    """
    notes = Notes()
    if directory is not None and not is_url(directory):
        option = format_option(f"--assets {directory}")
        if url := guess_hub_url(directory):
            notes.add(f"{option} refers to the Hub repository `{url}`")
        elif could_be_repository(directory):
            hub_hint = f"use `{HUB_SCHEME}://{directory}` for the Hub repository"
            notes.add(f"{option} refers to the local folder; {hub_hint}")
    reasons = {name: why for name, why in assets.others.items() if name not in written_names}
    if target.single_file:
        single_file_reason = f"a single {target.name} file has no sidecar files"
        reasons = {
            **dict.fromkeys({**assets.sizes, **assets.documents}, single_file_reason),
            **reasons,
        }
    else:
        notes.add(*list_skipped_file_notes(reasons))
    notes.explain("not copied", reasons)
    return notes


def _require_folder(root: TreePath) -> TreePath:
    if not root.is_dir():
        raise SourceNotFoundError(
            "no such directory",
            where=str(root),
            why=f"{format_option('--assets')} must name a folder with {CONFIG} or {PARAMS}",
            hint=build_path_hint(root),
        )
    return root


def gather_assets(
    catalog: Catalog, directory: str | TreePath | None, globs: Sequence[str] = ()
) -> Assets:
    """Collect the sidecar files of a checkpoint.

    A file in *directory*, the folder of ``--assets``, replaces the file of the same name in the
    root of the checkpoint. *globs* select further files to copy.
    """
    root, config_prefix = catalog.root, f"{HF_CONFIG_FOLDER}/"
    folders: dict[str, TreePath] = {}
    sizes: dict[str, int] = {}
    # Files of verl's configuration folder are moved next to the others.
    for name, size in sorted(
        catalog.assets.items(), key=lambda item: not item[0].startswith(config_prefix)
    ):
        short = name.removeprefix(config_prefix)
        folders[short] = root if short == name else root / HF_CONFIG_FOLDER
        sizes[short] = size
    files = tuple(iterate_descriptions(catalog, folders))
    assets = Assets(folders, sizes, catalog.documents, catalog.others, described=files)
    roots = [root]
    if directory is not None:
        root = find_assets_folder(directory)
        roots.append(root)
        assets = _add_directory(catalog, assets, root)
    return add_carried_files(assets, roots, globs) if globs else assets


def _add_directory(catalog: Catalog, source_assets: Assets, root: TreePath) -> Assets:
    """Add the files of *root*, the folder of ``--assets``, to *source_assets*."""
    stated_documents, sidecars = (
        read_config_files(root),
        scan_sidecar_files(root, read_configs=False),
    )
    if not sidecars.assets and not stated_documents:
        raise UsageError("no configuration or tokenizer found", where=str(root))
    is_own_folder = root == catalog.root
    # Formats that are single files do not read the configuration next to them.
    described = (is_own_folder and source_assets.documents) or stated_documents
    descriptions = (
        ModelDescription(name, str(root / name), content, True)
        for name, content in described.items()
    )
    return Assets(
        {**source_assets.roots, **dict.fromkeys(sidecars.assets, root)},
        {**source_assets.sizes, **sidecars.assets},
        {**({} if described else source_assets.documents), **described},
        {**source_assets.others, **sidecars.others},
        described=(*(() if is_own_folder else source_assets.described), *descriptions),
    )


def add_carried_files(assets: Assets, roots: Sequence[TreePath], globs: Sequence[str]) -> Assets:
    """Add the files that match one of *globs* and would be skipped otherwise to *assets*.

    Args:
        assets: Sidecar files that are copied, and files in their folders that are not copied yet.
        roots: Folders to search for skipped files; a later folder takes precedence.
        globs: Patterns for relative paths. ``*`` also matches slashes, but not the leading dot of
            a hidden file or folder.
    """
    candidates = {name: root for root in roots for name in _iterate_files(root, assets.others)}
    for glob in globs:
        if not any(_matches_glob(name, glob) for name in (*candidates, *assets.sizes)):
            raise UsageError(
                f"{format_option(f'--carry {glob}')} matches no file",
                where=", ".join(map(str, roots)),
                why="files that are not copied by default: "
                + quote_names(sort_naturally(assets.others))
                if assets.others
                else "all files in the folder are copied by default",
            )
    selected = {
        n: root for n, root in candidates.items() if any(_matches_glob(n, glob) for glob in globs)
    }
    folders = {f"{name.partition('/')[0]}/" for name in selected}
    remaining = tuple(name for name in candidates if name not in selected)
    return replace(
        assets,
        roots={**assets.roots, **selected},
        sizes={**assets.sizes, **{n: (root / n).stat().st_size for n, root in selected.items()}},
        others={
            name: why
            for name, why in assets.others.items()
            if name not in selected
            and (name not in folders or any(n.startswith(name) for n in remaining))
        },
    )


def _iterate_files(root: TreePath, names: Iterable[str]) -> Iterator[str]:
    """Yield the files among *names*, and all files in the folders among *names*.

    Symbolic links that lead outside *root* are skipped.
    """
    for name in names:
        item = root / name
        items = item.rglob("*") if name.endswith("/") and item.is_dir() else (item,)
        for file in items:
            if file.is_file() and not leads_outside(file, root):
                yield str(file.relative_to(root))


def _matches_glob(name: str, glob: str) -> bool:
    """Check if *glob* matches the relative path *name*.

    The leading dot of a hidden file or folder is not matched by a wildcard.
    """
    return fnmatchcase(name, glob) and f"/{name}".count("/.") <= f"/{glob}".count("/.")
