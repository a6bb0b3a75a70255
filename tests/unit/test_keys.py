"""Key files, the folder of a bus, and `rolloutctl keys`: what is written, read, refused and never shown."""

import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner
from rich.console import Console

from controlplane.bus.access import Access
from controlplane.bus.key_folder import AllowedKey, KeyFolder
from controlplane.cli.__main__ import cli
from controlplane.machine.permissions import MAY_SEND, Grant, KeyRole, refusal
from schemas import wire
from schemas.agent_status import AgentStatus, RequestCounts
from schemas.errors import ConfigError, KeyFileError
from schemas.transport.keys import KeyPair, KeySource, PeerKeys, read_peer_keys, write_private
from tests.golden.samples import SAMPLES


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- files ------------------------------------------------------------------------------------------------------------


def test_every_key_file_is_private_from_its_first_byte(
    tmp_path: Path, umask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[int] = []

    def spy(path: Any, flags: int, given: int = 0o777, **more: Any) -> int:
        descriptor = real_open(path, flags, given, **more)
        if flags & os.O_CREAT:
            assert flags & os.O_EXCL
            created.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
            assert os.fstat(descriptor).st_size == 0
        return descriptor

    real_open = os.open
    monkeypatch.setattr(os, "open", spy)
    folder = KeyFolder(tmp_path / "keys")
    folder.make_server()
    folder.add("node", "agent", ("0",))
    folder.revoke("node")
    assert len(created) >= 4
    assert set(created) == {0o600}
    found = list(folder.path.rglob("*"))
    assert {mode(path) for path in found if path.is_file()} == {0o600}
    assert {mode(path) for path in [folder.path, *found] if path.is_dir()} == {0o700}
    assert not [path for path in found if path.name.startswith(".")], "drafts are gone"


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o644, 0o660, 0o602, 0o610])
def test_a_secret_that_others_can_use_is_refused_with_the_way_out(folder: KeyFolder, bits: int) -> None:
    issued = folder.add("node", "agent", ("0",))
    for path, read in ((issued, lambda: read_peer_keys(issued)), (folder.path / "server.key", folder.server_pair)):
        path.chmod(bits)
        with pytest.raises(KeyFileError, match=rf"others can use it \(mode {bits:04o}\).*chmod 600"):
            read()


def test_a_mounted_secret_may_be_read_only_and_behind_a_link(folder: KeyFolder, tmp_path: Path) -> None:
    issued = folder.add("node", "agent", ("0",))
    issued.chmod(0o400)
    (tmp_path / "mounted").symlink_to(issued)
    assert read_peer_keys(tmp_path / "mounted").name == "node"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not JSON"),
        (b"-----BEGIN", "not JSON"),
        (b"\xff" * 100, "not JSON"),
        (b"[" * 60_000, "got `array`"),
        (b"{}", "missing required field"),
        (b" " * 70_000, "larger than"),
        (b'{"name": "x", "pair": {"public": "SECRETSECRET", "secret": "SECRETSECRET"}, "server": ""}', "regex"),
        (b'{"name": "../x", "pair": {"public": "SECRETSECRET", "secret": "SECRETSECRET"}, "server": ""}', "regex"),
    ],
)
def test_a_file_that_holds_something_else_is_refused_without_showing_it(
    tmp_path: Path, content: bytes, says: str
) -> None:
    path = tmp_path / "node.key"
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(KeyFileError, match=says) as caught:
        read_peer_keys(path)
    assert "SECRET" not in str(caught.value)


def test_a_pipe_or_folder_in_the_place_of_a_key_file_stops_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(KeyFileError, match="is not a file"):
        read_peer_keys(tmp_path / "pipe")
    with pytest.raises(KeyFileError, match="can't be read|is not a file"):
        read_peer_keys(tmp_path)
    with pytest.raises(KeyFileError, match="can't be read"):
        read_peer_keys(tmp_path / "none")


def test_keys_that_were_mangled_on_the_way_are_refused(folder: KeyFolder, tmp_path: Path) -> None:
    keys = read_peer_keys(folder.add("node", "agent", ("0",)))
    other = KeyPair.generate()
    mixed = PeerKeys(name="a", pair=KeyPair(public=other.public, secret=keys.pair.secret), server=keys.server)
    write_private(tmp_path / "a.key", mixed)
    with pytest.raises(KeyFileError, match="don't belong together"):
        read_peer_keys(tmp_path / "a.key")
    write_private(tmp_path / "b.key", PeerKeys(name="b", pair=keys.pair, server="#" * 40))
    with pytest.raises(KeyFileError, match="public key of the bus in it is damaged"):
        read_peer_keys(tmp_path / "b.key")


def test_nothing_that_is_printed_has_a_secret(folder: KeyFolder, capsys: pytest.CaptureFixture[str]) -> None:
    keys = read_peer_keys(folder.add("node", "agent", ("0",)))
    source = KeySource.find(keys)
    for value in (keys, keys.pair, source, folder, [keys]):
        Console(width=200).print(value)
        print(repr(value), value)  # noqa: T201
    printed = capsys.readouterr().out
    assert keys.pair.secret not in printed
    assert keys.pair.public in printed


# --- where a peer finds its keys --------------------------------------------------------------------------------------


def test_keys_come_from_the_argument_then_a_file_then_the_environment(
    folder: KeyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert KeySource.find() is None
    first, second, third = (folder.add(name, "agent", ("0",)) for name in ("first", "second", "third"))
    pair = read_peer_keys(third).pair
    monkeypatch.setenv("ROLLOUTCTL_KEY", pair.secret)
    with pytest.raises(KeyFileError, match="ROLLOUTCTL_SERVER_KEY must have the public key") as caught:
        KeySource.find()
    assert pair.secret not in str(caught.value)
    monkeypatch.setenv("ROLLOUTCTL_SERVER_KEY", folder.server_pair().public)
    assert (found := KeySource.find()) is not None
    assert found.keys.pair.public == pair.public
    monkeypatch.setenv("ROLLOUTCTL_KEY_FILE", str(second))
    assert (found := KeySource.find()) is not None
    assert found.keys.name == "second"
    assert (found := KeySource.find(first)) is not None
    assert found.keys.name == "first"


@pytest.mark.parametrize("secret", ["short", "#" * 40, "ä" * 40])
def test_a_wrong_secret_in_the_environment_is_refused_unseen(
    folder: KeyFolder, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    monkeypatch.setenv("ROLLOUTCTL_KEY", secret)
    monkeypatch.setenv("ROLLOUTCTL_SERVER_KEY", folder.server_pair().public)
    with pytest.raises(KeyFileError, match="ROLLOUTCTL_KEY has no secret key") as caught:
        KeySource.find()
    assert secret not in str(caught.value)


def test_a_file_that_is_replaced_is_read_again_and_a_broken_one_keeps_the_old_keys(
    folder: KeyFolder, caplog: pytest.LogCaptureFixture
) -> None:
    issued = folder.add("node", "agent", ("0",))
    source = KeySource.find(issued)
    assert source is not None
    before = source.keys
    assert not source.refresh()
    issued.write_bytes(folder.add("node-2", "agent", ("0",)).read_bytes())
    assert source.refresh()
    assert source.keys.pair != before.pair
    assert not source.refresh()
    kept = source.keys
    issued.chmod(0o644)
    issued.write_text("{}")
    with caplog.at_level(logging.ERROR):
        assert not source.refresh()
    assert source.keys == kept
    assert "the keys read before stay in use" in caplog.text
    issued.unlink()
    assert not source.refresh()


# --- the folder of a bus ----------------------------------------------------------------------------------------------


def test_a_key_may_come_in_until_it_is_revoked(folder: KeyFolder) -> None:
    public = read_peer_keys(folder.add("node", "agent", ("0", "actor.1"))).pair.public
    assert folder.access_list().grants == {public: Grant(name="node", role="agent", places=("0", "actor.1"))}
    folder.revoke("node")
    assert folder.access_list() == ({}, {public: "node"})
    again = read_peer_keys(folder.add("node", "agent", ("0",))).pair.public
    folder.revoke("node")
    assert folder.access_list() == ({}, {public: "node", again: "node"})


def test_a_revoked_key_stays_out_even_where_it_is_allowed_again(folder: KeyFolder) -> None:
    folder.add("node", "agent", ("0",))
    record = (folder.path / "allowed" / "node.json").read_bytes()
    folder.revoke("node")
    (folder.path / "allowed" / "node.json").write_bytes(record)
    assert folder.access_list().grants == {}


def test_a_broken_record_lets_no_peer_in_and_disturbs_no_other(
    folder: KeyFolder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.add("good", "operator", ())
    bad = folder.path / "allowed" / "bad.json"
    for content in (b"", b"{", b'{"name": "bad", "role": "king", "public": []}', b"\0" * 100_000):
        bad.write_bytes(content)
        caplog.clear()
        grants = folder.access_list().grants
        assert [grant.name for grant in grants.values()] == ["good"]
        assert "bad.json" in caplog.text
        assert "admits no peer" in caplog.text


@pytest.mark.parametrize("bits", [0o620, 0o602, 0o666])
def test_a_record_that_others_can_write_lets_no_peer_in(
    folder: KeyFolder, caplog: pytest.LogCaptureFixture, bits: int
) -> None:
    folder.add("a", "operator", ())
    (folder.path / "allowed" / "a.json").chmod(bits)
    assert folder.access_list().grants == {}
    assert f"others can write it (mode {bits:04o})" in caplog.text


def test_one_key_under_two_names_counts_as_the_first(folder: KeyFolder, caplog: pytest.LogCaptureFixture) -> None:
    folder.add("a", "observer", ())
    key = folder.allowed("a")
    twin = AllowedKey(name="b", role="operator", public=key.public)
    write_private(folder.path / "allowed" / "b.json", twin)
    (grant,) = folder.access_list().grants.values()
    assert (grant.name, grant.role) == ("a", "observer")
    assert "is that of a" in caplog.text


def test_names_are_not_taken_twice(folder: KeyFolder) -> None:
    folder.add("node", "agent", ("0",))
    with pytest.raises(KeyFileError, match="has a key node already"):
        folder.add("node", "operator", ())


# --- what each role may do --------------------------------------------------------------------------------------------

READS, PUBLISHES, JOINS = "may not read the status", "may not publish commands", "may not join the fleet"
TABLE: list[tuple[KeyRole, tuple[str, ...], type, str | None, str]] = [
    # role, places, message, agent that the sender is or wants to be, refusal
    ("agent", (), wire.Hello, "0.0", ""),
    ("agent", (), wire.Join, "0.0", ""),
    ("agent", (), AgentStatus, "0.0", ""),
    ("agent", (), wire.TimeRequest, None, ""),
    ("agent", (), RequestCounts, "0.0", ""),
    ("agent", (), wire.CommandOutcome, "0.0", ""),
    ("agent", (), wire.ResendRequest, "0.0", ""),
    ("agent", (), wire.DecisionBatch, "0.0", ""),
    ("agent", (), wire.Leave, "0.0", ""),
    ("agent", ("0",), wire.Leave, "1.0", "may not be agent"),
    ("agent", (), wire.PlaceRequest, None, ""),
    ("agent", ("0", "1"), wire.PlaceRequest, None, "key k is for 0, 1: start its agent with that --replica"),
    ("operator", (), wire.PlaceRequest, None, JOINS),
    ("agent", ("0",), wire.PeerRequest, None, ""),
    ("observer", (), wire.PeerRequest, None, JOINS),
    ("agent", (), wire.Goodbye, "0.0", ""),
    ("agent", (), wire.Submit, None, PUBLISHES),
    ("agent", (), wire.StatusRequest, None, READS),
    ("agent", ("0",), wire.Submit, "0.0", PUBLISHES),
    ("agent", ("0",), wire.Hello, "0.0", ""),
    ("agent", ("0",), wire.Hello, "0.1", ""),
    ("agent", ("0",), wire.Hello, "1.0", "key k is for 0, and may not be agent 1.0"),
    ("agent", ("0",), wire.Hello, "00.0", "may not be agent"),
    ("agent", ("1",), wire.Hello, "10.0", "may not be agent"),
    ("agent", ("0.1",), wire.Hello, "0.1", ""),
    ("agent", ("0.1",), wire.Hello, "0.0", "may not be agent"),
    ("agent", ("0.1",), wire.Hello, "0.10", "may not be agent"),
    ("agent", ("0.1", "2"), wire.Hello, "2.3", ""),
    ("agent", ("0.1", "2"), wire.Hello, "3.0", "key k is for 0.1, 2, and may not be agent 3.0"),
    ("agent", tuple(map(str, range(9))), wire.Hello, "9.0", "is for 0, 1, 2, 3, 4, 5, 6, 7, …, and may not be"),
    ("agent", ("actor",), wire.Hello, "actor.3", ""),
    ("agent", ("actor.3",), wire.Hello, "actor.3", ""),
    ("agent", ("actor.3",), wire.Hello, "actor.4", "may not be agent"),
    ("agent", ("actor",), wire.Hello, "actor-2.3", "may not be agent"),
    ("agent", ("0",), wire.CommandOutcome, "1.0", "may not be agent"),
    ("agent", ("0",), wire.DecisionBatch, None, ""),
    ("operator", (), wire.Submit, None, ""),
    ("operator", (), wire.StatusRequest, None, ""),
    ("operator", (), wire.Retire, None, ""),
    ("operator", (), wire.SyncRequest, None, ""),
    ("observer", (), wire.SyncRequest, None, "may not sync weights"),
    ("agent", (), wire.SyncRequest, "0.0", "may not sync weights"),
    ("observer", (), wire.Retire, None, "may not take places out of the run"),
    ("agent", (), wire.Retire, "0.0", "may not take places out of the run"),
    ("operator", (), wire.Hello, "0.0", JOINS),
    ("operator", (), wire.CommandOutcome, "0.0", JOINS),
    ("operator", (), wire.Goodbye, "0.0", JOINS),
    ("observer", (), wire.StatusRequest, None, ""),
    ("observer", (), wire.Submit, None, PUBLISHES),
    ("observer", (), wire.Hello, "0.0", JOINS),
    ("observer", (), wire.ResendRequest, "0.0", JOINS),
]


@pytest.mark.parametrize(("role", "places", "kind", "agent", "says"), TABLE)
def test_each_row_of_the_table_of_permissions(
    role: KeyRole, places: tuple[str, ...], kind: type, agent: str | None, says: str
) -> None:
    message = next(sample for sample in SAMPLES if type(sample) is kind)
    found = refusal(Grant(name="k", role=role, places=places), message, agent)  # type: ignore[arg-type]
    assert (says in found) if says else (found == "")


def test_every_message_from_a_peer_is_in_the_table_of_permissions() -> None:
    decided = {kind for kinds in MAY_SEND.values() for kind in kinds}
    assert decided == set(get_args(wire.Upward)) | set(get_args(wire.Operator))
    assert decided == {kind for _, _, kind, _, _ in TABLE}


# --- the command line -------------------------------------------------------------------------------------------------


def run(*words: object) -> str:
    result = CliRunner().invoke(cli, ["keys", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_life_of_keys_on_the_command_line_shows_no_secret(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    said = [
        run("new", "node-a", "--place", "0", "--keys", keys),
        run("new", "ops", "--role", "operator", "--keys", keys),
        run("new", "spare", "--fleet", "--keys", keys),
        run("revoke", "spare", "--keys", keys),
        run("list", "--keys", keys),
    ]
    assert "agent 0" in said[0]
    assert "operator" in said[1]
    assert "agent at any place" in said[2]
    assert "revoked" in said[4]
    listed = json.loads(run("list", "--json", "--keys", keys))
    assert [key["name"] for key in listed["allowed"]] == ["node-a", "ops"]
    secrets = [KeyFolder(keys).server_pair().secret]
    secrets += [read_peer_keys(path).pair.secret for path in (keys / "issued").glob("*.key")]
    assert len(secrets) == 3
    assert not [secret for secret in secrets if secret in "".join([*said, json.dumps(listed)])]


def test_the_path_of_a_folder_is_printed_and_does_nothing(tmp_path: Path) -> None:
    keys = tmp_path / "\x1b[2J[red]keys[/]\u202e\n\x9b31m"
    said = [
        run("new", "node-a", "--place", "0", "--keys", keys),
        run("list", "--keys", keys),
        run("revoke", "node-a", "--keys", keys),
    ]
    for line in "".join(said).splitlines():
        assert line.isprintable()
    assert "[2J[red]keys[/]" in said[0] and len(said[0].splitlines()) == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["new", "a"], "needs --place, once or more, or --fleet"),
        (["new", "a", "--place", "0", "--fleet"], "needs --place, once or more, or --fleet"),
        (["new", "a", "--role", "operator", "--fleet"], "are for agents"),
        (["new", "../a", "--fleet"], "is not a name"),
        (["new", "a\n", "--fleet"], "is not a name"),
        (["new", "\x1b[2Ja", "--fleet"], "is not a name"),
        (["new", "a", "--place", "0\n"], "is not a place"),
        (["new", "a", "--place", "0.1.2"], "is not a place"),
        (["new", "a", "--place", "*"], "is not a place"),
        (["list"], "holds no key of a bus"),
        (["revoke", "a"], "has no key a"),
    ],
)
def test_a_wrong_use_of_the_command_line_says_what_to_do(tmp_path: Path, words: list[str], says: str) -> None:
    result = CliRunner().invoke(cli, ["keys", *words, "--keys", str(tmp_path / "keys")])
    assert isinstance(result.exception, ConfigError)
    assert says in str(result.exception)
    assert not list(tmp_path.rglob("*.json"))


# --- a running bus ----------------------------------------------------------------------------------------------------


def test_a_change_within_the_tick_of_the_file_systems_clock_is_seen(folder: KeyFolder) -> None:
    """A folder's time of change moves in ticks of some milliseconds: two changes may leave the same time."""
    folder.add("a", "observer", ())
    access = Access(folder)
    seen = (folder.path / "allowed").stat().st_mtime_ns
    public = folder.allowed("a").public
    folder.revoke("a")
    (folder.path / "revoked" / "a.1.json").unlink()
    for changed in (folder.path / "allowed", folder.path / "revoked"):
        os.utime(changed, ns=(seen, seen))
    assert isinstance(access.grant_of(public.encode()), Grant)
    access._read()
    assert access.grant_of(public.encode()) == "this key is not one of the bus's"


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"x"],
        [b"x", b"", b"1.0", b"1", b"d", b"a", b"", b"CURVE"],
        [b"x", b"", b"1.0", b"1", b"d", b"a", b"", b"CURVE", b"short"],
        [b"x", b"", b"1.0", b"1", b"d", b"a", b"", b"NULL"],
        [b"x", b"", b"1.0", b"1", b"d", b"a", b"", b"PLAIN", b"user", b"password"],
        [b"x", b"", b"2.0", b"1", b"d", b"a", b"", b"CURVE", b"k" * 32],
        [b"x", b"", b"1.0", b"1", b"d", b"a", b"", b"CURVE", b"k" * 32, b"more"],
    ],
)
def test_whatever_the_handler_is_asked_no_unknown_peer_comes_in(folder: KeyFolder, frames: list[bytes]) -> None:
    access = Access(folder)
    try:
        answer = access._answer(frames)
    except ValueError:
        return  # `serve` logs it and goes on
    assert answer[4] == b"400"
