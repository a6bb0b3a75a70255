"""Where agents keep their journals by default."""

import logging
import socket
from pathlib import Path

import pytest

from schemas.errors import ConfigError
from schemas.storage import filesystems
from workers import state_folder as module
from workers.state_folder import state_folder, warn_if_network


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(module, "LOCAL", tmp_path / "local")
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    return tmp_path


def mount(monkeypatch: pytest.MonkeyPatch, place: Path, kind: str) -> None:
    monkeypatch.setattr(filesystems, "mounts", lambda: [("/", "ext4"), (str(place), kind)])


def test_each_bus_has_a_folder_of_its_own(home: Path) -> None:
    assert state_folder("tcp://trainer:5555") == home / "state/rolloutctl/node7/trainer:5555"
    assert state_folder("ipc:///run/me/bus").name == "ipc:%2F%2F%2Frun%2Fme%2Fbus"
    assert (home / "state/rolloutctl").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("named", ["", "relative/path"])
def test_without_a_state_home_it_is_below_the_users(home: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", named)
    monkeypatch.setenv("HOME", str(home))
    assert state_folder("tcp://trainer:1") == home / ".local/state/rolloutctl/node7/trainer:1"


def test_a_home_on_a_network_is_said_and_not_used(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mount(monkeypatch, home / "state", "nfs4")
    folder = state_folder("tcp://trainer:1")
    assert folder.is_relative_to(home / "local") and folder.is_dir()
    (line,) = caplog.records
    assert line.levelno == logging.WARNING and "is on a network file system (nfs4)" in line.getMessage()
    assert "--state-dir" in line.getMessage()


def test_a_folder_of_somebody_else_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount(monkeypatch, home / "state", "lustre")
    mine = state_folder("tcp://trainer:1").parents[1]
    mine.chmod(0o777)
    with pytest.raises(ConfigError, match="is not a folder that only this user writes to"):
        state_folder("tcp://trainer:1")


def test_a_chosen_folder_on_a_network_is_used_and_said(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert warn_if_network(home / "mine") == home / "mine" and not caplog.records
    mount(monkeypatch, home, "nfs")
    assert warn_if_network(home / "mine") == home / "mine"
    assert "is on a network file system (nfs)" in caplog.text
