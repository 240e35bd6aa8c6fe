"""URLs where a path may stand: what is one, what is a name with a colon, what must not be shown."""

from __future__ import annotations

import os
import re

SCHEME = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]*://")
"""With those that fsspec would chain, which are refused."""
LOCAL = ("file://", "local://")
HUB = "hf"
WITHOUT_HOST = ("memory",)
"""Schemes of which fsspec takes `x:///y` for `x://y`."""
HIDDEN = "***"
WEB = ("http", "https")
_PASSWORD_WITH_SLASH = re.compile(r"[^/@:]*:(?!\d*/)[^/@]*/.*@")
"""A colon that no port follows, and an ``@`` behind a slash that should have been ``%2F``."""
PACKAGES = {
    "s3": "ckptctl[s3]",
    "s3a": "ckptctl[s3]",
    "gs": "ckptctl[gcs]",
    "gcs": "ckptctl[gcs]",
    "http": "aiohttp",
    "https": "aiohttp",
    "abfs": "adlfs",
    "az": "adlfs",
    "sftp": "paramiko",
    "ssh": "paramiko",
}


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether *path* is a URL that is no path of this machine.

    A path with a colon is none: ``a:b/c`` has no ``://``, and ``./a://b`` does not begin with it.
    """
    text = normal(os.fspath(path))
    return SCHEME.match(text) is not None and not text.startswith(LOCAL)


def local_path(path: str | os.PathLike[str]) -> str:
    """Return *path* without the scheme of local files."""
    text = os.fspath(path)
    found = next((scheme for scheme in LOCAL if normal(text).startswith(scheme)), "")
    return text[len(found) :]


def normal(url: str) -> str:
    """Return *url* with its scheme in lower case, which RFC 3986 (3.1) has for all spellings."""
    found = SCHEME.match(url)
    return found[0].lower() + url[found.end() :] if found else url


def scheme_of(url: str) -> str:
    """Return what stands before ``://``, in lower case, less what it is chained to."""
    return url.partition("://")[0].rpartition("::")[2].lower()


def masked(url: str) -> str:
    """Return *url* without passwords and without the query that signs it, as it may be shown."""
    return hide(normal(without_query(url)[0]), url)


def without_query(url: str) -> tuple[str, str]:
    """Return a web address without its query, and that with its mark; others have none."""
    if scheme_of(url) not in WEB:
        return url, ""
    plain, mark, query = url.partition("?")
    return plain, mark + query


def hide(text: str, url: str) -> str:
    """Return *text* without what is secret in *url*: a password, the query that signs it."""
    for secret in _secrets(url):
        text = text.replace(secret, HIDDEN)
    return text


def install_hint(scheme: str) -> str:
    """Return how to get the file system of a scheme."""
    package = PACKAGES.get(scheme)
    if package is None:
        return "install the fsspec package for it; `ckptctl` reads what fsspec knows"
    return f"`pip install '{package}'`"


def _secrets(url: str) -> list[str]:
    rest = url.partition("://")[2]
    host = rest.partition("/")[0]
    if _PASSWORD_WITH_SLASH.match(rest):
        host = rest
    user, sign, _ = host.rpartition("@")
    # Without a password the name may be a token, where it is not the login of a machine.
    secret = ":" in user or scheme_of(url) in (*WEB, HUB)
    found = [user.partition(":")[2], user] if sign and secret else []
    found.append(without_query(url)[1].removeprefix("?"))
    return sorted(filter(None, found), key=len, reverse=True)
