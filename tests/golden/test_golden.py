"""The bytes of every message kind stay what they are, in every process and for every later version."""

import json
from typing import Any

import msgspec
import pytest

from controlplane.machine.events import CoordinatorEffect, CoordinatorEvent
from schemas.json_schema import UNIONS
from schemas.wire import encode
from tests.golden.samples import FILE, SAMPLES, kinds, named

IN_THE_LOG = {**UNIONS, "CoordinatorEvent": CoordinatorEvent, "CoordinatorEffect": CoordinatorEffect}
"""Every union that is written down, or travels."""

VECTORS: dict[str, dict[str, Any]] = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", named())
def test_encoding_gives_exactly_these_bytes(name: str) -> None:
    assert encode(named()[name]).hex() == VECTORS[name]["hex"]


@pytest.mark.parametrize("name", named())
def test_decoding_gives_the_value(name: str) -> None:
    sample = named()[name]
    assert msgspec.msgpack.decode(bytes.fromhex(VECTORS[name]["hex"]), type=type(sample)) == sample


@pytest.mark.parametrize("name", named())
def test_what_a_person_reads_is_what_the_bytes_say(name: str) -> None:
    read = msgspec.msgpack.decode(bytes.fromhex(VECTORS[name]["hex"]))
    assert json.loads(msgspec.json.encode(read)) == VECTORS[name]["value"]


@pytest.mark.parametrize("union", IN_THE_LOG)
def test_every_kind_has_a_vector(union: str) -> None:
    assert kinds(IN_THE_LOG[union]) <= {type(sample) for sample in SAMPLES}


def test_every_vector_has_a_sample() -> None:
    assert VECTORS.keys() == named().keys()
