"""The model of a fleet: how large, how fast, how often it fails, and by which policy it is synced. A TOML file.

docs/simulate.md has a table of the keys and their units.
"""

import tomllib
from copy import deepcopy
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct, defstruct

from controlplane.machine.events import OnUnreachable
from controlplane.simulate.modelled_engine import Kind
from schemas.commands import SyncPhase
from schemas.config import BusConfig
from schemas.errors import ConfigError
from schemas.fault_plan import Seconds
from schemas.identity import Count, GpuCount, InFlight, NodeCount, Positive
from schemas.profiler.conversion import convert_file

Tree = dict[str, object]
"""A TOML file, as it is read."""
PerHour = Annotated[float, Meta(ge=0, le=3600, description="a number per hour, at most 3600")]
Share = Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")]


class Spread(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A lognormal distribution."""

    median: Annotated[float, Meta(gt=0, le=86_400, description="a number of seconds above 0, at most a day")]
    p99: Annotated[float, Meta(gt=0, le=86_400, description="a number of seconds above 0, at most a day")]

    def __post_init__(self) -> None:
        if self.p99 < self.median:
            raise ValueError(f"p99 {self.p99:g} is below the median {self.median:g}")


_Series = Annotated[tuple[Seconds, ...], Meta(min_length=1)]
_Listed = Annotated[tuple[Seconds | _Series, ...], Meta(min_length=1)]
Duration = Annotated[
    Seconds | Spread | _Listed,
    Meta(description="a number of seconds, { median = …, p99 = … }, or a list of measured seconds"),
]


class FleetSize(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the fleet is made of."""

    replicas: Positive = 8
    nodes: NodeCount = 1
    gpus: GpuCount = 8
    engine: Kind = "vllm"


Chance = Annotated[
    Share | Annotated[tuple[Annotated[tuple[Share, ...], Meta(min_length=1)], ...], Meta(min_length=1)],
    Meta(description="a number from 0 to 1, or lists of them"),
]
_CALLS: Final = (
    *("check_source", "pause", "load", "restore", "flush", "resume", "observe"),
    *("check_adapter", "load_adapter", "unload_adapter"),
)
"""What an engine is called for by syncs and failures."""
CallTimes = defstruct(
    "CallTimes",
    [(call, Duration, 0.0) for call in (*_CALLS, "read")],
    module=__name__,
    frozen=True,
    forbid_unknown_fields=True,
)
CallFailures = defstruct(
    "CallFailures", [(call, Chance, 0.0) for call in _CALLS], module=__name__, frozen=True, forbid_unknown_fields=True
)


class RecordedFailure(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A failure of a recorded run, which happens where it did then; `--from` fills them in.

    In a `silence` the agent hears and says nothing on a connection that stands. The trainer has no `agent`.
    """

    what: Literal["engine", "agent", "cut", "silence", "trainer"]
    agent: str = ""
    sync: Positive
    phase: SyncPhase | Literal["step"]
    after: Seconds
    lasts: Seconds


class Failures(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often each replica fails, and for how long."""

    engine_per_hour: PerHour = 0.0
    engine_s: Duration = 120.0
    agent_per_hour: PerHour = 0.0
    agent_s: Duration = 5.0
    cut_per_hour: PerHour = 0.0
    cut_s: Duration = 30.0
    trainer_per_hour: PerHour = 0.0
    trainer_s: Duration = 300.0
    calls: CallFailures = CallFailures()  # type: ignore[valid-type]
    refused: CallFailures = CallFailures()  # type: ignore[valid-type]
    recorded: tuple[RecordedFailure, ...] = ()


class Policy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the trainer syncs."""

    sync: Literal["weights", "adapter"] = "weights"
    quorum: Positive | Literal["all", "majority"] = "majority"
    absent: OnUnreachable = "skip"
    staging: bool = True
    in_flight: InFlight = "abort"
    timeout: Annotated[float, Meta(ge=0.001, le=86_400, description="a number of seconds, at most a day")] = 600.0
    keep: Positive = 2


class FleetModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fleet and its policy."""

    seed: Count = 0
    steps: Annotated[int, Meta(ge=1, le=1_000_000)] = 100
    step: Duration = 60.0
    network: Duration = 0.0005
    requests: Duration = 0.0
    fleet: FleetSize = FleetSize()
    calls: CallTimes = CallTimes()  # type: ignore[valid-type]
    bus: BusConfig = BusConfig()
    failures: Failures = Failures()
    policy: Policy = Policy()


def merged(below: Tree, above: Tree) -> Tree:
    """Return both trees, section by section; what is `above` hides what is `below`. A time is one value."""
    both = dict(below)
    for key, value in above.items():
        old = both.get(key)
        sections = isinstance(old, dict) and isinstance(value, dict) and "median" not in value
        both[key] = merged(old, value) if sections else deepcopy(value)  # type: ignore[arg-type]
    return both


def varied(tree: Tree, path: str, text: str) -> Tree:
    """Return the tree with another value at a path, which begins in `policy` if it has no dot."""
    try:
        value: object = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    for key in reversed((path if "." in path or path in FleetModel.__struct_fields__ else f"policy.{path}").split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return merged(tree, value)


def checked(tree: Tree, file: str) -> FleetModel:
    """Return the model that a tree describes.

    Raises:
        ConfigError: A value is wrong. The text names the key, the value and what is allowed.
    """
    model = convert_file(tree, FleetModel, file)
    quorum, replicas = model.policy.quorum, model.fleet.replicas
    if isinstance(quorum, int) and quorum > replicas:
        raise ConfigError(f"{file}: policy.quorum is {quorum}: allowed is at most fleet.replicas, {replicas}")
    return model
