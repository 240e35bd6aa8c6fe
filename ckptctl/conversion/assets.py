"""Sidecar files of a checkpoint, and the ``--assets`` and ``--carry`` options."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from ckptctl.catalog import Catalog
from ckptctl.conversion.recognition.model import Description, descriptions_of
from ckptctl.errors import CkptError, SourceNotFoundError, UsageError, listed, spell_option
from ckptctl.formats.base import WritableFormat
from ckptctl.formats.sidecar_files import CONFIGURATION, beside, documents, left_behind
from ckptctl.notes import Notes
from ckptctl.planner.config_facts import Json
from ckptctl.planner.plan import RawCopy
from ckptctl.storage.paths import (
    could_be_repository,
    expand_home,
    hub_url,
    leads_outside,
    path_hint,
    resolve_source_path,
)
from ckptctl.storage.urls import HUB_SCHEME, is_url
from ckptctl.tree import TreePath
from ckptctl.units import natural

CONFIG, PARAMS = "config.json", "params.json"


@dataclass(frozen=True, slots=True)
class Assets:
    """Configuration and sidecar files of a conversion, and the folders they come from.

    Attributes:
        roots: Directory of each sidecar file.
        sizes: Sizes of the sidecar files in bytes.
        documents: Parsed ``config.json`` and ``params.json``; only those of ``--assets`` if it has
            any.
        others: Other files in the same directories, and why they are not copied.
        changed: Names of documents that differ from their files.
        described: All descriptions of the model, including those that ``--assets`` replaces.
    """

    roots: Mapping[str, TreePath]
    sizes: Mapping[str, int]
    documents: Mapping[str, Json]
    others: Mapping[str, str] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()
    described: tuple[Description, ...] = ()

    def copies(self, without: Collection[str]) -> Iterator[RawCopy]:
        """Yield a copy of each sidecar file except those called *without*."""
        for name, size in self.sizes.items():
            if name not in without:
                yield RawCopy(name, 0, size, name, root=self.roots[name])


def assets_folder(given: str | TreePath) -> TreePath:
    """Resolve the folder that ``--assets`` names.

    It is a local folder or a URL. A missing folder ``ORG/NAME`` means a repository of the Hub.
    """
    if is_url(given):
        return _existing(resolve_source_path(given))
    if url := hub_url(given):
        try:
            return _existing(resolve_source_path(url))
        except CkptError as error:
            error.why = "; ".join(filter(None, (f"there is no local folder `{given}`", error.why)))
            raise
    return _existing(expand_home(Path(given)).absolute())


def file_notes(
    assets: Assets,
    directory: str | TreePath | None,
    target: WritableFormat,
    written: Collection[str],
) -> Notes:
    """Describe the folder that ``--assets`` names, and the files that are not copied.

    *target* is the output format, and *written* are the names of written sidecar files.
    """
    notes = Notes()
    if directory is not None and not is_url(directory):
        option = spell_option(f"--assets {directory}")
        if url := hub_url(directory):
            notes.add(f"{option} refers to the Hub repository `{url}`")
        elif could_be_repository(directory):
            other = f"use `{HUB_SCHEME}://{directory}` for the Hub repository"
            notes.add(f"{option} refers to the local folder; {other}")
    others = {name: why for name, why in assets.others.items() if name not in written}
    if target.single_file:
        alone = f"a single {target.name} file has no sidecar files"
        others = {**dict.fromkeys({**assets.sizes, **assets.documents}, alone), **others}
    else:
        notes.add(*left_behind(others))
    notes.explain("not copied", others)
    return notes


def _existing(root: TreePath) -> TreePath:
    if not root.is_dir():
        raise SourceNotFoundError(
            "no such directory",
            where=str(root),
            why=f"{spell_option('--assets')} must name a folder with {CONFIG} or {PARAMS}",
            hint=path_hint(root),
        )
    return root


def gather(catalog: Catalog, directory: str | TreePath | None, globs: Sequence[str] = ()) -> Assets:
    """Collect the sidecar files of a checkpoint. Those of ``--assets`` replace them."""
    root, inner = catalog.root, f"{CONFIGURATION}/"
    places: dict[str, TreePath] = {}
    sizes: dict[str, int] = {}
    # Files of verl's configuration folder are moved next to the others.
    for name, size in sorted(catalog.assets.items(), key=lambda one: not one[0].startswith(inner)):
        short = name.removeprefix(inner)
        places[short] = root if short == name else root / CONFIGURATION
        sizes[short] = size
    files = tuple(descriptions_of(catalog, places))
    assets = Assets(places, sizes, catalog.documents, catalog.others, described=files)
    roots = [root]
    if directory is not None:
        root = assets_folder(directory)
        roots.append(root)
        assets = _with_directory(catalog, assets, root)
    return carried(assets, roots, globs) if globs else assets


def _with_directory(catalog: Catalog, own: Assets, root: TreePath) -> Assets:
    """Add the files of *root*, the folder of ``--assets``, to *own*."""
    stated, found = documents(root), beside(root, documented=False)
    if not found.assets and not stated:
        raise UsageError("no configuration or tokenizer found", where=str(root))
    described = own.documents if root == catalog.root else stated
    theirs = (Description(name, str(root / name), one, True) for name, one in described.items())
    return Assets(
        {**own.roots, **dict.fromkeys(found.assets, root)},
        {**own.sizes, **found.assets},
        {**({} if described else own.documents), **described},
        {**own.others, **found.others},
        described=(*(own.described if root != catalog.root else ()), *theirs),
    )


def carried(assets: Assets, roots: Sequence[TreePath], globs: Sequence[str]) -> Assets:
    """Add the skipped files that match one of *globs* to *assets*.

    Args:
        assets: Sidecar files, and the other files of their folders.
        roots: Folders of the other files; a later folder takes precedence.
        globs: Patterns for relative paths. ``*`` also matches slashes, but not the leading dot of
            a hidden file or folder.
    """
    found = {name: root for root in roots for name in _files(root, assets.others)}
    for glob in globs:
        if not any(_matches(name, glob) for name in (*found, *assets.sizes)):
            raise UsageError(
                f"{spell_option(f'--carry {glob}')} matches no file",
                where=", ".join(map(str, roots)),
                why="files that are not copied by default: " + listed(natural(assets.others))
                if assets.others
                else "all files in the folder are copied by default",
            )
    wanted = {n: root for n, root in found.items() if any(_matches(n, glob) for glob in globs)}
    folders = {f"{name.partition('/')[0]}/" for name in wanted}
    stay = tuple(name for name in found if name not in wanted)
    return replace(
        assets,
        roots={**assets.roots, **wanted},
        sizes={**assets.sizes, **{n: (root / n).stat().st_size for n, root in wanted.items()}},
        others={
            name: why
            for name, why in assets.others.items()
            if name not in wanted and (name not in folders or any(n.startswith(name) for n in stay))
        },
    )


def _files(root: TreePath, names: Iterable[str]) -> Iterator[str]:
    """Yield the files among *names* and in folders among them, except links that lead outside."""
    for name in names:
        item = root / name
        found = item.rglob("*") if name.endswith("/") and item.is_dir() else (item,)
        for one in found:
            if one.is_file() and not leads_outside(one, root):
                yield str(one.relative_to(root))


def _matches(name: str, glob: str) -> bool:
    """Check if *glob* matches a path. Leading dots must be matched explicitly."""
    return fnmatchcase(name, glob) and f"/{name}".count("/.") <= f"/{glob}".count("/.")
