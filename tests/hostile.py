"""Inputs that attack a reader of checkpoints, for any test that has a reader.

Pickles: each entry of :func:`evil_pickles` would create a marker file, or exhaust memory or time,
in a careless reader. Zips: :func:`zip_of` writes any wrong zip. Headers: :func:`header_file`.
"""

from __future__ import annotations

import json
import pickle
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")


# ---------------------------------------------------------------------------------------- pickles


class _Run:
    """Pickles as a call of a function that is never defined here."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def _called(module: str, name: str, *args: str, protocol: int = 2) -> bytes:
    """A pickle that calls ``module.name(*args)``."""
    if protocol >= 4:
        body = b"\x8c" + bytes([len(module)]) + module.encode()
        body += b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93"
    else:
        body = f"c{module}\n{name}\n".encode()
    texts = b"".join(b"X" + struct.pack("<I", len(a)) + a.encode() for a in args)
    return b"\x80" + bytes([protocol]) + body + b"(" + texts + b"tR."


def code_pickles(marker: str) -> dict[str, bytes]:
    """Pickles that create the file *marker* when they are loaded by :mod:`pickle`."""
    touch = f"open({marker!r}, 'w').close()"
    shell = f"touch {marker}"
    called = {
        "eval": ("builtins", "eval", touch),
        "eval-python2": ("__builtin__", "eval", touch),
        "exec": ("builtins", "exec", touch),
        "open": ("builtins", "open", marker, "w"),
        "io-open": ("io", "open", marker, "w"),
        "os-system": ("os", "system", shell),
        "posix-system": ("posix", "system", shell),
        "subprocess": ("subprocess", "getoutput", shell),
        "pathlib-touch": ("pathlib", "Path.touch", marker),
        "runpy": ("runpy", "run_path", marker),
        "torch-load": ("torch.serialization", "load", marker),
        "dotted": ("torch.serialization", "os.system", shell),
        "dotted-in-table": ("torch.storage", "UntypedStorage.from_file", marker),
        "codecs-open": ("_codecs", "open", marker),
        "numpy-load": ("numpy", "load", marker),
        "import": ("builtins", "__import__", "antigravity"),
        "getattr": ("builtins", "getattr", marker, marker),
    }
    found = {name: _called(*call) for name, call in called.items()}
    found["eval-protocol-4"] = _called("builtins", "eval", touch, protocol=4)
    found["inst"] = b"(S" + repr(touch).encode() + b"\nibuiltins\neval\n."
    found["inst-unicode"] = b"(V" + touch.encode() + b"\nibuiltins\neval\n."
    found["obj"] = b"(cbuiltins\neval\nV" + touch.encode() + b"\no."
    found["newobj"] = b"\x80\x02cbuiltins\neval\nV" + touch.encode() + b"\n\x85\x81."
    found["real-reduce"] = pickle.dumps(_Run(eval, touch))
    found["in-a-dict"] = b"\x80\x02}X\x01\0\0\0a" + _called("os", "system", shell)[2:-1] + b"s."
    return found


def exhausting_pickles(count: int = 200_000) -> dict[str, bytes]:
    """Small pickles that cost gigabytes or hours when read carelessly."""
    doubled = b"\x80\x04)" + b"2\x86" * 60
    pushes = [b"j" + struct.pack("<I", index) for index in range(41)]
    levels = [b"]r" + struct.pack("<I", i + 1) + b"(" + pushes[i] * 10 + b"e" for i in range(40)]
    laughs = b"\x80\x02(]q\x00K\x01a" + b"".join(levels) + b"t."
    text = b"X" + struct.pack("<I", 4000) + b"a" * 4000 + b"q\x00"
    return {
        "memo-index": b"\x80\x02Nr\xff\xff\xff\x7f.",
        "bytearray8": b"\x80\x05\x96\0\0\0\0\x02\0\0\0.",
        "bytes8": b"\x80\x04\x8e\0\0\0\0\x02\0\0\0.",
        "unicode8": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
        "bytearray-size": b"\x80\x02c__builtin__\nbytearray\n\x8a\x05\0\0\0\0\x03\x85R.",
        "bytes-size": b"\x80\x02c__builtin__\nbytes\n\x8a\x05\0\0\0\0\x03\x85R.",
        "set-of-range": b"\x80\x02c__builtin__\nset\nc__builtin__\nrange\n"
        b"J\xff\xff\xff\x7f\x85R\x85R.",
        "hash-bomb": b"\x80\x04}" + doubled[2:] + b"Ns.",
        "hash-bomb-set": b"\x80\x04\x8f(" + doubled[2:] + b"\x90.",
        "hash-bomb-frozenset": b"\x80\x04(" + doubled[2:] + b"\x91.",
        "hash-bomb-set-call": b"\x80\x02c__builtin__\nset\n]" + doubled[2:] + b"a\x85R.",
        "copies": b"\x80\x02](" + text + b"0" + b"c_codecs\nencode\nq\x010"
        + b"h\x01h\x00\x85R" * count + b"e.",
        "deep-list": b"\x80\x02" + b"]" * count + b"a" * (count - 1) + b".",
        "deep-tuple": b"\x80\x02N" + b"\x85" * count + b".",
        "cycle": b"\x80\x02]q\x00h\x00a.",
        "laughs": laughs,
        "long-keys": b"\x80\x02X" + struct.pack("<I", 500_000) + b"a" * 500_000 + b"q\x000"
        + b"ccollections\nCounter\nq\x010}(" + b"".join(
            b"h\x01(" + b"h\x00" * 100 + b"J" + struct.pack("<i", i) + b"tRN" for i in range(500)
        ) + b"u.",
        "class-bomb": b"\x80\x04ctorch._tensor\n_rebuild_from_type_v2\n"
        b"(ctorch._utils\n_rebuild_tensor_v2\n" + doubled[2:] + b"))tR.",
        "long-decimal": b"L" + b"9" * 1_000_000 + b"L\n.",
        "colliding-keys": b"\x80\x02}(" + b"".join(
            b"\x8a\x0a" + (i * ((1 << 61) - 1)).to_bytes(10, "little") + b"N"
            for i in range(count * 3 // 10)
        ) + b"u.",
    }  # fmt: skip


def swelling_pickles(count: int) -> dict[str, bytes]:
    """Pickles of a few times *count* bytes whose objects take 50 to 220 times as much memory."""
    record = b"(cdatetime\ndate\nq\x000"
    names = [b"c%d\n%d\n0" % (i, i) for i in range(count)]
    return {
        "dicts": b"(" + b"}" * count + b"t.",
        "lists": b"(" + b"]" * count + b"t.",
        "sets": b"(" + b"\x8f" * count + b"t.",
        "frozensets": b"(" + b"(\x91" * count + b"t.",
        "marks": b"(" * count + b".",
        "lists-by-mark": b"(" + b"(l" * count + b"t.",
        "dicts-by-mark": b"(" + b"(d" * count + b"t.",
        "tuples": b"(" + b"N\x85" * count + b"t.",
        "pairs": b"(" + b"NN\x86" * count + b"t.",
        "threes": b"(" + b")))\x87" * count + b"t.",
        "memo": b"N" + b"\x94" * count + b".",
        "memo-numbered": b"N" + b"".join(b"q%c" % (i % 256) for i in range(256))
        + b"".join(b"r" + struct.pack("<I", i) for i in range(256, count)) + b".",
        "memoized-dicts": b"(" + b"}\x94" * count + b"t.",
        "records": record + b"h\x00)R" * count + b"t.",
        "items-of-a-record": record + b"h\x00)R(" + b"NN" * count + b"ut.",
        "sets-of-a-list": b"(cbuiltins\nset\nq\x000(Nlq\x010" + b"h\x00h\x01\x85R" * count
        + b"t.",
        "copies-into-sets": b"(cbuiltins\nset\nq\x000("
        + b"".join(b"M" + struct.pack("<H", i) for i in range(2000)) + b"lq\x010"
        + b"h\x00h\x01\x85R" * count + b"t.",
        "copies-of-a-size": b"(ctorch\nSize\nq\x000h\x00(" + b"K\x01" * 64 + b"t\x85Rq\x010"
        + b"h\x00h\x01\x85R" * count + b"t.",
        "globals": b"".join(names) + b"N.",
    }  # fmt: skip


def sharing_pickles(levels: int = 60, count: int = 20_000) -> dict[str, bytes]:
    """Small pickles of which each value holds the one below it twice, or very often a long one.

    Whoever hashes, compares, prints, encodes or copies them visits 2 to the power of *levels*
    values, or *count* times *count*.
    """
    below = b"h\x01"
    attributes = b"}(X\x01\0\0\0a" + below + b"X\x01\0\0\0b" + below + b"u"
    items = b"(K\x01" + below + b"K\x02" + below + b"u"
    leveled = {
        "tuples": (b"", below * 2 + b"\x86"),
        "lists": (b"", b"](" + below * 2 + b"e"),
        "dicts": (b"", b"}" + items),
        "ordered-dicts": (b"ccollections\nOrderedDict\n", b"h\x00)R" + items),
        "attributes-of-dicts": (b"ccollections\nOrderedDict\n", b"h\x00)R" + attributes + b"b"),
        "records": (b"cdecimal\nDecimal\n", b"h\x00)R" + attributes + b"b"),
        "arguments": (b"cdecimal\nDecimal\n", b"h\x00" + below * 2 + b"\x86R"),
        "objects": (b"cdecimal\nDecimal\n", b"h\x00" + below * 2 + b"\x86\x81"),
        "elements-of-records": (b"ccollections\ndeque\n", b"h\x00)R(" + below * 2 + b"e"),
        "items-of-records": (b"ccollections\nCounter\n", b"h\x00)R" + items),
        "slices": (b"cbuiltins\nslice\n", b"h\x00" + below * 2 + b"N\x87R"),
    }
    ends = {
        "": below + b".",
        "-in-a-set": b"\x8f(" + below + b"\x90.",
        "-in-a-frozenset": b"(" + below + b"\x91.",
        "-as-a-key": b"}" + below + b"Ns.",
        "-in-a-key": b"}K\x01" + below + b"\x86Ns.",
    }
    found = {
        name + end: b"\x80\x04"
        + (made or b"N")
        + b"q\x000Nq\x010"
        + (level + b"q\x010") * levels
        + tail
        for name, (made, level) in leveled.items()
        for end, tail in ends.items()
    }
    text = b"X" + struct.pack("<I", 50 * count) + b"a" * 50 * count
    wide = b"](" + b"N" * count + b"e"
    names = b"".join(b"X\x05\0\0\0%05dN" % number for number in range(count))
    key = b"(" + below * 100 + b"K%ct"
    found |= {
        "long-text": b"\x80\x04" + text + b"q\x010](" + below * count + b"e.",
        "long-bytes": b"\x80\x04B" + text[1:] + b"q\x010](" + below * count + b"e.",
        "long-list": b"\x80\x04" + wide + b"q\x010](" + below * count + b"e.",
        "long-text-in-keys": b"\x80\x04" + text + b"q\x010}("
        + b"".join(key.replace(b"%c", b"%c" % i) + b"N" for i in range(min(count, 200))) + b"u.",
        "many-attributes-in-a-set": b"\x80\x04cdecimal\nDecimal\nq\x000}(" + names
        + b"uq\x010\x8f(" + (b"h\x00)R" + below + b"b") * count + b"\x90.",
        "keys-of-many-values": b"\x80\x04cdecimal\nDecimal\nq\x000(" + b"N" * 120
        + b"tq\x010\x8f(" + (b"h\x00" + below + b"R") * count + b"\x90.",
    }  # fmt: skip
    return found


def long_name_pickles(count: int = 20_000, length: int = 1_000_000) -> dict[str, bytes]:
    """Pickles of *count* leaves below a key of *length* characters, and keys of many dots."""
    key = b"X" + struct.pack("<I", length) + b"a" * length
    dots = b"X" + struct.pack("<I", length) + b"a." * (length // 2)
    leaves = b"".join(b"X\x05\0\0\0%05dK\x01" % number for number in range(count))
    return {
        "below-a-long-key": b"\x80\x02}" + key + b"}(" + leaves + b"us.",
        "below-a-key-of-dots": b"\x80\x02}" + dots + b"}(" + leaves + b"us.",
        "a-key-of-dots": b"\x80\x02}" + dots + b"K\x01s.",
        "many-keys": b"\x80\x02}(" + leaves + b"u.",
    }


def evil_json(count: int = 200_000) -> dict[str, bytes]:
    """JSON that nests, that is wide, or that has long names and numbers."""
    long = b"a" * 1_000_000
    return {
        "nested-lists": b'{"a":' + b"[" * count,
        "nested-objects": b'{"a":' * count + b"1" + b"}" * count,
        "wide": b'{"a":[' + b"1," * count + b"1]}",
        "many-keys": b"{" + b",".join(b'"k%d":1' % number for number in range(count)) + b"}",
        "long-key": b'{"' + long + b'":1}',
        "long-text": b'{"model_type":"' + long + b'"}',
        "dots": b'{"weight_map":{"' + b"a." * 500_000 + b'":"model.safetensors"}}',
        "digits": b'{"hidden_size":' + b"9" * 1_000_000 + b"}",
        "exponent": b'{"hidden_size":1e999999999}',
        "escapes": b'{"a":"' + b"\\u0041" * count + b'"}',
        "spaces": b"{" + b" " * 1_000_000 + b"}",
        "blank-lines": b"{" + b"\n" * 1_000_000 + b"}",
    }


NUMBERS: tuple[object, ...] = (
    1e308,
    1e-308,
    -1,
    0,
    0.5,
    10**18,
    1 << 63,
    10**300,
    "1e308",
    True,
    None,
    [],
    {},
)
"""What a configuration may state where a number is meant."""


def evil_text(count: int = 60_000) -> dict[str, bytes]:
    """Text on which a careless pattern takes its time."""
    return {
        "blank-lines": b"\n" * count + b"x",
        "spaces": b" " * count + b"x",
        "digits": b"0" * count + b"!",
        "colons": b":" * count + b"x",
        "quotes": b'"' * count + b"x",
        "dots": b"a." * count + b"!",
        "slashes": b"/" * count + b"!",
        "urls": b"://a?" * count + b" ",
        "steps": b"step-" * count,
        "imports": b"from .\n" * count,
    }


def evil_safetensors(count: int = 20_000) -> dict[str, bytes]:
    """Safetensors with headers that are long, wide or nested; their tensors are there."""

    def header(names: Sequence[str]) -> bytes:
        claims = {
            name: {"dtype": "U8", "shape": [1], "data_offsets": [at, at + 1]}
            for at, name in enumerate(names)
        }
        return header_file(claims, bytes(len(names)))

    return {
        "many-tensors": header([f"t{number}" for number in range(count)]),
        "many-layers": header(
            [f"model.layers.{number}.mlp.up_proj.weight" for number in range(count // 4)]
        ),
        "one-layer-far-away": header(["model.layers.99999.mlp.up_proj.weight"]),
        "long-name": header(["a" * 1_000_000]),
        "name-of-dots": header(["a." * 500_000 + "b"]),
        "names-of-dots": header([f"{'a.' * 2_000}{number}" for number in range(500)]),
        "nested": header_file(b'{"__metadata__":' + b'{"a":' * count),
        "metadata": header_file({"__metadata__": {f"k{number}": "v" for number in range(count)}}),
    }


def evil_gguf(count: int = 20_000) -> dict[str, bytes]:
    """GGUF files with headers that are long or that claim what is not there."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def file(names: Sequence[str], keys: bytes = b"", number: int = 0) -> bytes:
        claims = b"".join(
            text(name) + struct.pack("<IQIQ", 1, 8, 0, 32 * at) for at, name in enumerate(names)
        )
        architecture = text("general.architecture") + struct.pack("<I", 8) + text("llama")
        head = (
            b"GGUF" + struct.pack("<IQQ", 3, len(names), number + 1) + architecture + keys + claims
        )
        return head + bytes(-len(head) % 32) + bytes(32 * len(names))

    layers = text("llama.block_count") + struct.pack("<II", 4, 0xFFFFFFFF)
    return {
        "many-tensors": file([f"t{number}" for number in range(count)]),
        "many-layers": file([f"blk.{number}.attn_q.weight" for number in range(count // 4)]),
        "many-layers-stated": file(["blk.0.attn_q.weight"], layers, 1),
        "long-name": file(["a" * 4096]),
        "name-of-dots": file(["a." * 2048]),
        "many-keys": file(
            ["t"],
            b"".join(text(f"k{number}") + struct.pack("<II", 4, 1) for number in range(count)),
            count,
        ),
        "claims-much": b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 1 << 40),
        "claims-a-long-text": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60),
    }


def zstd_bomb(nbytes: int) -> bytes:
    """A Zstandard frame of *nbytes* zeros: four bytes for each 128 KiB (RFC 8878, RLE blocks)."""
    block = 128 << 10
    count = nbytes // block
    # A window of 128 KiB, no content size, no checksum; a block of one byte that is repeated.
    header = b"\x28\xb5\x2f\xfd\x00\x38"
    repeated = (block << 3 | 1 << 1).to_bytes(3, "little") + b"\0"
    last = (block << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\0"
    return header + repeated * (count - 1) + last


def evil_yaml(count: int = 400_000) -> dict[str, str]:
    """YAML of a few bytes for each of *count* values or levels."""
    return {
        "long-list": "a: [" + "1," * count + "1]",
        "long-block": "a:\n" + "- 1\n" * count,
        "many-keys": "".join(f"k{number}: 1\n" for number in range(count)),
        "many-aliases": "a: &a x\nb: [" + "*a," * count + "1]",
        "many-anchors": "a:\n" + "".join(f"- &a{number} x\n" for number in range(count)),
        "many-tags": "a: [" + "!x ''," * count + "1]",
        "long-number": "a: 1" + ":1" * count,
        "nested-flow": "a: " + "[" * count,
        "nested-maps": "a: " + "{a: " * count,
        "nested-blocks": "- " * count,
    }


def malformed_pickles() -> dict[str, bytes]:
    """Pickles that break the machine's own rules."""
    return {
        "empty": b"",
        "only-proto": b"\x80\x02",
        "no-stop": b"\x80\x02N",
        "stop-on-empty": b"\x80\x02.",
        "two-left": b"\x80\x02NN.",
        "open-mark": b"\x80\x02(N.",
        "underflow": b"\x80\x02a.",
        "tuple-underflow": b"\x80\x02N\x86.",
        "mark-underflow": b"\x80\x02t.",
        "memo-missing": b"\x80\x02h\x07.",
        "bad-opcode": b"\x80\x02\xff.",
        "protocol-9": b"\x80\x09N.",
        "bad-utf8": b"\x80\x04\x8c\x02\xff\xfe.",
        "truncated-string": b"\x80\x02X\xff\0\0\0abc.",
        "truncated-float": b"\x80\x02G\0\0.",
        "odd-items": b"\x80\x02}(K\x01u.",
        "duplicate-key": b"\x80\x02}(X\x01\0\0\0aK\x01X\x01\0\0\0aK\x02u.",
        "list-key": b"\x80\x02}]Ns.",
        "set-of-dict": b"\x80\x04\x8f(}\x90.",
        "append-to-none": b"\x80\x02NNa.",
        "items-of-list": b"\x80\x02]K\x01K\x02s.",
        "build-none": b"\x80\x02N}b.",
        "reduce-none": b"\x80\x02N)R.",
        "reduce-no-tuple": b"\x80\x02ccollections\nOrderedDict\nNR.",
        "global-no-newline": b"\x80\x02ccollections",
        "global-not-text": b"\x80\x04K\x01K\x02\x93.",
        "frame-too-long": b"\x80\x04\x95\xff\xff\0\0\0\0\0\0N.",
        "ext": b"\x80\x02\x82\x01.",
        "persid": b"Pabc\n.",
        "binpersid": b"\x80\x02NQ.",
        "buffer": b"\x80\x05\x97.",
        "trailing": b"\x80\x02N.junk",
        "bad-int": b"Iabc\n.",
        "complex-text": b"\x80\x02c__builtin__\ncomplex\nX\x02\0\0\x001j\x85R.",
        "encode-odd": b"\x80\x02c_codecs\nencode\nX\x01\0\0\0aX\x03\0\0\0hex\x86R.",
    }


# ------------------------------------------------------------------------------------------- zips


@dataclass(frozen=True)
class Entry:
    """One zip entry; None and the defaults make an honest one.

    Attributes:
        name: In the central directory.
        content: The data.
        local_name: In the local header.
        crc: Recorded CRC-32.
        size: Recorded size.
        method: Compression method recorded; the content is written as it is.
        flags: General purpose flags.
        header: Recorded position of the local header.
        extra: Extra field of the local header.
    """

    name: str
    content: bytes
    local_name: str | None = None
    crc: int | None = None
    size: int | None = None
    method: int = 0
    flags: int = 0
    header: int | None = None
    extra: bytes = b""


def zip_of(
    entries: Sequence[Entry],
    *,
    before: bytes = b"",
    after: bytes = b"",
    comment: bytes = b"",
    count: int | None = None,
) -> bytes:
    """Write a zip exactly as told, right or wrong."""
    out = bytearray(before)
    directory = bytearray()
    for entry in entries:
        crc = zlib.crc32(entry.content) if entry.crc is None else entry.crc
        size = len(entry.content) if entry.size is None else entry.size
        raw, local = entry.name.encode(), (entry.local_name or entry.name).encode()
        at = len(out) if entry.header is None else entry.header
        out += LOCAL.pack(
            *(b"PK\3\4", 20, entry.flags, entry.method, 0, 0, crc, size, size),
            *(len(local), len(entry.extra)),
        )
        out += local + entry.extra + entry.content
        directory += CENTRAL.pack(
            *(b"PK\1\2", 20, 20, entry.flags, entry.method, 0, 0, crc, size, size),
            *(len(raw), 0, 0, 0, 0, 0, at),
        )
        directory += raw
    start = len(out)
    n = len(entries) if count is None else count
    out += directory
    out += END.pack(b"PK\5\6", 0, 0, n, n, len(directory), start, len(comment)) + comment
    return bytes(out + after)


def torch_entries(pickled: bytes, storages: Mapping[str, bytes]) -> list[Entry]:
    """The entries of an honest ``torch.save`` zip."""
    return [
        Entry("archive/data.pkl", pickled),
        Entry("archive/byteorder", b"little"),
        *(Entry(f"archive/data/{key}", content) for key, content in storages.items()),
        Entry("archive/version", b"3\n"),
    ]


def evil_zips(pickled: bytes, storages: Mapping[str, bytes]) -> dict[str, bytes]:
    """Zips around an honest pickle, each with one trick."""
    good = torch_entries(pickled, storages)
    first = good[2]

    def changed(position: int, **what: object) -> bytes:
        entries = list(good)
        entries[position] = replace(entries[position], **what)  # type: ignore[arg-type]
        return zip_of(entries)

    honest = zip_of(good)
    return {
        "leading-junk": zip_of(good, before=b"#!/bin/sh\n"),
        "shifted-junk": b"junk" + honest,
        "trailing-junk": zip_of(good, after=b"junk"),
        "second-zip": honest + honest,
        "comment": zip_of(good, comment=b"PK\5\6"),
        "duplicate": zip_of([*good, first]),
        "duplicate-pickle": zip_of([*good, good[0]]),
        "overlap": changed(3, header=0),
        "same-data-twice": zip_of([*good[:3], replace(good[3], header=0, local_name="x")]),
        "local-name": changed(0, local_name="archive/evil.pkl"),
        "deflated": changed(2, method=8),
        "encrypted": changed(2, flags=1),
        "strong-encryption": changed(2, flags=0x40),
        "patched": changed(2, flags=0x20),
        "size-too-big": changed(2, size=len(first.content) + 1),
        "size-huge": changed(2, size=0xFFFFFFF0),
        "size-zip64-missing": changed(2, size=0xFFFFFFFF),
        "header-outside": changed(2, header=0x7FFFFFFF),
        "pickle-crc": changed(0, crc=1),
        "count-too-small": zip_of(good, count=len(good) - 1),
        "count-too-big": zip_of(good, count=len(good) + 1),
        "no-pickle": zip_of(good[1:]),
        "no-storage": zip_of([e for e in good if e is not first]),
        "short-storage": changed(2, content=first.content[:-1]),
        "long-storage": changed(2, content=first.content + b"\0"),
        "big-endian": changed(1, content=b"big"),
        "no-folder": zip_of([replace(e, name=e.name.replace("archive/", "")) for e in good]),
        "two-folders": changed(3, name="other/version"),
        "bad-name": zip_of(good).replace(b"archive/version", b"archive/versio\xff"),
        "gap": zip_of(
            [good[0], replace(good[1], content=b"little" + b"x" * 50, size=6), *good[2:]]
        ),
        "empty-zip": zip_of([]),
        "truncated": honest[:-1],
        "cut-half": honest[: len(honest) // 2],
        "only-header": honest[:30],
    }


# ------------------------------------------------------------------------------------ safetensors


def header_file(header: object, data: bytes = b"") -> bytes:
    """A safetensors file; *header* is JSON text, or an object to dump."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def evil_headers() -> dict[str, bytes]:
    """Safetensors files that must be refused."""

    def one(shape: object, offsets: object, dtype: object = "U8") -> dict[str, object]:
        return {"dtype": dtype, "shape": shape, "data_offsets": offsets}

    good = json.dumps({"a": one([4], [0, 4])}).encode()
    four = b"abcd"

    def entry(text: str, data: bytes = four) -> bytes:
        return header_file(b'{"a":' + text.encode() + b"}", data)

    return {
        "empty": b"",
        "seven-bytes": b"\0" * 7,
        "length-beyond": struct.pack("<Q", 1000) + b"{}",
        "length-huge": struct.pack("<Q", (1 << 64) - 1) + b"{}",
        "length-zero": struct.pack("<Q", 0),
        "not-json": header_file(b"{nope}"),
        "not-utf8": header_file(b'{"\xff":1}'),
        "bom": header_file(b"\xef\xbb\xbf" + good, four),
        "list": header_file([]),
        "leading-space": header_file(b" " + good, four),
        "trailing-nul": header_file(good + b"\0", four),
        "trailing-bytes": header_file(good, four + b"x"),
        "truncated": header_file(good, four[:3]),
        "duplicate-tensor": header_file(good[:-1] + b"," + good[1:], four),
        "duplicate-other-dtype": header_file(
            b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
            b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', four),
        "duplicate-field": entry('{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}'),
        "duplicate-metadata": header_file(b'{"__metadata__":{},"__metadata__":{}}'),
        "metadata-number": header_file({"__metadata__": {"a": 1}}),
        "metadata-list": header_file({"__metadata__": []}),
        "nan": entry('{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}'),
        "infinity": entry('{"dtype":"U8","shape":[4],"data_offsets":[0,Infinity]}'),
        "overflow": entry('{"dtype":"U8","shape":[1e400],"data_offsets":[0,4]}'),
        "float": entry('{"dtype":"U8","shape":[4.0],"data_offsets":[0,4]}'),
        "bool": entry('{"dtype":"U8","shape":[true,4],"data_offsets":[0,4]}'),
        "bool-offset": entry('{"dtype":"U8","shape":[1],"data_offsets":[false,true]}', b"a"),
        "negative": entry('{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}'),
        "minus-zero": entry('{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}', b""),
        "huge": entry('{"dtype":"U8","shape":[' + "9" * 5000 + '],"data_offsets":[0,4]}'),
        "u64-overflow": entry('{"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,4]}'),
        "product-overflow": header_file({"a": one([1 << 62, 1 << 62, 0], [0, 0])}),
        "unknown-dtype": header_file({"a": one([4], [0, 4], "U9")}, four),
        "dtype-number": header_file({"a": one([4], [0, 4], 8)}, four),
        "f6": header_file({"a": one([4], [0, 3], "F6_E2M3")}, b"abc"),
        "f4-odd": header_file({"a": one([3], [0, 2], "F4")}, b"ab"),
        "extra-field": entry('{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":1}'),
        "missing-field": entry('{"dtype":"U8","shape":[4]}'),
        "not-a-map": entry("[]"),
        "shape-number": header_file({"a": one(4, [0, 4])}, four),
        "shape-text": header_file({"a": one("4", [0, 4])}, four),
        "three-offsets": header_file({"a": one([4], [0, 2, 4])}, four),
        "reversed": header_file({"a": one([4], [4, 0])}, four),
        "size-mismatch": header_file({"a": one([5], [0, 4])}, four),
        "hole-at-start": header_file({"a": one([2], [2, 4])}, four),
        "hole": header_file({"a": one([1], [0, 1]), "b": one([2], [2, 4])}, four),
        "overlap": header_file({"a": one([3], [0, 3]), "b": one([2], [2, 4])}, four),
        "same-bytes": header_file({"a": one([4], [0, 4]), "b": one([4], [0, 4])}, four),
        "rank-101": header_file({"a": one([1] * 101, [0, 1])}, b"a"),
        "rank-100000": header_file({"a": one([1] * 100_000, [0, 1])}, b"a"),
        "deep": header_file(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        "surrogate": header_file(good.replace(b'"a"', b'"\\ud800"'), four),
        "trailing-comma": header_file(good[:-1] + b",}", four),
        "two-values": header_file(good + b"{}", four),
        "control-character": header_file(good.replace(b'"a"', b'"a\x01"'), four),
    }  # fmt: skip
