"""Fixtures for attacks on keys."""

from pathlib import Path

import pytest

from controlplane.bus.key_folder import KeyFolder


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    folder = KeyFolder(tmp_path / "keys")
    folder.make_server()
    return folder


@pytest.fixture(autouse=True)
def no_keys_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROLLOUTCTL_KEY", "ROLLOUTCTL_KEY_FILE", "ROLLOUTCTL_SERVER_KEY", "ROLLOUTCTL_KEYS"):
        monkeypatch.delenv(name, raising=False)
