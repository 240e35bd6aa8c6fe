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


def read_commit_time_ns(url: str) -> int:
    """Return the time of the newest commit of the branch that *url* names, in nanoseconds."""
    hub_url = parse_hub_url(url)
    with translate_hub_errors(url, "list the commits", LOGIN_HINT):
        commits = _open_api().list_repo_commits(
            **_locate_repository(hub_url), revision=hub_url.revision
        )
        return int(commits[0].created_at.timestamp() * 1e9)


def _open_api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(library_name="ckptctl", library_version=__version__)


def _locate_repository(hub_url: HubUrl) -> dict[str, str]:
    return {"repo_id": hub_url.repository, "repo_type": hub_url.kind}
