"""The acceptance kit of engine backends: it makes every call that an agent makes, and judges what follows.

What an engine answers proves nothing; engines report success for what they did not do. So tokens come from a client of
the engine, traces from the disk, memory from whatever can measure it, and its report of itself must agree with them.
"""

import time
from collections.abc import Awaitable, Callable, Collection
from typing import Literal

from anyio.abc import TaskGroup
from msgspec import Struct

from schemas.errors import UnsupportedError
from schemas.identity import Operation
from workers.conformance.adapter_checks import AdapterChecks
from workers.conformance.engine_under_test import (
    CheckResult,
    EngineLost,
    EngineUnderTest,
    GenerationClient,
    Setup,
    if_true,
)
from workers.conformance.generation_checks import GenerationChecks
from workers.conformance.weight_checks import WeightChecks
from workers.engine import Engine

Verdict = Literal["passed", "failed", "not offered"]
Names = tuple[str, ...]
Needs = tuple[Operation, ...]
Check = Callable[[], Awaitable[tuple[CheckResult, ...]]]


class Row(Struct, frozen=True, kw_only=True):
    """One line of the table."""

    operation: str
    verdict: Verdict
    seen: str
    seconds: float


class Kit:
    """Judges one engine. `run` once, inside a task group."""

    def __init__(self, engine: Engine, client: GenerationClient, setup: Setup, tasks: TaskGroup) -> None:
        self._engine, self._setup = EngineUnderTest(engine, client, setup, tasks), setup
        self._lost = ""  # why the engine is judged no further

    async def run(self, tell: Callable[[Row], None], only: Collection[str] = ()) -> list[Row]:
        """Make all checks, or some.

        Args:
            tell: Called with each row as soon as it is there.
            only: Names of the checks to make; empty for all.
        """
        observed = await self._engine.observe("at first")
        self._engine.operations = observed.operations
        rows: list[Row] = []
        for names, needs, check in self._checks(observed.version or 0):
            if only and not set(names) & set(only):
                continue
            began = time.monotonic()
            found = await self._verdicts(names, needs, check)
            seconds = time.monotonic() - began
            for name, (verdict, seen) in zip(names, found, strict=True):
                rows.append(Row(operation=name, verdict=verdict, seen=seen, seconds=seconds))
                tell(rows[-1])
        return rows

    def _checks(self, version: int) -> list[tuple[Names, Needs, Check]]:
        """Names of each check, the operations that it needs, the one that it is about first, and the check itself."""
        pause, resume, load = Operation.PAUSE, Operation.RESUME, Operation.LOAD
        generation, weights = GenerationChecks(self._engine), WeightChecks(self._engine, self._setup, version)
        adapters = AdapterChecks(self._engine, self._setup)
        return [
            (("generate",), (), generation.generate),
            (("abort",), (Operation.ABORT,), generation.abort),
            (("pause (abort)",), (pause, resume), lambda: generation.pause("abort")),
            (("pause (wait)",), (pause, resume), lambda: generation.pause("wait")),
            (("pause (keep)",), (pause, resume), lambda: generation.pause("keep")),
            (("resume",), (resume, pause), generation.resume),
            (("calls made twice",), (pause, resume), generation.repeat),
            (("load",), (load, pause, resume), weights.load),
            (("bad checkpoint",), (load, pause, resume), weights.bad_checkpoint),
            (("delta",), (load, pause, resume), weights.delta),
            (("flush",), (Operation.FLUSH, pause, resume), weights.flush),
            (("sleep", "wake"), (Operation.SLEEP, Operation.WAKE, pause, resume), weights.sleep_and_wake),
            (("profile",), (Operation.PROFILE,), weights.profile),
            (("adapter", "second adapter", "adapter unload"), (Operation.ADAPTERS,), adapters.adapters),
            (("bad adapter",), (Operation.ADAPTERS,), adapters.bad_adapter),
            (("late call",), (pause, resume), lambda: generation.unanswered("late")),
            (("cancelled call",), (pause, resume), lambda: generation.unanswered("cancelled")),
            (("observe",), (), self._observed),
        ]

    async def _verdicts(self, names: Names, needs: Needs, check: Check) -> list[tuple[Verdict, str]]:
        """Make one check, if it can be made. Returns what to say of each of its names."""
        verdict, seen = self._hindrance(needs)
        if not seen:
            try:
                if names != ("observe",):
                    await self._engine.rest()
                found = await check()
                return [("failed" if each.faults else "passed", "; ".join(each.faults) or each.seen) for each in found]
            except EngineLost as error:
                self._lost, seen = f"not judged: {error}", str(error)
            except UnsupportedError as error:
                verdict, seen = "not offered", str(error)
            except Exception as error:  # a user's backend may raise anything
                seen = f"{type(error).__name__}: {error}"
        return [(verdict, seen)] * len(names)

    def _hindrance(self, needs: Needs) -> tuple[Verdict, str]:
        """Return why a check can't be made; no reason if it can."""
        missing = [operation for operation in needs if operation not in self._engine.operations]
        if self._lost or not missing:
            return "failed", self._lost
        if missing[0] == needs[0]:
            launched = needs[0] is Operation.ADAPTERS
            return "not offered", "not launched for adapters" if launched else f"the engine does not list `{needs[0]}`"
        return "failed", f"it lists `{needs[0]}`, and not `{missing[0]}`"

    async def _observed(self) -> tuple[CheckResult, ...]:
        """Judge all observations of the run."""
        states = self._engine.observations
        observations = [observation for _, observation in states]
        absent = [
            f"{state}: it reports its tokenizer as {each.tokenizer}"
            for state, each in states
            if each.tokenizer != "present"
        ]
        faults = (
            *self._engine.problems,
            *absent[:1],
            *if_true(len({each.instance for each in observations}) > 1, "its `instance` changed without a relaunch"),
            *if_true(len({each.operations for each in observations}) > 1, "its `operations` changed"),
            *if_true(not all(each.operations for each in observations), "it lists no operations"),
        )
        return (CheckResult(faults, f"{len(observations)} observations agree with what was seen"),)
