"""What keeps an engine's pause short: files that are read beforehand, and fewer requests while it stands."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from schemas.commands import Checkpoint
from schemas.events import CheckSource, EngineCall, Flush, Load, Pause, Resume
from schemas.safetensors.manifest import build_manifest
from tests.engines.http_servers import HttpServer, Reply
from tests.engines.releases import save_tensor
from tests.engines.test_unanswered import Fake
from workers.engines import checkpoint as checkpoint_module
from workers.engines.page_cache import STEP_BYTES, free_bytes, read_ahead

SOON: Final = 60.0
LOAD: Final = Load(7, Checkpoint("step_7"), None)


def save_files(directory: Path) -> list[Path]:
    """Write two files of one and a half and of three steps, and drop them from the page cache."""
    files = [directory / name for name in ("model-1.safetensors", "model-2.safetensors")]
    for path, size in zip(files, (STEP_BYTES * 3 // 2, STEP_BYTES * 3), strict=True):
        path.write_bytes(os.urandom(size))
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return files


def from_disk(read: Callable[[], object]) -> int:
    """Return the bytes that this process had read from a disk meanwhile."""

    def so_far() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))

    before = so_far()
    read()
    return so_far() - before


def loadable(kind: str, folder: Path) -> Fake:
    """A server that was launched from the folder, below which is a checkpoint of its model."""
    shutil.copy(save_tensor(folder / "step_7") / "model.safetensors", folder)
    return Fake(kind, folder)


# --- reading ahead ----------------------------------------------------------------------------------------------------


def test_what_was_read_ahead_comes_without_the_disk(tmp_path: Path) -> None:
    files = save_files(tmp_path)
    sizes = sum(path.stat().st_size for path in files)
    assert read_ahead(tmp_path, time.monotonic() + SOON, 2 * sizes) == sizes
    assert from_disk(lambda: [path.read_bytes() for path in files]) == 0
    assert from_disk(lambda: read_ahead(tmp_path, time.monotonic() + SOON, 2 * sizes)) == 0


@pytest.mark.parametrize("most_bytes", [0, 100, STEP_BYTES, 2 * STEP_BYTES])
def test_no_more_is_read_ahead_than_memory_allows(most_bytes: int, tmp_path: Path) -> None:
    save_files(tmp_path)
    assert read_ahead(tmp_path, time.monotonic() + SOON, most_bytes) == most_bytes


def test_reading_ahead_ends_at_its_time(tmp_path: Path) -> None:
    save_files(tmp_path)
    assert read_ahead(tmp_path, time.monotonic()) == 0


def test_files_that_are_gone_are_nothing_to_read_ahead(tmp_path: Path) -> None:
    assert read_ahead(tmp_path / "gone", time.monotonic() + SOON) == 0


def test_free_memory_is_that_of_the_machine_or_of_the_control_group(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/pod"
    for folder in (tmp_path / "proc/self", group):
        folder.mkdir(parents=True)
    assert free_bytes(tmp_path) == 0
    (tmp_path / "proc/meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  1000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/other\n0::/pod\n")
    assert free_bytes(tmp_path) == 1_024_000
    (group / "memory.current").write_text("700\n")
    (group / "memory.stat").write_text("anon 500\nfile 200\nfile_mapped 7\n")
    (group / "memory.max").write_text("max\n")
    assert free_bytes(tmp_path) == 1_024_000
    (group / "memory.max").write_text("800\n")
    assert free_bytes(tmp_path) == 300
    assert free_bytes() > 0


@pytest.mark.anyio
@pytest.mark.one_loop
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_a_check_reads_ahead_in_half_of_its_time_what_it_has_not_read_for_a_digest(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[Path, float]] = []
    monkeypatch.setattr(checkpoint_module, "read_ahead", lambda directory, until: read.append((directory, until)))
    fake, directory, began = loadable(kind, tmp_path), (tmp_path / "step_7").resolve(), time.monotonic()
    for content in (False, True):
        await fake.performs(CheckSource(Checkpoint("step_7"), build_manifest(directory, content=content), 7))
    await fake.performs(LOAD)
    ((read_from, until),) = read
    assert read_from == directory and began + 5 <= until <= time.monotonic() + 5


# --- fewer requests ---------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.one_loop
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_the_counters_are_not_read_right_after_a_call(kind: str, tmp_path: Path) -> None:
    fake = Fake(kind, tmp_path)
    fake.answers = {"/metrics": (200, "text\n")}
    with HttpServer(fake.answer) as server:
        engine = fake.engine(server.url)
        read = []
        for call in (None, Resume(), None):
            if call is not None:
                await engine.perform(call, 10.0)
            before = len(server.requests)
            assert (await engine.observe()).tokenizer == "present"
            read.append("/metrics" in [request.path for request in server.requests[before:]])
        await engine.close()
    assert read == [True, False, True]


NOT_FLUSHED: Final = "Weights were updated, but the cache was not flushed because requests are still running or queued."


def sglang(folder: Path, version: str = "0.5.23", device: str = "cpu") -> Fake:
    """A server that was launched on that device."""
    fake = loadable("sglang", folder)
    told = {"version": version, "device": device, "random_seed": 1, "tp_size": 1}
    fake.answers = {"/server_info": (200, {**told, "model_path": str(folder), "load_format": "auto"})}
    return fake


@pytest.mark.anyio
@pytest.mark.one_loop
@pytest.mark.parametrize(
    ("version", "device", "answers", "flushes"),
    [
        ("0.5.23", "cpu", {}, 0),
        ("0.5.23", "cuda", {}, 1),
        ("0.5.21", "cpu", {}, 1),
        ("0.5.23", "cpu", {"/update_weights_from_disk": (400, NOT_FLUSHED)}, 1),
    ],
    ids=["flushed", "may lack memory", "would die", "refused"],
)
async def test_a_load_of_sglang_that_has_flushed_is_not_followed_by_another_flush(
    version: str, device: str, answers: dict[str, Reply], flushes: int, tmp_path: Path
) -> None:
    """Its own flush, after a load, collects garbage for a third of a second on a CPU, while no token comes."""
    fake = sglang(tmp_path, version, device)
    fake.answers |= answers
    await fake.performs(LOAD, Flush())
    assert fake.posted == ["/update_weights_from_disk", "/update_weight_version", *["/flush_cache"] * flushes]


@pytest.mark.anyio
@pytest.mark.one_loop
@pytest.mark.parametrize("calls", [(Flush(),), (LOAD, Flush(), Flush()), (LOAD, Pause("keep"), Flush())])
async def test_any_other_flush_of_sglang_is_made(calls: tuple[EngineCall, ...], tmp_path: Path) -> None:
    fake = sglang(tmp_path)
    await fake.performs(*calls)
    assert fake.posted.count("/flush_cache") == 1
