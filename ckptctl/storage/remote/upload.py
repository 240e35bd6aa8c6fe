"""Which kind of place a URL names as a destination."""

from __future__ import annotations

from ckptctl.storage.remote import mounts
from ckptctl.storage.remote.destination import Asked, Destination
from ckptctl.storage.remote.urls import HUB, scheme_of


def open_destination(url: str, asked: Asked) -> Destination:
    """Return the place that *url* names.

    Args:
        url: A folder; of a single file the folder that it is going to be in.
        asked: What is asked of it.

    Raises:
        RefusedError: There is something, or another run writes to it.
        UsageError: No file system for it is known or installed.
        StorageError: The place cannot be reached, or does not let us look.
    """
    url = mounts.secret_of(url)
    if scheme_of(url) == HUB:
        from ckptctl.storage.remote.hub_upload import HubDestination

        return HubDestination(url, single=asked.single, overwrite=asked.overwrite)
    from ckptctl.storage.remote.object_upload import ObjectDestination

    return ObjectDestination(url, asked)
