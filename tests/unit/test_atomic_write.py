"""Reports and timelines are written completely or not at all, and never over their inputs."""

import os
import shutil
from pathlib import Path

import pytest

from schemas.storage.atomic_write import atomic_write
from tests.running import files_of_at_most, python, typed

RECORDED = Path(__file__).parents[1] / "replays" / "torn-fleet.db"
COMMANDS = ("report", "timeline")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return Path(shutil.copy(RECORDED, tmp_path / "run.db"))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_log_itself_is_never_overwritten(command: str, log: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(log)
    os.link(log, tmp_path / "same")
    for out in (log, tmp_path / "link", tmp_path / "same"):
        refused = typed(command, log, "-o", out, "--force")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert f"{out} is an input of this command; nothing was written" in refused.stderr
    assert log.read_bytes() == RECORDED.read_bytes() and (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("command", COMMANDS)
def test_only_the_owner_can_read_the_result(command: str, log: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("everybody can read what was here before")
    out.chmod(0o644)
    before = os.umask(0)
    try:
        assert typed(command, log, "-o", out, "--force").returncode == 0
    finally:
        os.umask(before)
    assert out.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_or_device_is_refused_and_stays(command: str, log: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    refused = typed(command, log, "-o", pipe, "--force")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == f"rolloutctl: {pipe} is not a regular file; nothing was written. Name a file\n"
    assert pipe.is_fifo()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["out.html", "out.json.gz"])
def test_a_full_disk_leaves_nothing_behind(command: str, name: str, log: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with files_of_at_most(1_000):
        refused = typed(command, log, "-o", place / name)
    assert refused.returncode in (2, 3) and "Traceback" not in refused.stderr
    assert f"{place / name}" in refused.stderr and "File too large" in refused.stderr
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_the_draft_of_a_killed_process_does_not_disturb(command: str, log: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    # Run as the first process of a container, each time with the same id.
    left = f"import os, sys; open('{tmp_path}/.out.json.%d.partial' % os.getpid(), 'x')"
    script = f"{left}; from controlplane.cli.__main__ import main; main()"
    done = python("-c", script, command, log, "-o", out)
    assert done.returncode == 0, done.stderr
    assert out.exists()


def test_a_file_system_without_hard_links_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)  # as in front of an object store; none can be mounted here
    with atomic_write(tmp_path / "out", force=False) as file:
        file.write(b"new")
    assert (tmp_path / "out").read_bytes() == b"new"
    with pytest.raises(PermissionError), atomic_write(tmp_path / "out", force=False) as file:
        file.write(b"newer")
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"new"]


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), atomic_write(tmp_path / "out", force=False) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
