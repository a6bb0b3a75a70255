"""The bytes of every message kind are the same in every process and every version."""

import json
from typing import Any, get_args

import msgspec
import pytest

from controlplane.machine.events import CoordinatorEffect, CoordinatorEvent
from schemas.wire import encode
from tests.golden.json_schema import UNIONS
from tests.golden.samples import FILE, SAMPLES, named

RECORDED = {**UNIONS, "CoordinatorEvent": CoordinatorEvent, "CoordinatorEffect": CoordinatorEffect}
"""Every union on the wire and in the log."""

VECTORS: dict[str, dict[str, Any]] = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", named())
def test_a_sample_its_golden_bytes_and_their_readable_value_are_the_same(name: str) -> None:
    sample, golden = named()[name], bytes.fromhex(VECTORS[name]["hex"])
    assert encode(sample) == golden
    assert msgspec.msgpack.decode(golden, type=type(sample)) == sample
    assert json.loads(msgspec.json.encode(msgspec.msgpack.decode(golden))) == VECTORS[name]["value"]


@pytest.mark.parametrize("union", RECORDED)
def test_every_kind_has_a_sample(union: str) -> None:
    assert set(get_args(RECORDED[union])) <= {type(sample) for sample in SAMPLES}


def test_every_sample_has_golden_bytes() -> None:
    assert VECTORS.keys() == named().keys()
