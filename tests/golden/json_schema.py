"""JSON Schema of every message, for readers in other languages: what `python -m tests.golden.json_schema` prints.

A message has the same structure in MessagePack and in JSON. The schema of a `Raw` field, which holds another encoded
message, allows anything: the `body` of an envelope is a `Command`, and the `event` and `effects` of a decision are an
`Event` and a list of `Effect`.
"""

import inspect
import sys
from typing import Any, get_args

import msgspec

from schemas.commands import Command
from schemas.events import Effect, Event
from schemas.wire import Downward, Envelope, Header, Operator, Reply, Upward

UNIONS: dict[str, Any] = {
    "Upward": Upward,
    "Downward": Downward,
    "Operator": Operator,
    "Reply": Reply,
    "Command": Command,
    "Event": Event,
    "Effect": Effect,
}
"""The tagged unions of the protocol and the log, by their name in the code."""


def schema() -> dict[str, Any]:
    """Return the schema document, with a definition for each message and each union."""
    kinds = [Header, Envelope, *(kind for union in UNIONS.values() for kind in get_args(union))]
    _, definitions = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    for definition in definitions.values():
        if "description" in definition:  # Python 3.13 and later strip the indentation of docstrings themselves
            definition["description"] = inspect.cleandoc(definition["description"])
    unions = {
        name: {"anyOf": [{"$ref": f"#/$defs/{kind.__name__}"} for kind in get_args(union)]}
        for name, union in UNIONS.items()
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Messages of rolloutctl, protocol version 2",
        "$defs": dict(sorted({**definitions, **unions}.items())),
    }


def document() -> str:
    """Return the schema as text, which is the same in every process."""
    return msgspec.json.format(msgspec.json.encode(schema(), order="sorted"), indent=2).decode() + "\n"


if __name__ == "__main__":
    sys.stdout.write(document())
