"""URLs as paths: detection, local ``file://`` URLs, and masking of secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import quote, unquote, unquote_to_bytes

from ckptctl.errors import UsageError

SCHEME = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]*://")
"""A scheme, including fsspec's chained ones, which are rejected later."""
_CHAINED = re.compile(r"::[A-Za-z][A-Za-z0-9+.-]*://")
LOCAL = ("file://", "local://")
THIS_MACHINE = ("", "localhost")
HUB = "hf"
WITHOUT_HOST = ("memory://",)
"""Schemes for which fsspec treats ``x:///y`` as ``x://y``."""
EXAMPLE = "use a URL such as `hf://ORG/NAME` or `s3://BUCKET/PATH`"
HIDDEN = "***"
WEB = ("http", "https")
ALONE = 6
"""Shortest secret that is masked outside of a URL; shorter ones are parts of words."""
_PASSWORD_WITH_SLASH = re.compile(r"(?!\[)[^/@:]*:(?!\d*/)[^/@]*/.*@", re.DOTALL)
"""A colon without a port, and an ``@`` after a slash that should have been ``%2F``."""
_WEB_PASSWORD_WITH_SLASH = re.compile(
    r"(?!\[)[^/?#@:]*:(?!\d*(?:[/?#]|$))[^/?#@]*[/?#].*@", re.DOTALL
)
_CREDENTIALS = re.compile(r"(?<=://)[^\s/@]+@")
_QUERY = re.compile(r"(://(?:[^\s?:]|:(?!//))*+\?)(?!\*{3})\S*[^\s'\")>\],:;.]")
"""Query of any URL in a text, because clients spell URLs differently."""
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "http": "aiohttp",
    "https": "aiohttp",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "sftp": "paramiko",
    "ssh": "paramiko",
}


def path_text(path: str | os.PathLike[str]) -> str:
    """Convert a path or URL to text, or raise for other types."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        raise UsageError(f"{path!r} is not a path")
    return text


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether *path* is a URL other than ``file://``.

    A path with a colon is not: ``a:b/c`` has no ``://``, and ``./a://b`` does not begin with it.
    """
    text = path_text(path)
    return SCHEME.match(text) is not None and not normal(text).startswith(LOCAL)


def local_path(path: str | os.PathLike[str]) -> str:
    """Convert a ``file://`` URL to a path (RFC 8089), leaving paths unchanged.

    The host is empty or ``localhost``, the path absolute, and ``%20`` a space.
    """
    text = os.fspath(path)
    if not SCHEME.match(text):
        return text
    scheme = next((scheme for scheme in LOCAL if normal(text).startswith(scheme)), None)
    if scheme is None:
        return text
    host, slash, _ = rest = text[len(scheme) :].partition("/")
    if host.lower() in THIS_MACHINE and not slash:
        what, hint = "the URL has no path", "use `.` for the working directory"
        raise UsageError(what, where=masked(text), hint=hint)
    if host.lower() not in THIS_MACHINE:
        what = f"the URL contains a host name after `{scheme}`"
        hint = (
            f"write an absolute path as `{scheme}/folder/name`, or a relative one without "
            f"`{scheme}`"
        )
        raise UsageError(what, where=masked(text), hint=hint)
    found = unquote_to_bytes(os.fsencode("".join(rest[1:])))
    if b"\0" in found:
        raise UsageError("a path cannot contain the character `%00`", where=masked(text))
    return os.fsdecode(found)


def normal(url: str) -> str:
    """Convert the scheme of *url* to lower case (RFC 3986, section 3.1)."""
    found = SCHEME.match(url)
    return found[0].lower() + url[found.end() :] if found else url


def tidy(url: str) -> str:
    """Normalize the scheme and trailing slashes of *url*, or raise if a component is empty."""
    scheme, _, rest, query = _parts(url)
    host, *folders = rest.rstrip("/").removeprefix("/" * (scheme in WITHOUT_HOST)).split("/")
    if not rest.rstrip("/"):
        raise UsageError(f"the URL is empty after `{scheme}`", where=masked(url), hint=EXAMPLE)
    if not host:
        what = f"the URL has no name between `{scheme}` and the next `/`"
        hint = "add the name of a host, bucket or organization"
        raise UsageError(what, where=masked(url), hint=hint)
    if "" in folders and not _CHAINED.search(url):  # opening a chained URL raises
        what, hint = "the URL contains an empty path component", "write a single `/`"
        raise UsageError(what, where=masked(url), hint=hint)
    return normal(url.removesuffix(query)).rstrip("/") + query


def scheme_of(url: str) -> str:
    """Return the last scheme of *url* in lower case, or an empty string."""
    found = SCHEME.match(url)
    return found[0].removesuffix("://").rpartition("::")[2].lower() if found else ""


def masked(url: str) -> str:
    """Mask passwords and remove the query of *url*, so that it can be shown."""
    scheme, user, rest, _ = _parts(url)
    return f"{scheme}{HIDDEN}@{rest}" if user else scheme + rest


def without_query(url: str) -> tuple[str, str]:
    """Split a web URL into address and query including ``?`` (empty for other URLs)."""
    query = _parts(url).query
    return url.removesuffix(query), query


def secrets(url: str) -> tuple[str, str]:
    """Return the credentials and the query of *url*, empty if it has none."""
    _, user, _, query = _parts(url)
    return user, query


def hide(text: str, url: str) -> str:
    """Mask the secrets of *url* (a password, a signed query) in *text*."""
    user, query = secrets(url)
    if user and user != HIDDEN:
        for one in _spellings(user):
            text = re.sub(rf"(?<!\w){re.escape(one)}@", f"{HIDDEN}@", text)
        text = _CREDENTIALS.sub(f"{HIDDEN}@", text)
        name, colon, password = user.partition(":")
        if colon:
            text = _hide_word(text, user, 0)
        text = _hide_word(text, password if colon else name)
    if query.removeprefix("?"):
        for one in _spellings(query):
            text = text.replace(one, f"?{HIDDEN}")
        text = _hide_word(_QUERY.sub(rf"\1{HIDDEN}", text), query[1:])
    return text


def install_hint(scheme: str) -> str:
    """Return a hint on installing the file system package of a scheme."""
    package = PACKAGES.get(scheme)
    if package is None:
        return "install the fsspec package for this scheme"
    return f"run `pip install {package}`"


class _UrlParts(NamedTuple):
    """Components of a URL.

    Attributes:
        scheme: Scheme with ``://``, in lower case.
        user: Credentials before the ``@``, if they are secret.
        rest: Host and path.
        query: Query of a web URL, with its ``?``.
    """

    scheme: str
    user: str
    rest: str
    query: str


def _parts(url: str) -> _UrlParts:
    found = SCHEME.match(url)
    if found is None:
        return _UrlParts("", "", url, "")
    rest, web = url[found.end() :], scheme_of(url) in WEB
    with_slash = _WEB_PASSWORD_WITH_SLASH if web else _PASSWORD_WITH_SLASH
    authority = re.split("[/?#]" if web else "/", rest, maxsplit=1)[0]
    user, sign, _ = (rest if with_slash.match(rest) else authority).rpartition("@")
    # A name without password may be a token, unless it is a login name.
    secret = ":" in user or web or scheme_of(url) == HUB or user == HIDDEN
    if not user or not secret:
        user = sign = ""
    rest = rest[len(user + sign) :]
    plain = rest.partition("?")[0] if web else rest
    return _UrlParts(found[0].lower(), user, plain, rest[len(plain) :])


def _hide_word(text: str, secret: str, least: int = ALONE) -> str:
    """Mask *secret* in *text* as a complete word, if it has at least *least* characters."""
    for one in _spellings(secret):
        if len(one) >= least:
            before, behind = r"(?<!\w)" * one[0].isalnum(), r"(?!\w)" * one[-1].isalnum()
            text = re.sub(before + re.escape(one) + behind, HIDDEN, text)
    return text


def _spellings(secret: str) -> Iterator[str]:
    """Yield *secret* as it is, and percent-encoded and decoded."""
    yield from sorted(filter(None, {secret, unquote(secret), quote(secret)}), key=len, reverse=True)
