"""The bytes of every message kind are the same in every process and every version."""

import json
from typing import Any

import msgspec
import pytest

from controlplane.machine.events import CoordinatorEffect, CoordinatorEvent
from schemas.json_schema import UNIONS
from schemas.wire import encode
from tests.golden.samples import FILE, SAMPLES, kinds, named

RECORDED = {**UNIONS, "CoordinatorEvent": CoordinatorEvent, "CoordinatorEffect": CoordinatorEffect}
"""Every union on the wire and in the log."""

VECTORS: dict[str, dict[str, Any]] = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", named())
def test_a_sample_is_encoded_to_its_golden_bytes(name: str) -> None:
    assert encode(named()[name]).hex() == VECTORS[name]["hex"]


@pytest.mark.parametrize("name", named())
def test_golden_bytes_are_decoded_to_the_sample(name: str) -> None:
    sample = named()[name]
    assert msgspec.msgpack.decode(bytes.fromhex(VECTORS[name]["hex"]), type=type(sample)) == sample


@pytest.mark.parametrize("name", named())
def test_the_readable_value_is_that_of_the_bytes(name: str) -> None:
    read = msgspec.msgpack.decode(bytes.fromhex(VECTORS[name]["hex"]))
    assert json.loads(msgspec.json.encode(read)) == VECTORS[name]["value"]


@pytest.mark.parametrize("union", RECORDED)
def test_every_kind_has_a_sample(union: str) -> None:
    assert kinds(RECORDED[union]) <= {type(sample) for sample in SAMPLES}


def test_every_sample_has_golden_bytes() -> None:
    assert VECTORS.keys() == named().keys()
