"""Older and newer versions read each other; bytes that are not a message are refused; the schema is up to date."""

from pathlib import Path

import msgspec
import pytest
from jsonschema import Draft202012Validator, ValidationError
from msgspec import Raw, Struct

from schemas import wire
from schemas.agent_status import AgentStatus
from schemas.commands import EngineCommand, UnknownCommand
from schemas.errors import CommandFailed, WireError
from schemas.outcomes import Acted, ErrorKind, Failed, Missing, Reason, Skipped
from schemas.reports import AgentOutcome, Report
from tests.golden.json_schema import document, schema
from tests.golden.samples import ENVELOPE, PROFILE, named

DOCS = Path(__file__).parents[2] / "docs"
JOIN = wire.encode(wire.Join())
SCHEMA = schema()


# --- versions ---------------------------------------------------------------------------------------------------------


class OldStatus(Struct, frozen=True, kw_only=True, tag="status", omit_defaults=True):
    """The heartbeat of an earlier version."""

    ready: bool
    engine: str = "unknown"


class NewStatus(AgentStatus, frozen=True, kw_only=True, tag="status", omit_defaults=True):
    """The heartbeat of a later version."""

    temperature_celsius: int = 20


def test_an_older_reader_ignores_fields_that_it_does_not_know() -> None:
    newer = wire.encode(AgentStatus(ready=True, engine="tiny 1", version=4, asleep=("weights",)))
    assert msgspec.msgpack.decode(newer, type=OldStatus) == OldStatus(ready=True, engine="tiny 1")


def test_a_newer_reader_fills_in_defaults() -> None:
    assert wire.decode_upward(wire.encode(OldStatus(ready=True, engine="tiny 1"))) == AgentStatus(
        ready=True, engine="tiny 1"
    )


def test_fields_of_a_later_version_are_ignored() -> None:
    assert wire.decode_upward(wire.encode(NewStatus(ready=True, temperature_celsius=90))) == AgentStatus(ready=True)


def test_another_minor_version_is_read_and_another_major_version_is_not() -> None:
    minor = wire.encode(wire.Header(wire.MAGIC, wire.MAJOR, 7, 1, 0, 0))
    assert wire.parse_frames([minor, JOIN])[0].minor == 7
    with pytest.raises(WireError, match=f"protocol version {wire.MAJOR + 1}, this side speaks {wire.MAJOR}"):
        wire.parse_frames([wire.encode(wire.Header(wire.MAGIC, wire.MAJOR + 1, 0, 1, 0, 0)), JOIN])


@pytest.mark.parametrize(
    ("body", "tag"),
    [
        ({"type": "teleport", "where": "here"}, "teleport"),
        ({"type": "profile", "action": "begin", "step": 1}, "profile"),
        ({"type": "engine", "operation": "explode"}, "engine"),
        ({"type": "weights", "phase": "commit", "version": 1}, "weights"),
        ({"no": "tag"}, "unreadable"),
        ([1, 2], "unreadable"),
        ({"type": "x" * 500}, "x" * 64),
    ],
)
def test_a_command_that_cannot_be_read_becomes_an_unknown_command(body: object, tag: str) -> None:
    command = wire.decode_command(Raw(wire.encode(body)))
    assert isinstance(command, UnknownCommand) and command.tag == tag
    assert bool(command.problem) == (tag in ("profile", "engine", "weights", "unreadable"))


def test_the_command_in_an_envelope_is_decoded() -> None:
    assert wire.decode_command(wire.decode_envelope(wire.encode(ENVELOPE)).body) == PROFILE


# --- bytes that are not a message -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([], "2 frames, not 0"),
        ([wire.encode_header(1)], "2 frames, not 1"),
        ([wire.encode_header(1), JOIN, JOIN], "2 frames, not 3"),
        ([wire.encode_header(1), b"x" * wire.MAX_BYTES], f"at most {wire.MAX_BYTES} bytes"),
        ([b"\xff\xff", JOIN], "unreadable header"),
        ([b"", JOIN], "unreadable header"),
        ([wire.encode(wire.Header(1, wire.MAJOR, 0, 1, 0, 0)), JOIN], "not a message of rolloutctl"),
        ([wire.encode(wire.Header(wire.MAGIC, wire.MAJOR, 0, -1, 0, 0)), JOIN], "out of bounds"),
        ([wire.encode([wire.MAGIC, wire.MAJOR]), JOIN], "unreadable header"),
    ],
)
def test_frames_that_are_not_a_message_are_refused_with_a_reason(frames: list[bytes], message: str) -> None:
    with pytest.raises(WireError, match=message):
        wire.parse_frames(frames)


@pytest.mark.parametrize("decode", [wire.decode_upward, wire.decode_downward, wire.decode_envelope])
@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x80", b"\x81\xa4type\xa4nope", b"\x91" * 5000, b"\xa4\xff\xff\xff\xff", JOIN + b"\x00"]
)
def test_a_body_that_is_not_a_message_is_a_wire_error(decode: object, body: bytes) -> None:
    with pytest.raises(WireError):
        decode(body)  # type: ignore[operator]


def test_an_error_never_repeats_the_bytes() -> None:
    with pytest.raises(WireError) as caught:
        wire.decode_upward(wire.encode({"type": "status", "ready": "SECRET-TOKEN"}))
    assert "SECRET" not in str(caught.value)


# --- reports ----------------------------------------------------------------------------------------------------------


def report(*conclusions: Acted | Skipped | Failed | Missing) -> Report:
    outcomes = tuple(
        AgentOutcome(agent=f"{number}.0", conclusion=conclusion) for number, conclusion in enumerate(conclusions)
    )
    return Report(seq=7, origin=1, command=EngineCommand(operation="pause"), outcomes=outcomes)


def test_a_report_lists_agents_by_their_conclusion() -> None:
    mixed = report(Acted(calls=()), Skipped(Reason.ALREADY), Failed(ErrorKind.UNKNOWN, "?"), Missing("gone"))
    assert (mixed.acted, mixed.skipped, mixed.failed, mixed.missing) == (("0.0",), ("1.0",), ("2.0",), ("3.0",))


def test_a_missing_agent_is_a_failure_and_a_skip_is_not() -> None:
    report(Acted(calls=()), Skipped(Reason.NOT_PRIMARY)).raise_for_failures()
    with pytest.raises(CommandFailed, match=r"0\.0: missing \(deadline\)"):
        report(Missing("deadline")).raise_for_failures()
    with pytest.raises(CommandFailed, match=r"0\.0: failed engine_error: it burns"):
        report(Failed(ErrorKind.ENGINE_ERROR, "it burns")).raise_for_failures()


# --- the schema -------------------------------------------------------------------------------------------------------


def test_the_schema_in_the_docs_is_up_to_date() -> None:
    assert (
        DOCS / "schema.json"
    ).read_text() == document()  # else: python -m tests.golden.json_schema > docs/schema.json


MESSAGES = [name for name, sample in named().items() if type(sample).__name__ in SCHEMA["$defs"]]


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    Draft202012Validator.check_schema(SCHEMA)
    return Draft202012Validator(SCHEMA)


def under(validator: Draft202012Validator, name: str) -> Draft202012Validator:
    return validator.evolve(schema={"$ref": f"#/$defs/{name}", "$defs": SCHEMA["$defs"]})


@pytest.mark.parametrize("name", MESSAGES)
def test_every_message_is_valid_under_the_schema(name: str, validator: Draft202012Validator) -> None:
    sample = named()[name]
    value = msgspec.json.decode(msgspec.json.encode(msgspec.msgpack.decode(wire.encode(sample))))
    under(validator, type(sample).__name__).validate(value)


def test_the_schema_refuses_an_incomplete_message(validator: Draft202012Validator) -> None:
    with pytest.raises(ValidationError):
        under(validator, "ProfileCommand").validate({"type": "profile"})
