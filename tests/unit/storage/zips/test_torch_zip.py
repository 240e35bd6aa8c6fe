"""Zips of torch.save: ours read by torch and zipfile, torch's read by us, bad ones refused."""

import contextlib
import io
import math
import os
import pickle
import shutil
import subprocess
import tarfile
import zipfile
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from ckptctl import dtypes
from ckptctl.errors import CkptError, DamagedError, FormatError, UnsafePickleError, UnsupportedError
from ckptctl.storage.files import source_files
from ckptctl.storage.pickles.pickle_writer import StorageTensor, dump_pickle
from ckptctl.storage.zips.items import read_item_tensor
from ckptctl.storage.zips.zip_reader import TABLE_WITH_UNREAD_TENSORS, StoredTensor, read_archive
from ckptctl.storage.zips.zip_writer import compute_zip_layout
from tests import effort, hostile

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")


def raw_bytes(tensor):
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def sample(name, shape):
    size = dtypes.get_itemsize(name) * math.prod(shape)
    values = torch.randint(0, 2 if name == "bool" else 256, (size,), dtype=torch.uint8)
    return values.view(getattr(torch, name)).view(shape)


def all_dtypes():
    return {name: sample(name, (3, 2)) for name in dtypes.BY_NAME}


def stored_state(tensors):
    return {
        name: StorageTensor(
            str(i),
            tensor.numel() * tensor.element_size(),
            str(tensor.dtype).removeprefix("torch."),
            0,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.requires_grad,
        )
        for i, (name, tensor) in enumerate(tensors.items())
    }


def write(path, tensors, *, base=0, checksums=True, folder="archive"):
    blocks = [raw_bytes(tensor.detach()) for tensor in tensors.values()]
    storages = [(str(i), len(block)) for i, block in enumerate(blocks)]
    layout = compute_zip_layout(
        dump_pickle(stored_state(tensors)), storages, base=base, folder=folder
    )
    whole = bytearray(base + layout.size)
    for offset, block in zip(layout.data_offsets, blocks, strict=True):
        assert (offset - base) % 64 == 0
        whole[offset : offset + len(block)] = block
    covered = sum(map(len, blocks))
    for offset, piece in layout.iterate_frame([zlib.crc32(b) if checksums else 0 for b in blocks]):
        whole[offset : offset + len(piece)] = piece
        covered += len(piece)
    assert covered == layout.size
    path.write_bytes(whole)
    return layout


def read(path, **options):
    with source_files(path.parent) as files:
        return read_archive(files, path.name, **options)


def content(path, tensor):
    return path.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]


class TestWriting:
    def test_written_bytes_match_torch_except_serialization_id(self, tmp_path):
        tensors = all_dtypes() | {
            "empty": torch.zeros(0, 3),
            "grad": torch.ones((), requires_grad=True),
        }
        torch.save(tensors, tmp_path / "x.pth")
        write(tmp_path / "ours.pth", tensors, folder="x")
        theirs, ours = (tmp_path / "x.pth").read_bytes(), (tmp_path / "ours.pth").read_bytes()
        with zipfile.ZipFile(tmp_path / "x.pth") as archive:
            entry = archive.getinfo("x/.data/serialization_id")
            number = archive.read(entry)
        at = theirs.index(number)
        different = [i for i in range(len(theirs)) if theirs[i] != ours[i]]
        assert len(theirs) == len(ours)
        crc = entry.CRC.to_bytes(4, "little")
        ids = set(range(at, at + 40)) | set(range(at + 44, at + 48))
        ids |= set(range(theirs.rindex(crc), theirs.rindex(crc) + 4))
        assert different
        assert set(different) <= ids

    @pytest.mark.parametrize("mmap", [False, True])
    def test_written_zip_loads_in_torch(self, tmp_path, mmap):
        tensors = all_dtypes() | {"empty": torch.zeros(0, 3)}
        write(tmp_path / "a.pth", tensors)
        found = torch.load(tmp_path / "a.pth", weights_only=True, mmap=mmap)
        assert list(found) == list(tensors)
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype
            assert found[name].shape == tensor.shape
            assert raw_bytes(found[name]) == raw_bytes(tensor)

    def test_written_zip_passes_zipfile_test(self, tmp_path):
        write(tmp_path / "a.pth", all_dtypes())
        with zipfile.ZipFile(tmp_path / "a.pth") as archive:
            assert archive.testzip() is None

    @pytest.mark.skipif(not shutil.which("unzip"), reason="there is no unzip")
    def test_written_zip_passes_unzip_test(self, tmp_path):
        write(tmp_path / "a.pth", all_dtypes())
        subprocess.run(["unzip", "-tqq", tmp_path / "a.pth"], check=True)

    def test_written_data_offsets_match_torch(self, tmp_path):
        layout = write(tmp_path / "a.pth", all_dtypes())
        with FakeTensorMode():
            found = torch.load(tmp_path / "a.pth", weights_only=True)
        offsets = [t.untyped_storage()._checkpoint_offset for t in found.values()]
        assert offsets == list(layout.data_offsets)

    def test_written_zip_is_deterministic_and_depends_on_content(self, tmp_path):
        one, other = {"a": torch.ones(3)}, {"a": torch.zeros(3)}
        for name, tensors in (("1", one), ("2", one), ("3", other)):
            write(tmp_path / name, tensors)
        first, second, third = ((tmp_path / name).read_bytes() for name in "123")
        assert first == second
        assert zipfile.ZipFile(io.BytesIO(first)).read("archive/.data/serialization_id") != (
            zipfile.ZipFile(io.BytesIO(third)).read("archive/.data/serialization_id")
        )

    def test_disabled_checksums_are_zero_everywhere(self, tmp_path):
        write(tmp_path / "a.pth", all_dtypes(), checksums=False)
        with zipfile.ZipFile(tmp_path / "a.pth") as archive:
            assert {entry.CRC for entry in archive.infolist()} == {0}
        archive = read(tmp_path / "a.pth")
        assert not archive.checksums
        assert {t.crc32 for t in archive.root.values()} == {None}
        assert len(torch.load(tmp_path / "a.pth", weights_only=True)) == len(dtypes.BY_NAME)

    def test_zip_without_storages_loads(self, tmp_path):
        layout = compute_zip_layout(dump_pickle({"step": 3}), [])
        (tmp_path / "a").write_bytes(b"".join(piece for _, piece in layout.iterate_frame([])))
        assert torch.load(tmp_path / "a", weights_only=True) == {"step": 3}
        assert zipfile.ZipFile(tmp_path / "a").testzip() is None
        assert read(tmp_path / "a").root == {"step": 3}

    def test_zip_over_4_gib_loads_in_torch(self, tmp_path):
        """Sizes of 4 GiB and offsets beyond it, in a sparse file; the same frame as torch's."""
        sizes = [40, 5 << 30, 28, 0, 0xFFFFFFFF, 7]
        state = {
            f"t{i}": StorageTensor(str(i), n, "uint8", 0, (n,), (1,)) for i, n in enumerate(sizes)
        }
        path = tmp_path / "big.pth"
        layout = compute_zip_layout(
            dump_pickle(state), [(str(i), n) for i, n in enumerate(sizes)], folder="big"
        )
        with path.open("wb") as file:
            file.truncate(layout.size)
            for offset, piece in layout.iterate_frame([0] * len(sizes)):
                os.pwrite(file.fileno(), piece, offset)
            os.pwrite(file.fileno(), b"end-4GB", layout.data_offsets[5])
        with zipfile.ZipFile(path) as archive:
            entries = {e.filename: e.file_size for e in archive.infolist()}
        assert [entries[f"big/data/{i}"] for i in range(6)] == sizes
        found = torch.load(path, weights_only=True, mmap=True)
        assert [t.numel() for t in found.values()] == sizes
        assert bytes(found["t5"].tolist()) == b"end-4GB"
        ours = read(path)
        assert [t.offset for t in ours.root.values()] == list(layout.data_offsets)
        with FakeTensorMode():
            fake = torch.load(path, weights_only=True)
        offsets = [t.untyped_storage()._checkpoint_offset for t in fake.values()]
        assert offsets == list(layout.data_offsets)
        self.check_skeleton(tmp_path / "ref", sizes, layout)

    @staticmethod
    def check_skeleton(folder, sizes, layout):
        folder.mkdir()
        with torch.serialization.skip_data():
            tensors = {f"t{i}": torch.empty(n, dtype=torch.uint8) for i, n in enumerate(sizes)}
            torch.save(tensors, folder / "big.pth")
        assert (folder / "big.pth").stat().st_size == layout.size
        with (folder / "big.pth").open("rb") as theirs:
            for offset, piece in layout.iterate_frame([0] * len(sizes)):
                same = os.pread(theirs.fileno(), len(piece), offset)
                # CRCs of the small records: torch records them here, we leave them out.
                different = sum(a != b for a, b in zip(piece, same, strict=True))
                assert different <= 100

    @pytest.mark.slow
    def test_zip_over_65535_entries_is_readable(self, tmp_path):
        count = 66_000
        state = [StorageTensor(str(i), 1, "uint8", 0, (1,), (1,)) for i in range(count)]
        layout = compute_zip_layout(dump_pickle(state), [(str(i), 1) for i in range(count)])
        whole = bytearray(layout.size)
        for offset, piece in layout.iterate_frame([zlib.crc32(b"\0")] * count):
            whole[offset : offset + len(piece)] = piece
        path = tmp_path / "many.pth"
        path.write_bytes(whole)
        with zipfile.ZipFile(path) as archive:
            assert len(archive.infolist()) == count + 6
        assert torch._C.PyTorchFileReader(str(path)).has_record(f"data/{count - 1}")
        found = read(path)
        assert len(found.root) == count
        assert [t.offset for t in found.root] == list(layout.data_offsets)

    def test_work_per_written_item_is_bounded(self):
        pickled = dump_pickle(StorageTensor("0", 256, "float32", 0, (8, 8), (8, 1)))
        item = lambda: list(compute_zip_layout(pickled, [("0", 256)], base=1500).iterate_frame([1]))  # noqa: E731
        item()
        assert effort.lines(item) < 100


class TestReading:
    @pytest.mark.parametrize("alignment", [64, 4096])
    def test_torch_saved_tensors_are_read_with_checksums(self, tmp_path, alignment):
        from torch.utils.serialization import config

        tensors = all_dtypes() | {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 3)}
        path = tmp_path / "a.pth"
        with config.patch({"save.storage_alignment": alignment}):
            torch.save({"model": tensors, "step": 5, "lr": [0.1]}, path)
        archive = read(path)
        assert archive.checksums
        assert archive.root["step"] == 5
        for name, tensor in tensors.items():
            found = archive.root["model"][name]
            assert (found.dtype, found.shape) == (str(tensor.dtype)[6:], tuple(tensor.shape))
            assert found.strides is None
            assert content(path, found) == raw_bytes(tensor)
            assert found.crc32 == zlib.crc32(raw_bytes(tensor))
            assert found.offset % alignment == 0

    def test_views_and_parameters_share_storage(self, tmp_path):
        base = torch.arange(12.0).reshape(3, 4)
        state = {
            "t": base.t(),
            "row": base[1:],
            "column": base[:, 1],
            "parameter": torch.nn.Parameter(base),
            "singleton": base[:, None, :1].expand(3, 1, 1),
        }
        path = tmp_path / "a.pth"
        torch.save(state, path)
        found = read(path).root
        assert len({t.storage for t in found.values()}) == 1
        assert found["t"].strides == (1, 4)
        assert found["t"].crc32 is None
        assert found["row"].strides is None
        assert found["row"].offset == found["t"].offset + 16
        assert (found["column"].strides, found["column"].nbytes) == ((4,), 36)
        assert found["parameter"].requires_grad
        assert found["parameter"].crc32 is not None
        values = torch.frombuffer(bytearray(content(path, found["column"])), dtype=torch.float32)
        assert values.as_strided((3,), (4,)).tolist() == base[:, 1].tolist()

    def test_module_state_dict_keeps_metadata(self, tmp_path):
        state = torch.nn.BatchNorm1d(3).state_dict()
        state["weight"].tag = "x"
        torch.save(state, tmp_path / "a.pth")
        found = read(tmp_path / "a.pth").root
        assert list(found) == list(state)
        assert found.state["_metadata"][""] == {"version": 2}

    def test_zeroed_torch_checksums_are_treated_as_absent(self, tmp_path):
        torch.serialization.set_crc32_options(False)
        try:
            torch.save({"a": torch.ones(3)}, tmp_path / "a.pth")
        finally:
            torch.serialization.set_crc32_options(True)
        archive = read(tmp_path / "a.pth")
        assert not archive.checksums
        assert archive.root["a"].crc32 is None

    @pytest.mark.parametrize(
        ("value", "named"),
        [
            (torch.zeros(2, dtype=torch.complex64).conj(), "conj"),
            (torch.zeros(2, dtype=torch.complex64).conj().imag, "neg"),
            (torch.zeros(2, 2).to_sparse(), "sparse"),
            (torch.zeros(2, device="meta"), "meta"),
            (torch.empty(2, dtype=torch.bits8), "bits8"),
        ],
    )
    def test_unsupported_tensor_kinds_are_named_in_error(self, tmp_path, value, named):
        torch.save([value], tmp_path / "a.pth")
        with pytest.raises(UnsupportedError, match=named):
            read(tmp_path / "a.pth")

    def test_expanded_tensor_keeps_shape_and_strides(self, tmp_path):
        torch.save(torch.ones(1, 3).expand(1000, 3), tmp_path / "a.pth")
        found = read(tmp_path / "a.pth").root
        assert (found.shape, found.strides, found.nbytes) == ((1000, 3), (0, 1), 12)

    def test_excessively_expanded_tensor_is_unsupported(self, tmp_path):
        torch.save(torch.ones(1).expand(1 << 40), tmp_path / "a.pth")
        with pytest.raises(UnsupportedError, match="excessively expanded"):
            read(tmp_path / "a.pth")

    def test_unsupported_tensors_are_kept_with_keeping_table(self, tmp_path):
        value = torch.ones(6, dtype=torch.complex64).conj()
        torch.save([torch.eye(3).to_sparse(), value, torch.ones(2)], tmp_path / "a.pth")
        with source_files(tmp_path) as files:
            sparse, conj, plain = read_archive(files, "a.pth", table=TABLE_WITH_UNREAD_TENSORS).root
        assert (sparse.dtype, sparse.shape, sparse.nbytes) == ("float32", (3, 3), 0)
        assert "sparse" in sparse.unsupported and sparse.base is None
        assert conj.unsupported and conj.flags == {"conj"} and conj.base.nbytes == 48
        assert plain.unsupported is None

    @pytest.mark.parametrize(
        "change",
        [
            {"storage_nbytes": 20},
            {"storage_nbytes": 28},
            {"storage_key": "1"},
            {"storage_key": "../0"},
            {"offset": 1},
            {"offset": -1},
            {"offset": 1 << 70},
            {"shape": (7,)},
            {"shape": (-1,)},
            {"shape": (1 << 41,), "strides": (0,)},
            {"shape": (6,), "strides": (2,)},
            {"shape": (2,), "strides": (-1,)},
            {"shape": (2, 3)},
            {"shape": (1 << 62, 1 << 62), "strides": (0, 0)},
            {"shape": (1,) * 65, "strides": (1,) * 65},
            {"shape": (True,)},
            {"dtype": "float64"},
        ],
    )
    def test_inconsistent_tensor_records_are_refused(self, tmp_path, change):
        good = {
            "storage_key": "0", "storage_nbytes": 24, "dtype": "float32",
            "offset": 0, "shape": (6,), "strides": (1,),
        }  # fmt: skip
        layout = compute_zip_layout(dump_pickle(StorageTensor(**(good | change))), [("0", 24)])
        whole = bytearray(layout.size)
        for offset, piece in layout.iterate_frame([zlib.crc32(bytes(24))]):
            whole[offset : offset + len(piece)] = piece
        (tmp_path / "a.pth").write_bytes(whole)
        with pytest.raises((DamagedError, UnsupportedError)):
            read(tmp_path / "a.pth")
        with source_files(tmp_path) as files, pytest.raises((DamagedError, UnsupportedError)):
            read_item_tensor(files, "a.pth", 0, len(whole))

    @pytest.mark.parametrize("name", list(hostile.code_pickles("x")))
    def test_hostile_pickle_in_zip_never_runs(self, tmp_path, name):
        marker = tmp_path / "marker"
        data = hostile.code_pickles(str(marker))[name]
        (tmp_path / "a.pth").write_bytes(hostile.zip_of(hostile.torch_entries(data, {})))
        with source_files(tmp_path) as files:
            size = files.size("a.pth")
            with pytest.raises(UnsafePickleError, match="pickle"):
                read_archive(files, "a.pth")
            with pytest.raises(UnsafePickleError, match="pickle"):
                read_item_tensor(files, "a.pth", 0, size)
            if "inst" not in name and name != "obj":
                read_archive(files, "a.pth", unknown="inert")
        assert not marker.exists()

    def test_malicious_zips_are_refused(self, tmp_path):
        pickled = dump_pickle(StorageTensor("0", 24, "float32", 0, (6,), (1,)))
        (tmp_path / "a.pth").write_bytes(
            hostile.zip_of(hostile.torch_entries(pickled, {"0": bytes(24)}))
        )
        assert read(tmp_path / "a.pth").root.shape == (6,)
        for name, data in hostile.evil_zips(pickled, {"0": bytes(24)}).items():
            (tmp_path / "evil.pth").write_bytes(data)
            with pytest.raises((DamagedError, UnsupportedError, FormatError)):
                print(name, read(tmp_path / "evil.pth"))
            with (
                source_files(tmp_path) as files,
                pytest.raises((DamagedError, UnsupportedError, FormatError)),
            ):
                print(name, read_item_tensor(files, "evil.pth", 0, len(data)))

    def test_compressed_zip_is_refused_with_hint(self, tmp_path):
        torch.save({"a": torch.zeros(100)}, tmp_path / "a.pth")
        with (
            zipfile.ZipFile(tmp_path / "a.pth") as source,
            zipfile.ZipFile(tmp_path / "b.pth", "w", zipfile.ZIP_DEFLATED) as target,
        ):
            for entry in source.infolist():
                target.writestr(entry.filename, source.read(entry))
        with pytest.raises(FormatError, match="compressed") as error:
            read(tmp_path / "b.pth")
        assert "torch.save" in error.value.hint

    def test_zip_rewritten_by_zipfile_is_read(self, tmp_path):
        torch.save({"a": torch.arange(9.0)}, tmp_path / "a.pth")
        with (
            zipfile.ZipFile(tmp_path / "a.pth") as source,
            zipfile.ZipFile(tmp_path / "b.pth", "w") as target,
        ):
            for entry in source.infolist():
                target.writestr(entry.filename, source.read(entry))
        found = read(tmp_path / "b.pth").root["a"]
        assert content(tmp_path / "b.pth", found) == raw_bytes(torch.arange(9.0))

    def test_other_file_kinds_are_named_in_error(self, tmp_path):
        torch.save({"a": torch.ones(2)}, tmp_path / "old", _use_new_zipfile_serialization=False)
        (tmp_path / "pickle").write_bytes(pickle.dumps({"a": 1}))
        with tarfile.open(tmp_path / "tar", "w") as archive:
            archive.add(tmp_path / "pickle", "tensors")
        with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
            archive.writestr("x/y", "z")
        (tmp_path / "noise").write_bytes(b"noise" * 100)
        kinds = {
            "old": "legacy", "pickle": "bare pickle", "tar": "tar archive", "zip": "data.pkl",
            "noise": "not a `torch.save` file",
        }  # fmt: skip
        for name, message in kinds.items():
            with pytest.raises(FormatError, match=message):
                read(tmp_path / name)

    def test_every_truncated_zip_is_damaged(self, tmp_path):
        torch.save({"a": torch.arange(9.0)}, tmp_path / "a.pth")
        whole = (tmp_path / "a.pth").read_bytes()
        for end in range(len(whole)):
            (tmp_path / "b.pth").write_bytes(whole[:end])
            with pytest.raises(DamagedError):
                read(tmp_path / "b.pth")

    @settings(max_examples=100)
    @given(st.data())
    def test_mutated_zips_raise_only_ckpt_errors(self, tmp_path_factory, data):
        folder = tmp_path_factory.getbasetemp() / "mutations"
        folder.mkdir(exist_ok=True)
        buffer = io.BytesIO()
        torch.save({"a": torch.arange(9.0), "b": [torch.zeros(2, 2), 1, "x"]}, buffer)
        whole = bytearray(buffer.getvalue())
        for _ in range(data.draw(st.integers(1, 3))):
            whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
        (folder / "a.pth").write_bytes(whole)
        with contextlib.suppress(CkptError):
            read(folder / "a.pth")


class TestItems:
    def items(self, path, tensors):
        places = []
        with path.open("wb") as file:
            file.write(b"odd")
            for tensor in tensors:
                start = file.tell()
                buffer = io.BytesIO()
                torch.save(tensor, buffer)
                file.write(buffer.getvalue())
                places.append((start, file.tell() - start))
        return places

    def test_item_reader_matches_archive_reader(self, tmp_path):
        tensors = [*all_dtypes().values(), torch.zeros(()), torch.zeros(0, 2), torch.ones(3, 4).t()]
        tensors += [torch.arange(100_000.0), torch.nn.Parameter(torch.ones(2))]
        path = tmp_path / "__0_0.distcp"
        places = self.items(path, tensors)
        with source_files(tmp_path) as files:
            for tensor, (offset, length) in zip(tensors, places, strict=True):
                found = read_item_tensor(files, path.name, offset, length)
                assert found == read_archive(files, path.name, offset, length).root
                stored = raw_bytes(tensor.detach().t() if found.strides else tensor.detach())
                assert content(path, found) == stored
                assert found.shape == tuple(tensor.shape)
                assert found.requires_grad == tensor.requires_grad

    def test_written_item_at_unaligned_offset_is_read(self, tmp_path):
        path = tmp_path / "a.distcp"
        layout = write(path, {"x": torch.arange(5.0)}, base=1261)
        with source_files(tmp_path) as files:
            found = read_archive(files, path.name, 1261, layout.size).root["x"]
        assert found.offset == layout.data_offsets[0]
        assert content(path, found) == raw_bytes(torch.arange(5.0))

    def test_item_without_tensor_is_unsupported(self, tmp_path):
        places = self.items(tmp_path / "a", [{"step": 1}])
        with source_files(tmp_path) as files:
            with pytest.raises(UnsupportedError, match="a single tensor"):
                read_item_tensor(files, "a", *places[0])
            assert read_archive(files, "a", *places[0]).root == {"step": 1}

    def test_wrong_item_ranges_are_refused(self, tmp_path):
        (start, length), (second, _) = self.items(tmp_path / "a", [torch.ones(9), torch.ones(9)])
        with source_files(tmp_path) as files:
            for offset, nbytes in [
                (start + 1, length), (start, length - 1), (start, length + 1), (start - 1, length),
                (start, second + length - start), (second, length + 1), (0, 0), (start, 10**9),
                (-1, length), (start, -1),
            ]:  # fmt: skip
                with pytest.raises((DamagedError, UnsupportedError, FormatError)):
                    read_item_tensor(files, "a", offset, nbytes)

    def test_work_per_read_item_is_bounded(self, tmp_path):
        places = self.items(tmp_path / "a", [torch.full((8, 8), float(i)) for i in range(500)])
        with source_files(tmp_path) as files, effort.counted() as counted:
            found = [read_item_tensor(files, "a", *place) for place in places]
        assert all(isinstance(tensor, StoredTensor) for tensor in found)
        assert counted.lines < 120 * len(places)

    def test_known_item_patterns_need_two_short_reads(self, tmp_path, monkeypatch):
        shapes = [(40, 100), (50, 80), (80, 50), (100, 40)]
        places = self.items(tmp_path / "a", [torch.zeros(shape) for shape in shapes * 2])
        (length,) = {length for _, length in places}
        with source_files(tmp_path) as files:
            for place in places[:4]:
                read_item_tensor(files, "a", *place)
            taken = []
            read = files.read_up_to
            monkeypatch.setattr(files, "read_up_to", lambda *x: taken.append(x[2]) or read(*x))
            found = [read_item_tensor(files, "a", *place).shape for place in places[4:]]
        assert found == shapes
        assert len(taken) == 2 * len(found)
        assert max(taken) < length // 4
