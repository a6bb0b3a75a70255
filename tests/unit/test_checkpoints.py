"""Checkpoints and manifests: every fault of a file, a directory or a path is found and named."""

import contextlib
import hashlib
import json
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.torch import save_file

from schemas.commands import Checkpoint
from schemas.errors import CheckpointError
from schemas.safetensors import manifest as manifest_module
from schemas.safetensors.digest import PIECE_BYTES, ContentDigest, tensor_digest
from schemas.safetensors.format import KEYS_MAX, TensorPlace, find_tensors, read_layout
from schemas.safetensors.manifest import build_manifest, check_directory
from schemas.safetensors.paths import resolve_below
from schemas.safetensors.reading import content_digest, read_tensors
from workers.engines import checkpoint as checkpoint_module
from workers.engines.checkpoint import SourceChecker

TENSORS = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "ckpt"
    directory.mkdir()
    save_file(TENSORS, directory / "model.safetensors")
    return directory


def test_the_layout_is_that_of_the_tensors(directory: Path) -> None:
    assert {name: str(spec) for name, spec in read_layout(directory).items()} == {"a": "F32 [2, 3]", "b": "BF16 [4]"}


def test_a_directory_holds_what_its_manifest_says(directory: Path) -> None:
    manifest = build_manifest(directory, content=True)
    assert (manifest.tensors, manifest.nbytes) == (2, 32)
    check_directory(directory, manifest)
    assert build_manifest(directory, content=False) == replace(manifest, content=None)


def test_the_digests_are_the_same_in_every_version(directory: Path) -> None:
    manifest = build_manifest(directory, content=True)
    assert manifest.layout == "bf353ab91256241eb4d7902d4b677f398a894ca1b3374c9d6d09a8c0ff5bee28"
    assert manifest.content == "770f663e9018d3a58d9a2400a4f342d9f8e138ac3e127ee519e1c79fda4f1a0b"


def test_the_digests_do_not_depend_on_how_tensors_are_spread_over_files(directory: Path, tmp_path: Path) -> None:
    spread = tmp_path / "spread"
    spread.mkdir()
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, spread / f"model-{name}.safetensors")
    assert build_manifest(spread, content=True) == build_manifest(directory, content=True)


def test_a_tensor_is_digested_in_pieces_as_the_definition_says(tmp_path: Path) -> None:
    tensor = torch.arange(2 * PIECE_BYTES + 5, dtype=torch.uint8)
    save_file({"t": tensor}, tmp_path / "model.safetensors")
    raw = tensor.numpy().tobytes()
    expected = hashlib.sha256(b"rolloutctl content 2\n")
    expected.update(struct.pack("<I1sI2sIQQ", 1, b"t", 2, b"U8", 1, len(raw), len(raw)))
    for start in (0, PIECE_BYTES, 2 * PIECE_BYTES):
        expected.update(hashlib.sha256(raw[start : start + PIECE_BYTES]).digest())
    found = build_manifest(tmp_path, content=True).content
    assert found == expected.hexdigest() == tensor_digest([("t", "U8", [len(raw)], raw)])


@pytest.mark.parametrize("content", [False, True])
def test_tensors_are_read_into_memory_and_digested_in_one_pass(directory: Path, content: bool) -> None:
    save_file({"c": torch.zeros(3)}, directory / "more.safetensors")
    memory = {name: memoryview(bytearray(size)) for name, size in {"a": 24, "b": 8, "c": 12}.items()}
    found = read_tensors(find_tensors(directory), memory, content=content)
    assert found == (build_manifest(directory, content=True).content if content else None)
    assert bytes(memory["a"]) == TENSORS["a"].numpy().tobytes()
    assert bytes(memory["b"]) == b"\x80\x3f" * 4


@pytest.mark.parametrize("content", [False, True])
def test_a_file_that_becomes_shorter_while_it_is_read_is_refused(directory: Path, content: bool) -> None:
    places = find_tensors(directory)
    os.truncate(directory / "model.safetensors", 100)
    memory = {"a": memoryview(bytearray(24)), "b": memoryview(bytearray(8))}
    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        read_tensors(places, memory, content=content)


def test_the_content_is_read_once_before_a_load_unless_the_files_were_written_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digested: list[ContentDigest] = []

    def counting(places: Mapping[str, TensorPlace]) -> ContentDigest:
        digested.append(content_digest(places))
        return digested[-1]

    monkeypatch.setattr(manifest_module, "content_digest", counting)
    files, source = SourceChecker(directory.parent), Checkpoint(directory.name)
    manifest = build_manifest(directory, content=True)
    file = directory / "model.safetensors"
    os.utime(file, ns=(0, 0))  # as if it had been saved some time ago
    for _ in range(2):
        files.checked_directory(source, manifest, None)
    found = [digest.hexdigest() for digest in digested]
    assert found == [manifest.content] * 2  # of the manifest itself, and of the first check
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"\x00")
    with pytest.raises(CheckpointError, match="the right tensors with other values"):
        files.checked_directory(source, manifest, None)


def test_headers_are_read_once_before_a_load_unless_something_differs(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is paused when a load asks again."""
    read: list[Path] = []

    def counting(folder: Path) -> dict[str, TensorPlace]:
        read.append(folder)
        return find_tensors(folder)

    monkeypatch.setattr(checkpoint_module, "find_tensors", counting)
    other = tmp_path / "other"
    other.mkdir()
    save_file({"a": TENSORS["a"]}, other / "model.safetensors")
    files, source, model = SourceChecker(directory.parent), Checkpoint(directory.name), str(directory)
    file = directory / "model.safetensors"
    os.utime(file, ns=(0, 0))
    for _ in range(2):
        assert files.checked_directory(source, None, model).directory == directory.resolve()
    assert len(read) == 1
    files.checked_directory(source, build_manifest(directory, content=False), model)
    assert len(read) == 2
    with pytest.raises(CheckpointError, match="is of another model"):
        files.checked_directory(source, None, str(other))
    files.checked_directory(source, None, model)
    os.utime(file, ns=(1, 1))
    files.checked_directory(source, None, model)
    assert len(read) == 5
    with file.open("ab") as opened:
        opened.write(b"0")
    with pytest.raises(CheckpointError, match="its header promises"):
        files.checked_directory(source, None, model)


def test_the_content_of_files_that_were_just_written_is_read_again(directory: Path) -> None:
    """Their time of writing would not change if they were written once more now."""
    files, source = SourceChecker(directory.parent), Checkpoint(directory.name)
    manifest, file = build_manifest(directory, content=True), directory / "model.safetensors"
    soon = time.time_ns() + 10**12
    os.utime(file, ns=(soon, soon))
    files.checked_directory(source, manifest, None)
    assert files._checked is None


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": TENSORS["a"]}, "holds 1 tensors, .* the trainer's manifest has 2 tensors"),
        (
            {"a": TENSORS["a"], "b": torch.ones(5, dtype=torch.bfloat16)},
            "holds 2 tensors, 34 bytes, .* has 2 ",
        ),
        (
            {"a": TENSORS["a"], "c": TENSORS["b"]},
            "holds 2 tensors, 32 bytes, layout .* has 2 tensors, 32 bytes",
        ),
        ({"a": TENSORS["a"].reshape(3, 2), "b": TENSORS["b"]}, "holds 2 tensors, 32 bytes, layout"),
        ({"a": TENSORS["a"], "b": torch.ones(4, dtype=torch.float16)}, "holds 2 tensors, 32 bytes, layout"),
        ({"a": TENSORS["a"] + 1, "b": TENSORS["b"]}, "the right tensors with other values"),
    ],
    ids=["a tensor less", "more bytes", "another name", "another shape", "another dtype", "other values"],
)
def test_a_directory_that_differs_from_the_manifest_is_refused(
    directory: Path, tmp_path: Path, tensors: dict[str, torch.Tensor], message: str
) -> None:
    manifest = build_manifest(directory, content=True)
    other = tmp_path / "other"
    other.mkdir()
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        check_directory(other, manifest)


def header(size: int, text: bytes) -> bytes:
    return struct.pack("<Q", size) + text


def entry(**fields: object) -> bytes:
    """A file with one tensor of two floats, with some fields of its header changed, and eight bytes of data."""
    text = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | fields}).encode()
    return header(len(text), text) + bytes(8)


CUT_OFF = {
    "empty": b"",
    "half a size": b"\x01\x02",
    "a header beyond the end": header(10**6, b"{}"),
    "data beyond the end": entry()[:-1],
}
DAMAGED = {
    "a huge header": header(2**62, b"{}"),
    "not json": header(4, b"nope"),
    "not an object": header(4, b"[12]"),
    "an unknown dtype": entry(dtype="F33"),
    "a gap before the data": entry(data_offsets=[4, 12]),
    "a shape of another size": entry(shape=[3]),
    "an unknown field": entry(strides=[1]),
    "bytes after the data": entry() + b"x",
}


@pytest.mark.parametrize(
    ("content", "message"),
    [*((content, "cut off") for content in CUT_OFF.values()), *((content, "damaged") for content in DAMAGED.values())],
    ids=[*CUT_OFF, *DAMAGED],
)
def test_a_file_that_is_cut_off_or_damaged_is_refused_by_name(directory: Path, content: bytes, message: str) -> None:
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"model.safetensors.*{message}"):
        read_layout(directory)


@pytest.mark.parametrize("cut", [1, 10, 31])
def test_a_file_of_the_library_that_is_cut_off_is_refused(directory: Path, cut: int) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match="cut off"):
        read_layout(directory)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a":0' + b',"a":0' * KEYS_MAX + b"}", "more than 2,000,000 keys"),
        (b'{"a":' + b"[" * 200_000, "unreadable header"),
        (b'{"a":' * 200_000, "unreadable header"),
    ],
    ids=["keys", "lists", "mappings"],
)
def test_a_header_of_too_much_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(header(len(text), text))
    with pytest.raises(CheckpointError, match=message):
        read_layout(tmp_path)


def test_a_tensor_in_two_files_is_refused(directory: Path) -> None:
    save_file({"a": TENSORS["a"]}, directory / "more.safetensors")
    with pytest.raises(CheckpointError, match="more.safetensors holds the tensor 'a', which is in model.safetensors"):
        read_layout(directory)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_formats_that_run_code_are_never_read(tmp_path: Path, name: str) -> None:
    torch.save(TENSORS, tmp_path / name)
    with pytest.raises(CheckpointError, match="safetensors"):
        read_layout(tmp_path)


def test_a_path_that_is_not_a_directory_is_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        read_layout(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="model.safetensors"):
        read_layout(directory / "model.safetensors")


@pytest.mark.parametrize("path", ["", " ", "/etc", "~/x", "..", "a/../b", "a\0b", "x" * 600, "\ud800"])
def test_a_path_that_is_not_below_the_root_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(CheckpointError, match="path refused"):
        resolve_below(tmp_path, path)


def test_a_symbolic_link_out_of_the_root_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    (root / "loop").symlink_to(root / "loop")
    with pytest.raises(CheckpointError, match="through a symbolic link"):
        resolve_below(root, "link/x")
    with pytest.raises(CheckpointError, match="path refused"):
        resolve_below(root, "loop/x")
    assert resolve_below(root, "a/b") == root / "a" / "b"


@settings(max_examples=200, derandomize=True, deadline=None)
@given(data=st.data())
def test_a_damaged_file_raises_nothing_but_a_checkpoint_error(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    body = bytearray((folder / "model.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    (folder / "model.safetensors").write_bytes(body)
    with contextlib.suppress(CheckpointError):
        read_layout(folder)
