"""Names, blocks and trees behind URLs, and that nothing gets at their bytes another way."""

from __future__ import annotations

import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import fsspec
import pytest

from ckptctl.errors import (
    DamagedError,
    SourceNotFoundError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from ckptctl.remote.blocks import BLOCK_BYTES, MAX_REQUEST_BLOCKS, BlockCache
from ckptctl.remote.hub import parse_hub_url
from ckptctl.remote.store import FsspecStore
from ckptctl.remote.trees import CachedTree, RemoteTree
from ckptctl.storage.files import source_files
from ckptctl.storage.paths import parse_path, resolve_source_path
from ckptctl.storage.urls import hide_secrets, is_url, mask_secrets, to_local_path
from ckptctl.tree import TreeEntry, UrlPath

MEMORY = fsspec.filesystem("memory")


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A folder in memory: two files, and one in a folder."""
    root = f"/{tmp_path.name}"
    MEMORY.pipe_file(f"{root}/a.bin", bytes(range(256)) * 4)
    MEMORY.pipe_file(f"{root}/empty", b"")
    MEMORY.pipe_file(f"{root}/sub/b.json", b"{}")
    return f"memory:/{root}"


def _served(store: FsspecStore) -> UrlPath:
    """Return the path of a store, as if that was found behind its URL."""
    place = RemoteTree(store.url)
    place._trees[store.url] = CachedTree(store)
    return UrlPath(place, store.url)


# Names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://b/x", True),
        ("hf://org/name@main/sub", True),
        ("a:b", False),
        ("epoch=1-step=2.ckpt", False),
        ("./odd://name", False),
        ("c:/windows", False),
        ("file:///tmp/x", False),
        ("local:///tmp/x", False),
        ("File:///tmp/x", False),
        ("S3://b/x", True),
        ("zip::s3://b/x", True),
        ("a::b", False),
        ("/abs/s3://b", False),
    ],
)
def test_url_is_recognized_by_scheme(text: str, expected: bool) -> None:
    assert is_url(text) is expected
    assert isinstance(parse_path(text), UrlPath) is expected


def test_colon_in_local_name_is_not_a_url(tmp_path: Path) -> None:
    (tmp_path / "a:b").mkdir()
    (tmp_path / "a:b/x.json").write_text("{}")
    with source_files(tmp_path / "a:b") as files:
        assert files.local and files.read("x.json", 0, 2) == b"{}"
    assert resolve_source_path(tmp_path / "a:b").is_dir()
    for scheme in ("file", "FILE", "local"):
        assert to_local_path(f"{scheme}://{tmp_path}") == str(tmp_path)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:hunter2@host/x", "https://***@host/x"),
        ("https://token@host/y", "https://***@host/y"),
        ("https://host/x?X-Amz-Signature=abc", "https://host/x"),
        ("s3://bucket/x?y", "s3://bucket/x?y"),
        ("sftp://user@host/x", "sftp://user@host/x"),
        ("hf://org/name@main", "hf://org/name@main"),
        ("hf://hf_token@org/name@main/x", "hf://***@org/name@main/x"),
        ("hf://me:hunter2@org/name", "hf://***@org/name"),
        ("s3://AKIA:hun/ter/2@bucket/x@y", "s3://***@y"),
        ("https://host:8080/x@y", "https://host:8080/x@y"),
        ("s3://bucket/a:b@c", "s3://bucket/a:b@c"),
        ("zip::https://token@host/y", "zip::https://***@host/y"),
    ],
)
def test_url_secrets_are_masked(url: str, shown: str) -> None:
    path = parse_path(url)
    assert isinstance(path, UrlPath)
    assert mask_secrets(url) == str(path) == os.fspath(path) == shown
    assert repr(path) == f"UrlPath({shown!r})"
    assert path.tree.add_credentials(shown) == url
    assert path.tree.add_credentials(str(path / "sub")).replace("/sub", "") == url
    again: UrlPath = pickle.loads(pickle.dumps(path))
    assert again == path and again.tree.add_credentials(again.url) == url


def test_uppercase_url_scheme_is_normalized(url: str) -> None:
    loud = url.replace("memory", "MEMory")
    assert is_url(loud) and str(parse_path(loud)) == str(resolve_source_path(loud)) == url
    with source_files(parse_path(loud)) as files:
        assert files.size("a.bin") == 1024
    assert FsspecStore(loud).list_members("") and parse_hub_url("HF://o/n") == parse_hub_url(
        "hf://o/n"
    )
    assert mask_secrets("HTTPS://user:hunter2@Host/X?signed=1") == "https://***@Host/X"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("https://host/m?v=1", "https://host/m?v=2"),
        ("https://host/m?v=1", "https://host/m"),
        ("https://a:pw@host/m", "https://b:pw@host/m"),
        ("s3://k:s@bucket/a", "s3://bucket/a"),
    ],
)
def test_urls_with_different_secrets_are_unequal(one: str, other: str) -> None:
    assert parse_path(one) == parse_path(one) != parse_path(other)
    assert (
        parse_path(parse_path(one)) == parse_path(one)
        and len({parse_path(one), parse_path(one), parse_path(other)}) == 2
    )
    assert parse_path(one).parent / "n" != parse_path(other).parent / "n"


def test_trailing_slash_of_signature_is_kept() -> None:
    for url in ("https://host/end/x/?sig=5eC/", "https://host/end/x?sig=5eC/"):
        path = parse_path(url)
        assert isinstance(path, UrlPath)
        assert path.tree.add_credentials(path.url) == "https://host/end/x?sig=5eC/"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://u:p@H/priv/m.safetensors", "http://***@H/priv/m.safetensors"),
        ("http://user:safetensors@H/m.safetensors", "http://***@H/m.safetensors"),
        ("s3://k:s@bkt/both", "s3://***@bkt/both"),
        ("https://t@host/t?t=t", "https://***@host/t"),
        ("https://u:a?b@host/x?c@d", "https://***@d"),
        ("https://u:a?b@host/x", "https://***@host/x"),
        ("https://[::1]:8080/x@y", "https://[::1]:8080/x@y"),
        ("https://host?mail=a@b", "https://host"),
        ("https://host:80?mail=a@b", "https://host:80"),
        ("https://***@host/x", "https://***@host/x"),
        ("/a:b@c/d?e", "/a:b@c/d?e"),
    ],
)
def test_only_secret_parts_of_url_are_masked(url: str, shown: str) -> None:
    assert mask_secrets(url) == shown


@pytest.mark.parametrize(
    ("url", "text", "expected"),
    [
        (
            "https://user:hunter2@host/x?sig=5eC",
            "cannot read https://user:hunter2@host/x?sig=5eC: hunter2",
            "cannot read https://***@host/x?***: ***",
        ),
        (
            "https://u:e@host/x",
            "ClientError: u:e@host, https://u:e@h",
            "ClientError: ***@host, https://***@h",
        ),
        ("https://u:hunter2@host", "hunter2, hunter20, u:hunter2", "***, hunter20, ***"),
        ("https://hunter2@host", "no hunter2 here", "no *** here"),
        ("https://u:p@host", "the upper map of u:p", "the upper map of ***"),
        ("https://u:a%2Fb%20c1@host", "a/b c1 and a%2Fb%20c1", "*** and ***"),
        (
            "https://h/x?sig=a%2Fb",
            "at (https://h/x?sig=a/b), sig=a%2Fb.",
            "at (https://h/x?***), ***.",
        ),
        ("https://h/x?v=1", "v=1: see https://o/y?w=2 'v=1'", "v=1: see https://o/y?*** 'v=1'"),
        ("https://h/x?", "why? nothing", "why? nothing"),
        ("s3://b/x?y", "b/x?y", "b/x?y"),
    ],
)
def test_secrets_are_hidden_in_error_text(url: str, text: str, expected: str) -> None:
    assert hide_secrets(text, url) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://o/n", ("model", "o/n", None, "")),
        ("hf://o/n/sub/x", ("model", "o/n", None, "sub/x")),
        ("hf://o/n@v1/sub", ("model", "o/n", "v1", "sub")),
        ("hf://o/n@refs/pr/3/sub", ("model", "o/n", "refs/pr/3", "sub")),
        ("hf://o/n@feature%2Fx", ("model", "o/n", "feature/x", "")),
        ("hf://datasets/o/n", ("dataset", "o/n", None, "")),
        ("hf://models/o/n", ("model", "o/n", None, "")),
    ],
)
def test_hub_urls_parse_like_huggingface_hub(text: str, expected: tuple[str, ...]) -> None:
    from huggingface_hub.utils import _hf_uris  # the client's own reading of such URLs

    found = parse_hub_url(text)
    assert (found.kind, found.repository, found.revision, found.path) == expected
    theirs = _hf_uris.parse_hf_uri(text)
    assert (theirs.type, theirs.id, theirs.revision, theirs.path_in_repo) == expected
    assert parse_hub_url(str(found)) == found


@pytest.mark.parametrize(
    "text",
    [
        "hf://",
        "hf://name",
        "hf://a@b/c",
        "hf://a b/c",
        "hf://a/b#main",
        "hf://a/b?x=1",
        "hf://日/b",
    ],
)
def test_invalid_hub_url_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="not a Hub repository"):
        parse_hub_url(text)


@pytest.mark.parametrize("text", ["nosuch://x/y", "simplecache::memory://x"])
def test_unsupported_url_scheme_is_an_error(text: str) -> None:
    with pytest.raises(UsageError if is_url(text) else SourceNotFoundError):
        path = resolve_source_path(text)
        if not path.exists():
            raise SourceNotFoundError("not a URL")


# Paths


@pytest.mark.parametrize("text", ["hdfs:///a/b", "S3:///bucket/a", "hf:///org/name"])
def test_url_without_host_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="no name between"):
        parse_path(text)
    assert str(parse_path("memory:///a/b")) == "memory://a/b"


@pytest.mark.parametrize(
    "text", ["s3://b/dt//q", "s3://b//q/", "https://h//x?a//b", "hf://o/n//x", "memory:///a//b"]
)
def test_empty_url_path_component_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="empty path component"):
        parse_path(text)
    with pytest.raises(UsageError, match="empty path component"):
        resolve_source_path(text)


def test_trailing_slashes_are_dropped_and_chained_urls_refused() -> None:
    for text in ("s3://b/q", "s3://b/q/", "s3://b/q///", "https://h/x//?a//b", "s3://k:a//b@b/q"):
        assert "//" not in str(parse_path(text)).partition("://")[2]
    with pytest.raises(UsageError, match="chained"):
        resolve_source_path("zip://a.zip::s3://bucket/x")


@pytest.mark.parametrize(
    "text", ["s3://", "hf://", "S3:///", "memory://", "http://u:p@", "gs:////"]
)
def test_empty_url_is_a_usage_error(text: str) -> None:
    for call in (parse_path, resolve_source_path):
        with pytest.raises(UsageError, match="the URL is empty") as caught:
            call(text)
        assert caught.value.where == mask_secrets(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("file:///tmp/x", "/tmp/x"),
        ("File://localhost/tmp/x", "/tmp/x"),
        ("local://LocalHost/tmp/x", "/tmp/x"),
        ("file:///tmp/a%20b%25", "/tmp/a b%"),
        ("file:///tmp/100%", "/tmp/100%"),
        ("file:///tmp/ü?#", "/tmp/ü?#"),
        ("file:/tmp/x", "file:/tmp/x"),
        ("a%20b", "a%20b"),
        ("", ""),
    ],
)
def test_local_urls_become_local_paths(text: str, expected: str) -> None:
    assert to_local_path(text) == expected
    assert parse_path(text) == resolve_source_path(text) == Path(expected)
    odd = Path(os.fsdecode(b"/tmp/\xff %20"))
    assert (
        to_local_path(odd.as_uri())
        == to_local_path(f"file://{odd.parent}/\udcff %2520")
        == str(odd)
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("file://", "no path"),
        ("local://", "no path"),
        ("FILE://localhost", "no path"),
        ("file://x/y", "contains a host name"),
        ("file://./y", "contains a host name"),
        ("file://u:pw@x/y", "contains a host name"),
        ("file:///a%00b", "a path cannot contain"),
    ],
)
def test_invalid_file_url_is_a_usage_error(text: str, said: str) -> None:
    for call in (to_local_path, parse_path, resolve_source_path):
        with pytest.raises(UsageError, match=said) as caught:
            call(text)
        assert "pw" not in f"{caught.value.to_json()}"


def test_url_path_behaves_like_pathlib(url: str) -> None:
    path = resolve_source_path(url)
    assert path.is_dir() and not path.is_file() and path.exists()
    assert sorted(item.name for item in path.iterdir()) == ["a.bin", "empty", "sub"]
    assert [item.name for item in path.glob("*.bin")] == ["a.bin"]
    assert [str(item) for item in path.rglob("*.json")] == [f"{url}/sub/b.json"]
    assert (path / "a.bin").stat().st_size == 1024 and (path / "sub").is_dir()
    assert not (path / "nothing").exists() and not (path / "nothing/below").exists()
    assert not list((path / "nothing").iterdir())
    assert (path / "sub/b.json").read_text() == "{}"
    assert (path / "a.bin").read_bytes() == bytes(range(256)) * 4
    assert (path / "sub").parent == path and str(path / "sub") == f"{url}/sub"
    assert str((path / "sub/b.json").relative_to(path)) == "sub/b.json"
    assert path.resolve() == path.absolute() == path.expanduser() == path
    with pytest.raises(FileNotFoundError):
        (path / "nothing").stat()


def test_url_of_file_has_parent_with_siblings(url: str) -> None:
    path = resolve_source_path(f"{url}/a.bin")
    assert path.is_file() and path.stat().st_size == 1024
    assert (path.parent / "empty").is_file()
    assert sorted(item.name for item in path.parent.iterdir()) == ["a.bin", "empty", "sub"]


def test_missing_url_is_source_not_found(url: str) -> None:
    with pytest.raises(SourceNotFoundError, match="nothing"):
        resolve_source_path(f"{url}/nothing")


def test_parent_path_component_is_unsupported(url: str) -> None:
    with source_files(resolve_source_path(f"{url}/sub")) as files, pytest.raises(UnsupportedError):
        files.read("../a.bin", 0, 4)


# Nothing gets at the bytes another way


def test_direct_file_access_to_url_path_fails(url: str) -> None:
    """There is nothing on the disk that could be taken for data: not a file, not zeros."""
    path = resolve_source_path(url) / "a.bin"
    for text in (path, str(path), os.fspath(path)):
        with pytest.raises(FileNotFoundError):
            os.open(text, os.O_RDONLY)
        with pytest.raises(FileNotFoundError):
            os.stat(text)
        with pytest.raises(FileNotFoundError), open(text, "rb"):
            pass
    # A path made of the text is one of this machine, where there is no such thing.
    assert not Path(str(path)).exists()
    with source_files(path.parent) as files:
        assert not files.local
        with pytest.raises(StorageError, match="is remote"):
            files.open_descriptor("a.bin")
    with pytest.raises(OSError, match="Read-only"):
        path.open("wb")


# Files


def test_remote_reads_match_content_and_bounds(url: str) -> None:
    content = bytes(range(256)) * 4
    with source_files(parse_path(url)) as files:
        assert not files.local and files.root == parse_path(url)
        assert files.size("a.bin") == 1024 and files.size("empty") == 0
        assert files.read("a.bin", 0, 1024) == content
        assert files.read("a.bin", 1000, 24) == content[1000:]
        assert files.read("empty", 0, 0) == b""
        views = [memoryview(bytearray(size)) for size in (1, 0, 700, 3)]
        files.readv("a.bin", views, 5)
        assert b"".join(views) == content[5:709]
        for offset, nbytes in ((1000, 25), (1025, 1), (-1, 4)):
            with pytest.raises(DamagedError, match="truncated"):
                files.read("a.bin", offset, nbytes)
        with pytest.raises(SourceNotFoundError):
            files.read("nothing", 0, 1)
        with pytest.raises(UnsupportedError, match="regular"):
            files.size("sub")


def test_long_reads_are_split_into_bounded_requests(tmp_path: Path) -> None:
    content = os.urandom(20 << 20)
    MEMORY.pipe_file(f"/{tmp_path.name}/big", content)
    url = f"memory://{tmp_path.name}"
    asked: list[int] = []

    class Counting(FsspecStore):
        def read_range(self, name: str, version: str, start: int, stop: int) -> bytes | bytearray:
            asked.append(stop - start)
            return super().read_range(name, version, start, stop)

    with source_files(_served(Counting(url))) as files:
        views = [memoryview(bytearray(size)) for size in (1, 9 << 20, (11 << 20) - 1)]
        files.readv("big", views, 0)
    assert b"".join(views) == content
    assert max(asked) <= MAX_REQUEST_BLOCKS * BLOCK_BYTES and sum(asked) == len(content)


def test_short_remote_read_is_damaged(url: str, tmp_path: Path) -> None:
    class Short(FsspecStore):
        def read_range(self, name: str, version: str, start: int, stop: int) -> bytes | bytearray:
            return super().read_range(name, version, start, stop)[:-1]

    with source_files(_served(Short(url))) as files, pytest.raises(DamagedError, match="truncated"):
        files.read("a.bin", 0, 1024)


def test_store_without_range_support_is_an_error(url: str) -> None:
    class Whole(FsspecStore):
        def read_range(self, name: str, version: str, start: int, stop: int) -> bytes | bytearray:
            return super().read_range(name, version, 0, 1024) * 2

    with (
        source_files(_served(Whole(url))) as files,
        pytest.raises(StorageError, match="range requests"),
    ):
        files.read("a.bin", 0, 10)


def test_changed_remote_file_has_new_identity(url: str) -> None:
    with source_files(parse_path(url)) as files:
        before = files.read_identity("a.bin")
        assert files.read_identity("a.bin") == before
        time.sleep(0.01)
        MEMORY.pipe_file(
            f"{str(resolve_source_path(url)).removeprefix('memory:/')}/a.bin", b"x" * 1024
        )
        files.drop_metadata()
        assert files.read_identity("a.bin") != before
        assert files.read("a.bin", 0, 4) == b"xxxx"


def test_tree_lookup_lists_each_folder_once(url: str) -> None:
    asked: list[str] = []

    class Counting(FsspecStore):
        def list_members(self, folder: str) -> list[TreeEntry]:
            asked.append(folder)
            return super().list_members(folder)

    tree = CachedTree(Counting(url))
    for name in ("a.bin", "empty", "nothing", "sub", "nothing/deep/er", "a.bin/x"):
        tree.find_entry(name)
    assert asked == [""]
    tree.find_entry("sub/b.json")
    assert asked == ["", "sub"]


# Blocks


def test_read_ahead_doubles_only_for_sequential_reads() -> None:
    blocks, asked = BlockCache(), []
    size = 64 * BLOCK_BYTES

    def fetch(start: int, stop: int) -> bytes:
        asked.append((start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)))
        return bytes(stop - start)

    for offset in range(0, 16 * BLOCK_BYTES, BLOCK_BYTES):
        assert len(blocks.read_range("a", size, offset, BLOCK_BYTES, fetch)) == BLOCK_BYTES
    assert asked == [(0, 1), (1, 3), (3, 7), (7, 15), (15, 31)]
    assert MAX_REQUEST_BLOCKS == 31 - 15
    asked.clear()
    for number in (60, 50, 40):
        blocks.read_range("a", size, number * BLOCK_BYTES, 8, fetch)
    assert asked == [(60, 61), (50, 51), (40, 41)]


def test_read_ahead_stops_at_range_end() -> None:
    blocks, asked = BlockCache(), []

    def fetch(start: int, stop: int) -> bytes:
        asked.append((start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)))
        return bytes(stop - start)

    size, begin = 64 * BLOCK_BYTES, 3 * BLOCK_BYTES + 10
    blocks.mark_read_end("a", begin + 16 * BLOCK_BYTES)
    for offset in range(begin, begin + 16 * BLOCK_BYTES, 4 * BLOCK_BYTES):
        blocks.read_range("a", size, offset, 4 * BLOCK_BYTES, fetch)
    assert [one for first, stop in asked for one in range(first, stop)] == [*range(3, 20)]
    blocks.read_range(
        "a", size, 18 * BLOCK_BYTES, 4 * BLOCK_BYTES, fetch
    )  # what is wanted is read all the same
    assert asked[-1][1] >= 22


def test_last_partial_block_is_fetched_with_previous_block() -> None:
    blocks, asked = BlockCache(), []

    def fetch(start: int, stop: int) -> bytes:
        asked.append((start, stop))
        return bytes(stop - start)

    size = 3 * BLOCK_BYTES + 10
    assert len(blocks.read_range("a", size, size - 22, 22, fetch)) == 22
    assert asked == [(2 * BLOCK_BYTES, size)]
    asked.clear()
    blocks.read_range("b", size, size - 4, 4, fetch)
    assert asked == [(2 * BLOCK_BYTES, size)]


def test_block_cache_memory_is_bounded() -> None:
    blocks = BlockCache(capacity_bytes=4 * BLOCK_BYTES)
    size = 40 * BLOCK_BYTES
    for offset in range(0, size, BLOCK_BYTES):
        blocks.read_range("a", size, offset, BLOCK_BYTES, lambda start, stop: bytes(stop - start))
        assert blocks._cached_bytes <= 4 * BLOCK_BYTES and blocks._cached_bytes == sum(
            map(len, blocks._blocks.values())
        )
    blocks.trim_cache()
    assert not blocks._pending


def test_concurrent_reads_fetch_each_block_once() -> None:
    blocks, asked = BlockCache(), []
    size = 50 * BLOCK_BYTES + 77
    whole = os.urandom(size)

    def fetch(start: int, stop: int) -> bytes:
        asked.append((start, stop))
        time.sleep(0.005)
        return whole[start:stop]

    spans = [(start, min(start + 300_000, size)) for start in range(0, size, 250_001)]
    with ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(lambda s: blocks.read_range("a", size, s[0], s[1] - s[0], fetch), spans * 2)
        )
    assert found == [whole[start:stop] for start, stop in spans * 2]
    fetched = sorted(asked)
    assert all(one[1] <= two[0] for one, two in pairwise(fetched))


def test_fetch_error_reaches_all_waiters_and_is_not_cached() -> None:
    blocks, gate = BlockCache(), threading.Event()

    def fetch(start: int, stop: int) -> bytes:
        gate.wait(5)
        raise StorageError("the network is down")

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(blocks.read_range, "a", 100, 0, 10, fetch) for _ in range(3)]
        time.sleep(0.05)
        gate.set()
        for one in waiting:
            with pytest.raises(StorageError, match="down"):
                one.result()
    assert blocks.read_range("a", 100, 0, 10, lambda start, stop: bytes(stop - start)) == bytes(10)
