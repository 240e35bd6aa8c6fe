"""Look at the installation, the plug-ins, a directory and what surrounds the program.

torch is not imported, nothing is changed and nothing is left behind. What is found is ``ok``;
``warn``: something is slower, or cannot be done here; ``fail``: something is broken.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckptctl.errors import SourceNotFoundError
from ckptctl.ops.doctor.check import Check
from ckptctl.storage.destinations import require_path
from ckptctl.storage.paths import path_hint


def doctor(directory: Path) -> tuple[Check, ...]:
    """Return everything that was looked at, by group.

    Args:
        directory: Where checkpoints are, or will be.

    Raises:
        SourceNotFoundError: It is no directory.
        UsageError: It is a URL.
    """
    require_path(directory)
    place = directory.expanduser().absolute()
    if not place.is_dir():
        raise SourceNotFoundError("no such directory", where=str(directory), hint=path_hint(place))
    return tuple(_checks(place))


def _checks(place: Path) -> Iterator[Check]:
    from ckptctl.ops.doctor import file_system, installation, plugins, surroundings

    yield from installation.checks()
    yield from plugins.checks()
    yield from file_system.checks(place)
    yield from surroundings.checks()
