"""Checkpoints and manifests: every fault of a file, a directory or a path is found and named."""

import contextlib
import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.torch import save_file

from schemas.errors import CheckpointError
from schemas.safetensors.format import KEYS_MAX, read_layout
from schemas.safetensors.manifest import build_manifest, check_directory
from schemas.safetensors.paths import resolve_below

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
    assert manifest.content == "5d419c17f95ab6212da4aa3e8f98a5d2c834a2700004e2688b397edb4bee21aa"


def test_the_digests_do_not_depend_on_how_tensors_are_spread_over_files(directory: Path, tmp_path: Path) -> None:
    spread = tmp_path / "spread"
    spread.mkdir()
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, spread / f"model-{name}.safetensors")
    assert build_manifest(spread, content=True) == build_manifest(directory, content=True)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": TENSORS["a"]}, "holds 1 tensors"),
        ({"a": TENSORS["a"], "b": torch.ones(5, dtype=torch.bfloat16)}, "bytes of tensors"),
        ({"a": TENSORS["a"], "c": TENSORS["b"]}, "a name, dtype or shape differs"),
        ({"a": TENSORS["a"].reshape(3, 2), "b": TENSORS["b"]}, "a name, dtype or shape differs"),
        ({"a": TENSORS["a"], "b": torch.ones(4, dtype=torch.float16)}, "a name, dtype or shape differs"),
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
