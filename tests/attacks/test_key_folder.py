"""Attacks on the folder of keys itself: other users who may write it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from controlplane.bus.access import Access
from controlplane.bus.key_folder import KeyFolder
from controlplane.plane import ControlPlane
from schemas.errors import KeyFileError


@pytest.mark.parametrize("inner", ["", "allowed", "revoked", "issued"])
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_is_refused_by_the_bus_and_by_every_command(
    folder: KeyFolder, tmp_path: Path, inner: str, mode: int
) -> None:
    folder.add("node", "agent", ("0",))
    (folder.path / inner).chmod(mode)
    plane = ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", keys=folder.path)
    says = rf"others can write the folder {folder.path / inner} \(mode {mode:04o}\).*chmod 700"
    with pytest.raises(KeyFileError, match=says):
        plane.open()
    changes: list[Callable[[], object]] = [
        lambda: folder.add("other", "observer", ()),
        lambda: folder.revoke("node"),
        folder.make_server,
    ]
    for change in changes:
        with pytest.raises(KeyFileError, match=says):
            change()
    assert [path.name for path in (folder.path / "allowed").iterdir()] == ["node.json"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(folder: KeyFolder) -> None:
    os.chown(folder.path / "revoked", 12_345, 12_345)
    with pytest.raises(KeyFileError, match="belongs to another user"):
        folder.access_list()


def test_in_a_folder_with_the_sticky_bit_others_can_replace_nothing(folder: KeyFolder) -> None:
    folder.add("node", "agent", ("0",))
    folder.path.chmod(0o1777)  # as Kubernetes mounts a Secret
    assert len(folder.access_list().grants) == 1


def test_a_revoked_key_that_another_user_brings_back_stays_out(folder: KeyFolder, tmp_path: Path) -> None:
    """The folder is opened to all while the bus runs, and the file of the revocation is moved away."""
    folder.add("node", "agent", ("0",))
    public = folder.allowed("node").public
    record = (folder.path / "allowed" / "node.json").read_bytes()
    folder.revoke("node")
    access = Access(folder)
    (folder.path / "revoked").chmod(0o777)
    (folder.path / "revoked" / "node.1.json").rename(tmp_path / "away")
    (folder.path / "allowed" / "node.json").write_bytes(record)
    (folder.path / "allowed" / "node.json").chmod(0o600)
    with pytest.raises(KeyFileError, match="others can write the folder"):
        access._read()
    assert access.grant_of(public.encode()) == "key node was revoked"
