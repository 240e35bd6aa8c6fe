"""Detection and normalization of URLs, conversion of ``file://`` URLs, and masking of secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import quote, unquote, unquote_to_bytes

from ckptctl.errors import UsageError

SCHEME = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]*://")
"""Pattern of a URL scheme, or of a chain of schemes (``zip::s3://``), which is rejected later."""
_CHAINED = re.compile(r"::[A-Za-z][A-Za-z0-9+.-]*://")
LOCAL_SCHEMES = ("file://", "local://")
THIS_MACHINE = ("", "localhost")
HUB_SCHEME = "hf"
HUB_BUCKET_PREFIX = "hf://buckets/"
"""Prefix of URLs of storage buckets of the Hugging Face Hub, which are no repositories."""
HOSTLESS_SCHEMES = ("memory://",)
"""Schemes without a host, for which fsspec treats ``x:///y`` as ``x://y``."""
URL_EXAMPLE = "use a URL such as `hf://ORG/NAME` or `s3://BUCKET/PATH`"
MASK = "***"
WEB_SCHEMES = ("http", "https")
MIN_SECRET_LENGTH = 6
"""Minimum length of a secret that is masked outside of a URL.

A shorter secret may occur by chance in other text.
"""
_PASSWORD_WITH_SLASH = re.compile(r"(?!\[)[^/@:]*:(?!\d*/)[^/@]*/.*@", re.DOTALL)
"""Pattern of a URL whose password contains a slash that should have been ``%2F``."""
_WEB_PASSWORD_WITH_SLASH = re.compile(
    r"(?!\[)[^/?#@:]*:(?!\d*(?:[/?#]|$))[^/?#@]*[/?#].*@", re.DOTALL
)
_CREDENTIALS = re.compile(r"(?<=://)[^\s/@]+@")
_QUERY = re.compile(r"(://(?:[^\s?:]|:(?!//))*+\?)(?!\*{3})\S*[^\s'\")>\],:;.]")
"""Pattern of a URL query in a text.

The queries of all URLs are masked, because clients format the same URL differently.
"""
FSSPEC_PACKAGES = {
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


def to_path_text(path: str | os.PathLike[str]) -> str:
    """Convert a path or URL to a string, or raise if *path* has another type."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        raise UsageError(f"{path!r} is not a path")
    return text


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether *path* is a URL other than ``file://``.

    A path with a colon is not a URL, because ``a:b/c`` has no ``://`` and ``./a://b`` does not
    start with a scheme.
    """
    text = to_path_text(path)
    return SCHEME.match(text) is not None and not normalize_scheme(text).startswith(LOCAL_SCHEMES)


def to_local_path(path: str | os.PathLike[str]) -> str:
    """Convert a ``file://`` URL to a path (RFC 8089), or return a path unchanged.

    The host must be empty or ``localhost``. The path is absolute, and ``%20`` is a space.
    """
    text = os.fspath(path)
    if not SCHEME.match(text):
        return text
    scheme = next(
        (scheme for scheme in LOCAL_SCHEMES if normalize_scheme(text).startswith(scheme)), None
    )
    if scheme is None:
        return text
    host, slash, _ = remainder = text[len(scheme) :].partition("/")
    if host.lower() in THIS_MACHINE and not slash:
        message, hint = "the URL has no path", "use `.` for the working directory"
        raise UsageError(message, where=mask_secrets(text), hint=hint)
    if host.lower() not in THIS_MACHINE:
        message = f"the URL contains a host name after `{scheme}`"
        hint = (
            f"write an absolute path as `{scheme}/folder/name`, or a relative one without "
            f"`{scheme}`"
        )
        raise UsageError(message, where=mask_secrets(text), hint=hint)
    path_bytes = unquote_to_bytes(os.fsencode("".join(remainder[1:])))
    if b"\0" in path_bytes:
        raise UsageError("a path cannot contain the character `%00`", where=mask_secrets(text))
    return os.fsdecode(path_bytes)


def normalize_scheme(url: str) -> str:
    """Convert the scheme of *url* to lower case (RFC 3986, section 3.1)."""
    match = SCHEME.match(url)
    return match[0].lower() + url[match.end() :] if match else url


def normalize_url(url: str) -> str:
    """Normalize the scheme and trailing slashes of *url*, or raise if a component is empty."""
    scheme, _, address, query = _split_url(url)
    host, *folders = address.rstrip("/").removeprefix("/" * (scheme in HOSTLESS_SCHEMES)).split("/")
    if not address.rstrip("/"):
        raise UsageError(
            f"the URL is empty after `{scheme}`", where=mask_secrets(url), hint=URL_EXAMPLE
        )
    if not host:
        message = f"the URL has no name between `{scheme}` and the next `/`"
        hint = "add the name of a host, bucket or organization"
        raise UsageError(message, where=mask_secrets(url), hint=hint)
    if "" in folders and not _CHAINED.search(url):  # opening a chained URL raises
        message, hint = "the URL contains an empty path component", "write a single `/`"
        raise UsageError(message, where=mask_secrets(url), hint=hint)
    return normalize_scheme(url.removesuffix(query)).rstrip("/") + query


def parse_scheme(url: str) -> str:
    """Return the scheme of *url* in lower case, or an empty string if it has none.

    The result is the last scheme of a chain such as ``zip::s3://``.
    """
    match = SCHEME.match(url)
    return match[0].removesuffix("://").rpartition("::")[2].lower() if match else ""


def mask_secrets(url: str) -> str:
    """Mask the credentials of *url* and remove its query, so that messages can show the URL."""
    scheme, user, address, _ = _split_url(url)
    return f"{scheme}{MASK}@{address}" if user else scheme + address


def split_query(url: str) -> tuple[str, str]:
    """Split a web URL into its address and its query, including the ``?``.

    The query of any other URL is empty.
    """
    query = _split_url(url).query
    return url.removesuffix(query), query


def extract_secrets(url: str) -> tuple[str, str]:
    """Return credentials and query of *url*, as empty strings if the URL has none."""
    _, user, _, query = _split_url(url)
    return user, query


def hide_secrets(text: str, url: str) -> str:
    """Mask the secrets of *url*, such as a password or a signed query, wherever *text* has them."""
    user, query = extract_secrets(url)
    if user and user != MASK:
        for spelling in _iterate_spellings(user):
            text = re.sub(rf"(?<!\w){re.escape(spelling)}@", f"{MASK}@", text)
        text = _CREDENTIALS.sub(f"{MASK}@", text)
        name, colon, password = user.partition(":")
        if colon:
            text = _hide_word(text, user, 0)
        text = _hide_word(text, password if colon else name)
    if query.removeprefix("?"):
        for spelling in _iterate_spellings(query):
            text = text.replace(spelling, f"?{MASK}")
        text = _hide_word(_QUERY.sub(rf"\1{MASK}", text), query[1:])
    return text


def build_install_hint(scheme: str) -> str:
    """Build the hint to install the fsspec package that supports URLs of *scheme*."""
    package = FSSPEC_PACKAGES.get(scheme)
    if package is None:
        return "install the fsspec package for this scheme"
    return f"run `pip install {package}`"


class _UrlParts(NamedTuple):
    """Components of a URL.

    Attributes:
        scheme: Scheme with ``://``, in lower case.
        user: Credentials before the ``@``, or empty if they are not secret.
        address: Host and path.
        query: Query of a web URL including its ``?``, or empty for other URLs.
    """

    scheme: str
    user: str
    address: str
    query: str


def is_hub_repository(url: str) -> bool:
    """Return whether *url* is a repository of the Hugging Face Hub, and not a bucket."""
    return parse_scheme(url) == HUB_SCHEME and not is_hub_bucket(url)


def is_hub_bucket(url: str) -> bool:
    """Return whether *url* is a bucket of the Hugging Face Hub, or a path in one."""
    return f"{normalize_scheme(url).rstrip('/')}/".startswith(HUB_BUCKET_PREFIX)


def _split_url(url: str) -> _UrlParts:
    match = SCHEME.match(url)
    if match is None:
        return _UrlParts("", "", url, "")
    remainder, web = url[match.end() :], parse_scheme(url) in WEB_SCHEMES
    with_slash = _WEB_PASSWORD_WITH_SLASH if web else _PASSWORD_WITH_SLASH
    authority = re.split("[/?#]" if web else "/", remainder, maxsplit=1)[0]
    user, sign, _ = (remainder if with_slash.match(remainder) else authority).rpartition("@")
    # A name without password may be a token, unless it is a login name.
    is_secret = ":" in user or web or parse_scheme(url) == HUB_SCHEME or user == MASK
    if not user or not is_secret:
        user = sign = ""
    remainder = remainder[len(user + sign) :]
    address = remainder.partition("?")[0] if web else remainder
    return _UrlParts(match[0].lower(), user, address, remainder[len(address) :])


def _hide_word(text: str, secret: str, min_length: int = MIN_SECRET_LENGTH) -> str:
    """Mask *secret* in *text* as a complete word, if it has at least *min_length* characters."""
    for spelling in _iterate_spellings(secret):
        if len(spelling) >= min_length:
            left_boundary, right_boundary = (
                r"(?<!\w)" * spelling[0].isalnum(),
                r"(?!\w)" * spelling[-1].isalnum(),
            )
            text = re.sub(left_boundary + re.escape(spelling) + right_boundary, MASK, text)
    return text


def _iterate_spellings(secret: str) -> Iterator[str]:
    """Yield *secret* unchanged, percent-encoded and percent-decoded, longest variant first."""
    yield from sorted(filter(None, {secret, unquote(secret), quote(secret)}), key=len, reverse=True)
