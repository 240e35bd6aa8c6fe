"""Protections of checkpoints against removal, listed in :data:`PROTECTIONS`.

Each protection has a function that claims checkpoints of a run, with a reason. A claimed checkpoint
is never removed. Either it *stays*, and the rules of ``prune`` count it like any other checkpoint,
or it is *left alone*, and the rules do not count it. The rules themselves are in
:mod:`ckptctl.planner.retention`.

Many protections identify a checkpoint by a text. The text may contain its name, its step, its path
(POSIX or Windows), or the path of a file inside it. It may be quoted, one of several lines, or a
JSON value. A pointer that cannot be interpreted protects all checkpoints: see
:meth:`Pointers.require_interpretable`.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

from ckptctl.errors import CkptError, RefusedError, StorageError
from ckptctl.formats.megatron.megatron_folder import POINTER_FILE as ITERATION
from ckptctl.formats.shared.tags import LATEST, LATEST_UNIVERSAL, read_pointer
from ckptctl.formats.sidecar_files import ADAPTER_CONFIG, RUN_FILE
from ckptctl.planner.retention import BEING_WRITTEN, NOT_INTERRUPTED, find_abandoned_checkpoints
from ckptctl.runs.entries import read_entry
from ckptctl.runs.health import Checkpoint, check_health
from ckptctl.runs.names import is_lightning_last, parse_name, parse_staged_name
from ckptctl.runs.notes import (
    LAST_CHECKPOINT,
    TRAINER_STATE,
    read_lightning_notes,
    read_trainer_state,
)
from ckptctl.storage.files import source_files
from ckptctl.storage.paths import resolve_links
from ckptctl.storage.trash import TRASH_FOLDER
from ckptctl.storage.urls import is_url
from ckptctl.tree import TreePath

POINTERS = {
    LATEST: "DeepSpeed",
    LATEST_UNIVERSAL: "DeepSpeed",
    "last_checkpoint": "detectron2",
    ITERATION: "Megatron-LM, verl",
}
"""Names of pointer files, each with the trainer that reads it to find the checkpoint to resume."""
MAX_POINTER_BYTES = 1 << 13
SHOWN_CHARS = 80
"""Maximum number of characters of a pointer that a message shows."""
IN_USE_REASON = "the running training process"
STEPLESS_NAMES = frozenset({"release"})
"""Checkpoint names without a step. Megatron uses ``release`` for published weights."""
MAX_TEXT_PARTS = 256
"""Maximum number of path components and words of a pointer that are compared with names."""
MAX_LINK_HOPS = 40
"""Maximum length of a chain of links, as in Linux (man 7 path_resolution)."""
MAX_ENTRIES = 1_000_000
"""Maximum number of entries searched below one folder of the run."""
_BYTE_ORDER_MARKS = ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_SEPARATORS = re.compile(r"[\\/\r\n]+")
_QUOTED = re.compile(r'"([^"\r\n]*)"')
_STRIPPED_CHARS = " \t\"'`“”‘’«»{}[]()<>,;"
_NUMBER = re.compile(
    r"(?:^[^\S\n]*+|:\s*+)[\"']?(\d{1,18})[\"']?(?:[^\S\n]*+$|\s*+[,}]|\s*+\Z)",
    re.ASCII | re.MULTILINE,
)
"""Number that is on its own line, or that is a value in JSON."""
_STEP_LIKE_NAME = re.compile(r"(?:[A-Za-z_.=+-]*+\d)++[A-Za-z_.=+-]*+", re.ASCII)
_DELTA_STEPS = re.compile(r"(?:\d{1,18}-)?(\d{1,18})\.delta", re.ASCII)
"""Name of a delta, with the step of its result."""

NameResolver = Callable[[str], str | None]


class PointerFile(NamedTuple):
    """Content of a pointer file, or the error that occurred when it was read.

    Attributes:
        is_complete: Whether the complete file was read. Only the start of a large file is read.
    """

    content: str = ""
    is_complete: bool = True
    error: CkptError | None = None

    @classmethod
    def read(cls, root: TreePath, file: str) -> PointerFile:
        """Read a pointer file in UTF-8 or UTF-16, or return an empty one if it does not exist."""
        try:
            if not (root / file).is_file():
                return cls()
            content, is_complete = read_pointer(root, file, MAX_POINTER_BYTES)
        except CkptError as error:
            return cls(error=error)
        except OSError as error:
            return cls(error=StorageError(str(error)))
        marks = (name for mark, name in _BYTE_ORDER_MARKS if content.startswith(mark))
        text = content.decode(next(marks, "utf-8"), "replace")
        return cls(text.replace("\0", "").removeprefix("\ufeff").strip(), is_complete)

    @property
    def names_checkpoint(self) -> bool:
        """Whether the content is a step or contains a checkpoint name, even if none exists."""
        return has_checkpoint_name(self.content) or (
            self.content.isdecimal() and len(self.content) < SHOWN_CHARS
        )


@dataclass(frozen=True, slots=True)
class Pointers:
    """Pointer files of a run, with their contents."""

    root: TreePath
    files: Mapping[str, PointerFile]

    @classmethod
    def read(cls, root: TreePath) -> Pointers:
        """Read all pointer files in *root*."""
        return cls(root, {file: PointerFile.read(root, file) for file in POINTERS})

    def _list_checkpoint_paths(self) -> list[TreePath]:
        named_members = (
            item
            for item in self.root.iterdir()
            if parse_name(item.name) or is_lightning_last(item.name)
        )
        return sorted(named_members)

    def require_interpretable(self) -> None:
        """Raise if a pointer of the run cannot be read or interpreted.

        Pointers in checkpoints with an incomplete write may be unreadable, because training does
        not resume from these checkpoints.
        """
        root, members = (
            self.root,
            [item for item in self._list_checkpoint_paths() if not item.is_symlink()],
        )
        names = [item.name for item in members]
        resolve_name = build_name_resolver(root, names)
        for file, (text, is_complete, error) in self.files.items():
            _raise_if_unreadable(root / file, error)
            is_known = find_mentioned_checkpoints(text, names, resolve_name) or is_known_reference(
                text, root
            )
            if not is_complete or (text and not is_known):
                raise RefusedError(
                    "a pointer has unrecognized content",
                    where=str(root / file),
                    why=f"it contains {text[:SHOWN_CHARS]!r}; "
                    "the checkpoint that it names could be removed",
                    hint="write the name of a checkpoint into it, or move it away",
                )
        _raise_if_unreadable(root / TRAINER_STATE, read_trainer_state(root).error)
        for path in members:
            note, state = read_lightning_notes(path), read_trainer_state(path)
            has_torn_write = (note.error or state.error) and check_health(path, model=False).torn
            if not has_torn_write or (
                is_lightning_last(path.name) and isinstance(note.error, StorageError | None)
            ):
                _raise_if_unreadable(path, note.error)
            if not has_torn_write:
                _raise_if_unreadable(path / TRAINER_STATE, state.error)

    def iterate_dangling_notes(self) -> Iterator[str]:
        """Yield a message for each pointer file that names a checkpoint that no longer exists."""
        names = [item.name for item in self._list_checkpoint_paths()]
        resolve_name = build_name_resolver(self.root, names)
        for file, pointer in self.files.items():
            if pointer.names_checkpoint and not find_mentioned_checkpoints(
                pointer.content, names, resolve_name
            ):
                text = pointer.content[:SHOWN_CHARS]
                yield f"`{file}` names checkpoint {text!r}, which does not exist"


def _raise_if_unreadable(path: TreePath, error: CkptError | None) -> None:
    if error:
        failed = isinstance(error, StorageError)
        raise (StorageError if failed else RefusedError)(
            "a pointer cannot be read",
            where=str(path),
            why=f"{error.what}; the checkpoint that it names could be removed",
            hint="run it as a user who can read the file"
            if failed
            else "restore a copy of the file, or move its checkpoint out of the run",
        )


class Claim(NamedTuple):
    """Claim on a checkpoint, by its name or by a *text* from which the checkpoint is looked up.

    If the protection's effect is ``stays``, the reason is the file or link that names the
    checkpoint.
    """

    reason: str
    name: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class RunView:
    """Run folder and its checkpoints, as seen by the functions that find protections.

    Attributes:
        checkpoints: Checkpoints of the run, from oldest to newest.
        in_use: Names of checkpoints that a running job uses.
        protect_abandoned: Whether abandoned checkpoints are protected.
    """

    root: TreePath
    checkpoints: Sequence[Checkpoint]
    pointers: Pointers
    in_use: Collection[str] = ()
    protect_abandoned: bool = True

    @property
    def real_checkpoints(self) -> list[Checkpoint]:
        """Checkpoints that are not links."""
        return [checkpoint for checkpoint in self.checkpoints if not checkpoint.entry.link]

    @property
    def names(self) -> list[str]:
        """Names of the checkpoints that are neither unfinished saves nor links."""
        return [
            checkpoint.name
            for checkpoint in self.real_checkpoints
            if not checkpoint.entry.is_staging
        ]

    def select_names(self, condition: Callable[[Checkpoint], bool]) -> list[str]:
        """Return the names of checkpoints that are not links and satisfy *condition*."""
        return [checkpoint.name for checkpoint in self.real_checkpoints if condition(checkpoint)]


@dataclass(frozen=True, slots=True)
class Protection:
    """Reason why a checkpoint is not removed.

    Attributes:
        trainer: Name of the program that writes *file*.
        file: File that contains the claim.
        find_claims: Function that yields the claims on checkpoints of a run.
        effect: ``stays`` if the rules count the checkpoint, or ``left alone`` if they do not.
    """

    name: str
    trainer: str
    file: str
    find_claims: Callable[[RunView], Iterator[Claim]]
    effect: Literal["stays", "left alone"] = "stays"


class CheckpointProtection(NamedTuple):
    """Reasons why one checkpoint is protected against removal.

    Attributes:
        pinned: Files and links that name the checkpoint. If there are any, it stays, and the rules
            count it.
        exempt: Reason to leave the checkpoint alone, or an empty string if it is not left alone.
    """

    pinned: tuple[str, ...] = ()
    exempt: str = ""


def find_protections(view: RunView) -> dict[str, CheckpointProtection]:
    """Map the name of each protected checkpoint to its protection."""
    known_names, names = {checkpoint.name for checkpoint in view.checkpoints}, view.names
    resolve_name = build_name_resolver(view.root, names)
    protections: dict[str, CheckpointProtection] = {}
    for protection in PROTECTIONS:
        for claim in protection.find_claims(view):
            claimed_names = (
                find_mentioned_checkpoints(claim.text, names, resolve_name)
                if claim.text
                else (claim.name,)
            )
            for name in claimed_names:
                name = name if name in known_names else resolve_name(name) or ""
                if not name:
                    continue
                pinned, exempt = protections.get(name, CheckpointProtection())
                if protection.effect == "left alone":
                    exempt = exempt or claim.reason
                elif claim.reason not in pinned:
                    pinned = (*pinned, claim.reason)
                protections[name] = CheckpointProtection(pinned, exempt)
    return protections


# --- references to a checkpoint -------------------------------------------------------------------


def _claim_pointer(file: str, view: RunView) -> Iterator[Claim]:
    """Claim the checkpoint that the pointer *file* names, because training resumes from it."""
    yield Claim(f"`{file}`", text=view.pointers.files[file].content)


def _claim_best_of_transformers(view: RunView) -> Iterator[Claim]:
    """Claim the best checkpoint according to transformers' newest trainer states.

    If the newest state is truncated, both its readable beginning and the newest state that is not
    truncated are used.
    """
    states = {name: read_trainer_state(view.root / name) for name in view.names}
    names_with_state = [name for name in view.names if states[name].has_state]
    newest = _select_newest(names_with_state, view)
    newest_readable = _select_newest(
        [name for name in names_with_state if not states[name].error], view
    )
    yield from (
        Claim(f"`{TRAINER_STATE}` as the best", text=t)
        for t in read_trainer_state(view.root).best_checkpoints
    )
    for name in dict.fromkeys((*newest, *newest_readable)):
        truncated_names = (
            candidate
            for candidate in newest
            if states[candidate].error and _get_series(candidate) == _get_series(name)
        )
        truncated_name = next(
            (candidate for candidate in truncated_names if candidate != name), None
        )
        fallback_text = f" of `{name}` as the best (the one of `{truncated_name}` cannot be read)"
        reason = f"`{TRAINER_STATE}`{fallback_text if truncated_name else ' as the best'}"
        yield from (Claim(reason, text=text) for text in states[name].best_checkpoints)


def _claim_best_of_lightning(view: RunView) -> Iterator[Claim]:
    """Claim the best checkpoints according to Lightning's newest callback states."""
    last_names = (name for name in view.names if is_lightning_last(name))
    for name in dict.fromkeys((LAST_CHECKPOINT, *last_names, *_select_newest(view.names, view))):
        for best in read_lightning_notes(view.root / name).best_checkpoints:
            yield Claim(f"`{name}` as the best", text=best)


def _claim_adapter_bases(view: RunView) -> Iterator[Claim]:
    """Claim the checkpoints that adapters of the run name as their base models.

    If a configuration cannot be read, all other checkpoints are claimed.
    """
    for checkpoint in view.real_checkpoints:
        if checkpoint.torn or checkpoint.entry.is_staging:
            continue
        reason = f"`{ADAPTER_CONFIG}` of `{checkpoint.name}` as its base"
        others = [name for name in view.names if name != checkpoint.name]
        for folder in dict.fromkeys((checkpoint.path, *checkpoint.parts)):
            base = _read_adapter_base(folder)
            if base is None:
                reason = f"`{ADAPTER_CONFIG}` of `{checkpoint.name}`, which cannot be read"
                yield from (Claim(reason, name) for name in others)
            elif base and not _is_path_elsewhere(base, view.root):
                resolve_name = build_name_resolver(view.root, others)
                named = find_mentioned_checkpoints(base, others, resolve_name)
                yield from (Claim(reason, name) for name in named)


def _read_adapter_base(folder: TreePath) -> str | None:
    """Read the base of the adapter in *folder*, or return None if its config cannot be read.

    The base is empty if there is no adapter, or if it names none.
    """
    if not _is_file(folder / ADAPTER_CONFIG):
        return ""
    from ckptctl.formats.peft import read_adapter_config  # few runs have adapters

    try:
        config = read_adapter_config(folder).get(ADAPTER_CONFIG, {})
    except (CkptError, OSError):
        return None
    base = config.get("base_model_name_or_path")
    return base if isinstance(base, str) else ""


def _is_file(path: TreePath) -> bool:
    """Return whether *path* is a file, or false if its folder cannot be read."""
    try:
        return path.is_file()
    except OSError:
        return False


def _is_path_elsewhere(text: str, root: TreePath) -> bool:
    """Return whether *text* is the absolute path of an existing file or folder outside *root*."""
    path = Path(text)
    if is_url(root) or not path.is_absolute():
        return False
    with suppress(OSError, ValueError, RuntimeError):
        return path.exists() and not resolve_links(path).is_relative_to(resolve_links(Path(root)))
    return False


def _claim_delta_bases(view: RunView) -> Iterator[Claim]:
    """Claim the checkpoints that may be the base of a delta in the folder of the run.

    A delta states digests of its base, but not its path. Comparing digests would require reading
    all data, so every checkpoint is claimed, except later steps than that of the delta. A delta
    that applies to the result of another delta claims none.
    """
    from ckptctl.formats.delta import MANIFEST, read_manifest  # few runs have deltas

    checkpoints = {checkpoint.name: checkpoint for checkpoint in view.real_checkpoints}
    digests: dict[str, tuple[str, str]] = {}
    for item in view.root.iterdir():
        checkpoint = checkpoints.get(item.name)
        if (checkpoint and checkpoint.complete) or not _is_file(item / MANIFEST):
            continue
        try:
            with source_files(item) as files:
                manifest = read_manifest(files)
            digests[item.name] = manifest.base_sha256, manifest.result_sha256
        except (CkptError, OSError):
            digests[item.name] = "", ""
    results = {result for _, result in digests.values() if result}
    for delta_name, (base, _) in digests.items():
        if base in results:
            continue
        parsed_name, steps = parse_name(delta_name), _DELTA_STEPS.fullmatch(delta_name)
        step = int(steps[1]) if steps else parsed_name.step if parsed_name else None
        for name in view.names:
            is_later = step is not None and checkpoints[name].entry.parsed_name.step > step
            if name not in digests and not is_later:
                yield Claim(f"the delta `{delta_name}` as its possible base", name)


def _claim_link_targets(view: RunView) -> Iterator[Claim]:
    """Claim checkpoints that symbolic links point to, point into, or pass through."""
    links = {checkpoint.name for checkpoint in view.checkpoints if checkpoint.entry.link}
    for name, link in iterate_link_targets(view.root, view.names):
        if name not in links:
            yield Claim(link, name)


def _claim_in_use(view: RunView) -> Iterator[Claim]:
    """Claim the last save of a running job and the checkpoint that it resumed from."""
    yield from (Claim(IN_USE_REASON, name) for name in view.in_use if name)


# --- properties of a checkpoint -------------------------------------------------------------------


def _claim_abandoned(view: RunView) -> Iterator[Claim]:
    """Claim checkpoints that were abandoned when the run resumed from an earlier one."""
    for name, step in (
        find_abandoned_checkpoints(view.real_checkpoints).items() if view.protect_abandoned else ()
    ):
        yield Claim(f"abandoned: the run resumed from step {step}", name)


def _claim_links(view: RunView) -> Iterator[Claim]:
    """Claim links that are named like checkpoints, since their targets are managed elsewhere."""
    yield from (
        Claim("a symbolic link", checkpoint.name)
        for checkpoint in view.checkpoints
        if checkpoint.entry.link
    )


def _claim_last(view: RunView) -> Iterator[Claim]:
    """Claim ``last.ckpt``, which Lightning overwrites on every save and resumes from."""
    last_names = (
        checkpoint.name for checkpoint in view.checkpoints if is_lightning_last(checkpoint.name)
    )
    yield from (Claim("the newest according to its trainer", name) for name in last_names)


def _claim_unreadable_records(view: RunView) -> Iterator[Claim]:
    """Claim complete checkpoints with an unreadable ``ckptctl.run.json``.

    Without this record, it is unknown whether they are the best checkpoints, or abandoned.
    """
    for checkpoint in view.real_checkpoints:
        if checkpoint.record.error and _is_resumable(checkpoint):
            yield Claim(
                f"its `{RUN_FILE}` cannot be read: {checkpoint.record.error.what}", checkpoint.name
            )


def _claim_being_written(view: RunView) -> Iterator[Claim]:
    """Claim checkpoints that are locked, and incomplete checkpoints that were changed recently."""
    yield from (
        Claim(BEING_WRITTEN, name)
        for name in view.select_names(lambda checkpoint: checkpoint.writing)
    )


def _claim_not_interrupted(view: RunView) -> Iterator[Claim]:
    """Claim checkpoints that are not complete, although their files show no incomplete write."""
    names = view.select_names(lambda checkpoint: not (checkpoint.complete or checkpoint.torn))
    yield from (Claim(NOT_INTERRUPTED, name) for name in names)


def _is_resumable(checkpoint: Checkpoint) -> bool:
    """Return whether training may resume from *checkpoint*, which shows no incomplete write."""
    return not (checkpoint.torn or checkpoint.writing)


def _select_newest(names: Sequence[str], view: RunView) -> list[str]:
    """Select, in each series, the newest checkpoints of *names* whose trainer states must be read.

    A checkpoint with an incomplete write may name itself as the best. Therefore the newest complete
    checkpoint and the newest one without an incomplete write are selected as well.
    """
    series_by_name = {name: series for name in names if (series := _get_series(name))}
    candidate_sets = (
        view.select_names(lambda checkpoint: checkpoint.complete),
        view.select_names(_is_resumable),
    )
    newest = [
        {series: name for name, series in series_by_name.items() if name in selection}.values()
        for selection in (series_by_name, *candidate_sets)
    ]
    return list(dict.fromkeys(chain.from_iterable(newest)))


def _get_series(name: str) -> str:
    parsed_name = parse_name(name)
    return parsed_name.series if parsed_name else ""


def has_pointer_to_entry(root: TreePath) -> bool:
    """Return whether a pointer or link in *root*, or next to it, names an entry of *root*.

    A pointer to a missing checkpoint also counts, since that checkpoint belonged to a run.
    """
    pointers = Pointers.read(root)
    if any(pointer.names_checkpoint for pointer in pointers.files.values()):
        return True
    found_entries = (entry for item in root.iterdir() if (entry := read_entry(item)))
    view = RunView(root, [Checkpoint.from_entry(entry) for entry in found_entries], pointers)
    names = [checkpoint.name for checkpoint in view.checkpoints if checkpoint.path.is_dir()]
    resolve_name = build_name_resolver(root, names)
    texts = (
        claim.text for protection in NAMING_PROTECTIONS for claim in protection.find_claims(view)
    )
    return any(find_mentioned_checkpoints(text, names, resolve_name) for text in texts) or any(
        name in names for name, _ in iterate_link_targets(root, names, only_nearby=True)
    )


# --- checkpoints that a text mentions -------------------------------------------------------------


def find_mentioned_checkpoints(
    text: str, names: Sequence[str], resolve_name: NameResolver
) -> tuple[str, ...]:
    """Return the checkpoints among *names* that *text* mentions by name, path or step."""
    # Only as separate words: step-10 does not mention step-1.
    words = (
        (name, rf"(?<![\w.=+-]){re.escape(name)}(?![\w=+-])") for name in names if name in text
    )
    matches = [name for name, word in words if re.search(word, text)]
    matches += [resolved for part in _split_text(text) if (resolved := resolve_name(part))]
    if not matches:
        steps = {int(digits) for digits in _NUMBER.findall(text)}
        matches = [name for name in names if (parsed := parse_name(name)) and parsed.step in steps]
    return tuple(dict.fromkeys(matches))


def build_name_resolver(root: TreePath, names: Sequence[str]) -> NameResolver:
    """Build a function that maps a name to the entry of *names* with the same inode, or to None.

    A file may have several names: the file system may ignore case or normalize accents, and files
    may be hard links.
    """

    @cache
    def map_inodes() -> Mapping[tuple[int, int], str]:
        return {inode: name for name in names if (inode := _read_inode(root / name))}

    def resolve_name(name: str) -> str | None:
        inode = _read_inode(root / name) if name else None
        return map_inodes().get(inode) if inode else None

    return resolve_name


def is_known_reference(text: str, root: TreePath) -> bool:
    """Return whether a *text* that mentions no checkpoint of *root* can still be interpreted.

    The text may name a missing checkpoint, another entry of the folder, or an existing path
    elsewhere.
    """
    if text in STEPLESS_NAMES or _STEP_LIKE_NAME.fullmatch(text) or has_checkpoint_name(text):
        return True
    parts = [part for part in _split_text(text) if part not in (os.curdir, os.pardir)]
    with suppress(ValueError):
        paths = [*(root / part for part in parts), *([Path(text)] if text.startswith("/") else [])]
        return any(path.exists() if is_url(path) else os.path.lexists(path) for path in paths)
    return False


def has_checkpoint_name(text: str) -> bool:
    """Return whether *text* contains a checkpoint name, even if no such checkpoint exists."""
    return any(
        parse_name(part) or parse_staged_name(part) or is_lightning_last(part)
        for part in _split_text(text)
    )


def _split_text(text: str) -> list[str]:
    """Split a text into path components and quoted strings, without quotes."""
    words = [text, *_QUOTED.findall(text)]
    parts = (part.strip(_STRIPPED_CHARS) for word in words for part in _SEPARATORS.split(word))
    return [part for part in dict.fromkeys(parts) if part][:MAX_TEXT_PARTS]


def _read_inode(path: TreePath) -> tuple[int, int] | None:
    with suppress(OSError, ValueError):
        status = path.lstat()
        return (status.st_dev, status.st_ino) if status.st_ino else None
    return None


# --- targets of links -----------------------------------------------------------------------------


def iterate_link_targets(
    root: TreePath, names: Sequence[str], *, only_nearby: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield the entries of *root* that links resolve to or pass through, with the link as text.

    *names* are the names of the checkpoints. If a folder is too large to search, all of *names* are
    yielded. If *only_nearby* is true, only links directly in *root* and next to it are searched.
    """
    if is_url(root):
        return
    real_root = resolve_links(Path(root))
    folders = () if only_nearby else (*names, *_iterate_other_folders(real_root, names))
    inner_links = ((name, link) for name in folders for link in _iterate_links(real_root, name))
    items = (item for folder in (real_root, real_root.parent) for item in _list_folder(folder))
    nearby_links = (("", Path(item.path)) for item in items if item.is_symlink())
    for folder, link in chain(nearby_links, inner_links):
        if link is None:
            overflow_reason = f"`{folder}`, which has too many entries to search for links"
            yield from ((name, overflow_reason) for name in names)
            continue
        with suppress(OSError, RuntimeError, ValueError):
            # Entries that the link needs: without any one of them it would be broken.
            traversed_parts = (
                at.relative_to(real_root).parts
                for at in _iterate_hops(link)
                if at.is_relative_to(real_root)
            )
            for name in dict.fromkeys(parts[0] for parts in traversed_parts if parts):
                if not link.is_relative_to(real_root / name):
                    yield name, f"the link `{os.path.relpath(link, real_root)}`"


def _iterate_hops(link: Path) -> Iterator[Path]:
    """Yield every path that the operating system visits to resolve *link*.

    The parent folder of *link* must be a resolved path.
    """
    current, pending, hops = link.parent, [link.name], 0
    while pending:
        part = pending.pop(0)
        if part == os.pardir:
            current = current.parent
            continue
        hop = current / part
        yield hop
        if not hop.is_symlink():
            current = hop
            continue
        hops += 1
        if hops > MAX_LINK_HOPS:
            return
        target = hop.readlink()
        current = Path(target.anchor) if target.is_absolute() else current
        pending = [*(word for word in target.parts if word != target.anchor), *pending]


def _iterate_other_folders(root: Path, names: Sequence[str]) -> Iterator[str]:
    """Yield the folders in *root* that are not checkpoints."""
    excluded = {*names, TRASH_FOLDER}
    with suppress(OSError), os.scandir(root) as items:
        for item in items:
            if item.name not in excluded and item.is_dir(follow_symlinks=False):
                yield item.name


def _iterate_links(root: Path, name: str) -> Iterator[Path | None]:
    """Yield the links below the folder *name* of *root*, sorted by path.

    The last value is None if the folder has too many entries to find all links.
    """
    stack = [iter(_list_folder(root / name))]
    for _ in range(MAX_ENTRIES):
        while stack and (item := next(stack[-1], None)) is None:
            stack.pop()
        if not stack or item is None:
            return
        if item.is_symlink():
            yield Path(item.path)
        elif item.is_dir(follow_symlinks=False):
            stack.append(iter(_list_folder(item.path)))
    yield None


def _list_folder(folder: Path | str) -> list[os.DirEntry[str]]:
    """List *folder*, sorted by name, or return an empty list if it is a file or unreadable."""
    try:
        with os.scandir(folder) as items:
            return sorted(items, key=lambda item: item.name)
    except OSError:
        return []


NAMING_PROTECTIONS: tuple[Protection, ...] = (
    *(
        Protection("pointer file", POINTERS[name], name, partial(_claim_pointer, name))
        for name in POINTERS
    ),
    Protection("best checkpoint", "transformers", TRAINER_STATE, _claim_best_of_transformers),
    Protection("best checkpoint", "Lightning", LAST_CHECKPOINT, _claim_best_of_lightning),
)
"""Protections of checkpoints that a file names."""

PROTECTIONS: tuple[Protection, ...] = (
    *NAMING_PROTECTIONS,
    Protection("base of an adapter", "PEFT", ADAPTER_CONFIG, _claim_adapter_bases),
    Protection("base of a delta", "ckptctl", "ckptctl.delta.json", _claim_delta_bases),
    Protection("link to it", "any", "any symbolic link", _claim_link_targets),
    Protection("in use", "CheckpointManager", "none: the running process", _claim_in_use),
    Protection("abandoned branch", "CheckpointManager", RUN_FILE, _claim_abandoned, "left alone"),
    Protection("is a link", "any", "the checkpoint itself", _claim_links, "left alone"),
    Protection("last checkpoint", "Lightning", LAST_CHECKPOINT, _claim_last, "left alone"),
    Protection(
        "unreadable record", "CheckpointManager", RUN_FILE, _claim_unreadable_records, "left alone"
    ),
    Protection(
        "being written", "any", "a lock, or a fresh file", _claim_being_written, "left alone"
    ),
    Protection(
        "no incomplete write", "any", "any of its files", _claim_not_interrupted, "left alone"
    ),
)
"""All protections of checkpoints. They apply under every retention policy.

If a checkpoint is left alone for several reasons, the first in this order is reported.
"""
