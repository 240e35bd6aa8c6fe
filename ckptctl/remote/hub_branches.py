"""Branches of Hub repositories, as destinations of checkpoints of a run."""

from __future__ import annotations

from typing import Any

from ckptctl.remote.hub import LOGIN_HINT, HubUrl, parse_hub_url, translate_hub_errors
from ckptctl.version import __version__


def create_branch(url: str) -> bool:
    """Create the branch that *url* names from the repository's first commit, unless it exists.

    The first commit has no checkpoint, whereas the default branch may have one.

    Returns:
        Whether the branch was created.
    """
    from huggingface_hub.errors import RevisionNotFoundError

    hub_url = parse_hub_url(url)
    if hub_url.revision is None:
        return False
    api, place = _open_api(), _locate_repository(hub_url)
    with translate_hub_errors(url, "list the repository", LOGIN_HINT):
        try:
            api.repo_info(**place, revision=hub_url.revision)
        except RevisionNotFoundError:
            pass
        else:
            return False
        first = list(api.list_repo_commits(**place))[-1].commit_id
    with translate_hub_errors(url, "create the branch", LOGIN_HINT):
        api.create_branch(**place, branch=hub_url.revision, revision=first, exist_ok=True)
    return True


def read_commit_time_ns(url: str, name: str) -> int:
    """Return the time of the last commit that changed the file *name* in the folder *url*.

    The time is in nanoseconds since the epoch, or 0 if it is unknown.
    """
    hub_url = parse_hub_url(url)
    path = "/".join(filter(None, (hub_url.path, name)))
    with translate_hub_errors(url, f"read the time of `{name}`", LOGIN_HINT):
        infos = _open_api().get_paths_info(
            **_locate_repository(hub_url), paths=[path], revision=hub_url.revision, expand=True
        )
        commit = infos[0].last_commit if infos else None
        return int(commit.date.timestamp() * 1e9) if commit else 0


def _open_api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(library_name="ckptctl", library_version=__version__)


def _locate_repository(hub_url: HubUrl) -> dict[str, str]:
    return {"repo_id": hub_url.repository, "repo_type": hub_url.kind}
