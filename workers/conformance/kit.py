"""The acceptance kit of engine adapters: it makes every call that an agent makes, and collects what follows.

Each check starts with an engine that serves, and returns evidence. `judge` says what is wrong with it. Nothing here
trusts an answer of the engine: tokens come from a client of it, traces from the disk, memory from who can measure it.
"""

import secrets
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Final, Literal

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup
from msgspec import Struct

from schemas import events
from schemas.commands import Checkpoint, ProfilePlan
from schemas.desired import ALL_TAGS, ProfileSession
from schemas.errors import CheckpointError, EngineError, UnsupportedError
from schemas.identity import InFlight, Operation
from schemas.safetensors.manifest import build_manifest
from workers.conformance import judge
from workers.conformance.bench import SHORT, Bench, EngineLost, GenerationClient, Setup
from workers.conformance.spoiled import CUT_OFF, MISSING, OTHER_MODEL, OUTSIDE, spoiled_checkpoints
from workers.conformance.written import files_below, trace_seen
from workers.engine import Engine

ATTEMPTS: Final = 5
"""Times that a call is tried on a running request, which may end by itself before the call comes."""
PREFIX_MAX: Final = 300
"""Most tokens of a prompt that is long enough to be cached."""
Verdict = Literal["passed", "failed", "not offered"]


class Row(Struct, frozen=True, kw_only=True):
    """One line of the table."""

    operation: str
    verdict: Verdict
    seen: str
    seconds: float


class Kit:
    """Judges one engine. `run` once, inside a task group."""

    def __init__(self, engine: Engine, client: GenerationClient, setup: Setup, tasks: TaskGroup) -> None:
        self._bench, self._setup = Bench(engine, client, setup, tasks), setup
        self._version = 0

    async def run(self, tell: Callable[[Row], None], only: Collection[str] = ()) -> list[Row]:
        """Make all checks, or those whose names are in `only`. Each row is told as soon as it is there."""
        observed = await self._bench.observe("at first")
        self._bench.operations, self._version = observed.operations, observed.version or 0
        rows: list[Row] = []
        lost = ""
        found: list[_Found]
        for names, needs, check in self._checks():
            if only and not set(names) & set(only):
                continue
            began = time.monotonic()
            missing = [operation for operation in needs if operation not in self._bench.operations]
            if lost:
                found = [(name, "failed", f"not judged: {lost}") for name in names]
            elif needs and needs[0] in missing:
                found = [(name, "not offered", f"the engine does not list `{needs[0]}`") for name in names]
            elif missing:
                found = [(name, "failed", f"it lists `{needs[0]}`, and not `{missing[0]}`") for name in names]
            else:
                found, lost = await self._verdicts(names, check)
            seconds = time.monotonic() - began
            for name, verdict, seen in found:
                row = Row(operation=name, verdict=verdict, seen=seen, seconds=seconds)
                rows.append(row)
                tell(row)
        return rows

    def _checks(self) -> list["_Check"]:
        pause, resume, load = Operation.PAUSE, Operation.RESUME, Operation.LOAD
        return [
            (("generate",), (), self._generate),
            (("abort",), (Operation.ABORT,), self._abort),
            (("pause (abort)",), (pause, resume), lambda: self._pause("abort")),
            (("pause (wait)",), (pause, resume), lambda: self._pause("wait")),
            (("pause (keep)",), (pause, resume), lambda: self._pause("keep")),
            (("resume",), (resume, pause), self._resume),
            (("calls made twice",), (pause, resume), self._repeat),
            (("load",), (load, pause, resume), self._load),
            (("bad checkpoint",), (load, pause, resume), self._bad_checkpoint),
            (("flush",), (Operation.FLUSH, pause, resume), self._flush),
            (("sleep", "wake"), (Operation.SLEEP, Operation.WAKE, pause, resume), self._sleep),
            (("profile",), (Operation.PROFILE,), self._profile),
            (("late call",), (pause, resume), lambda: self._unanswered("late")),
            (("cancelled call",), (pause, resume), lambda: self._unanswered("cancelled")),
            (("observe",), (), self._observed),
        ]

    async def _verdicts(
        self, names: tuple[str, ...], check: Callable[[], Awaitable[tuple[judge.Seen, ...]]]
    ) -> tuple[list["_Found"], str]:
        """Make one check. Returns its verdicts, and why no other can follow, if none can."""
        try:
            if names != ("observe",):
                await self._bench.rest()
            seen = await check()
        except EngineLost as error:
            return [(name, "failed", str(error)) for name in names], str(error)
        except UnsupportedError as error:
            return [(name, "not offered", str(error)) for name in names], ""
        except Exception as error:  # of anybody's adapter
            return [(name, "failed", f"{type(error).__name__}: {error}") for name in names], ""
        judged = [judge.judge(each) for each in seen]
        return [
            (name, "failed" if each.faults else "passed", "; ".join(each.faults) or each.seen)
            for name, each in zip(names, judged, strict=True)
        ], ""

    # --- generation ---------------------------------------------------------------------------------------------------

    async def _generate(self) -> tuple[judge.Seen, ...]:
        first, longest = await self._bench.measure()
        again = await self._bench.tokens_after()
        return (judge.GenerateSeen(first=first, again=again, asked=SHORT, longest=longest),)

    async def _pause(self, mode: InFlight) -> tuple[judge.Seen, ...]:
        for _ in range(ATTEMPTS):
            request = await self._bench.begin_long()
            await self._bench.perform(events.Pause(mode))
            at_return = len(request.tokens)
            observed = await self._bench.observe(f"paused ({mode})")
            silent = await self._bench.is_silent(request)
            ended, counted = request.ended, await self._counter()
            late = await self._bench.late()
            early, grown = len(late.tokens), await self._counter()
            await self._bench.perform(events.Resume())
            await self._bench.end(request, late)
            if mode == "wait" or not ended or len(request.tokens) < request.asked:
                break
            self._bench.lengthen()
        running = judge.InFlightRequest(
            asked=request.asked, at_return=at_return, silent=silent, ended=ended, made=len(request.tokens)
        )
        growth = grown - counted if grown is not None and counted is not None else None
        return (judge.PauseSeen(mode=mode, observed=observed, running=running, late=early, counted=growth),)

    async def _counter(self) -> int | None:
        return (await self._bench.observe("paused")).generated

    async def _resume(self) -> tuple[judge.Seen, ...]:
        await self._bench.perform(events.Pause("abort"))
        held = await self._bench.late()
        await self._bench.perform(events.Resume())
        observed = await self._bench.observe("resumed")
        await self._bench.end(held)
        refused = f"a request was refused during the pause ({held.error})" if held.error else ""
        seen = judge.ResumeSeen(
            observed=observed,
            held=len(held.tokens),
            asked=SHORT,
            refused=refused,
            before=self._bench.expected,
            after=await self._bench.tokens_after(),
        )
        return (seen,)

    async def _abort(self) -> tuple[judge.Seen, ...]:
        for _ in range(ATTEMPTS):
            request = await self._bench.begin_long()
            await self._bench.perform(events.Abort())
            at_return, silent = len(request.tokens), await self._bench.is_silent(request)
            if len(request.tokens) < request.asked:
                break
            self._bench.lengthen()
        running = judge.InFlightRequest(
            asked=request.asked, at_return=at_return, silent=silent, ended=request.ended, made=len(request.tokens)
        )
        observed = await self._bench.observe("after an abort")
        after = await self._bench.tokens_after()
        return (judge.AbortSeen(observed=observed, running=running, before=self._bench.expected, after=after),)

    async def _repeat(self) -> tuple[judge.Seen, ...]:
        """Make those calls twice that an agent makes again if it died during the first."""
        calls: dict[Operation, events.EngineCall] = {
            Operation.ABORT: events.Abort(),
            Operation.PAUSE: events.Pause("abort"),
            Operation.FLUSH: events.Flush(),
            Operation.RESUME: events.Resume(),
        }
        offered = {operation: call for operation, call in calls.items() if operation in self._bench.operations}
        errors = []
        for operation, call in offered.items():
            await self._bench.perform(call)
            try:
                await self._bench.perform(call)
            except EngineError as error:
                errors.append(f"a second {operation} failed: {error}")
        seen = judge.RepeatSeen(
            calls=tuple(offered),
            errors=tuple(errors),
            before=self._bench.expected,
            after=await self._bench.tokens_after(),
        )
        return (seen,)

    async def _unanswered(self, how: Literal["late", "cancelled"]) -> tuple[judge.Seen, ...]:
        request = await self._bench.begin_long()
        error = "cancelled"
        with anyio.move_on_after(None if how == "late" else self._bench.silence_s / 2):
            try:
                await self._bench.perform(events.Pause("wait"), 0.05 if how == "late" else None)
                error = ""
            except UnsupportedError:
                raise
            except EngineError as raised:
                error = str(raised)
        # The client may get its last tokens after the engine has made them.
        holds = bool(error) or (await self._bench.is_silent(request) and len(request.tokens) == request.asked)
        if Operation.ABORT in self._bench.operations:
            await self._bench.perform(events.Abort())
        await self._bench.perform(events.Pause("abort"))
        observed = await self._bench.observe(f"after a {how} call")
        late = await self._bench.late()
        paused = not late.tokens and observed.generating is not True
        await self._bench.perform(events.Resume())
        await self._bench.end(request, late)
        after = await self._bench.tokens_after()
        return (
            judge.UnansweredSeen(
                how=how, error=error, holds=holds, paused=paused, before=self._bench.expected, after=after
            ),
        )

    # --- weights and memory -------------------------------------------------------------------------------------------

    async def _load_weights(self, path: str) -> tuple[int, events.Observation, str | None]:
        """Load one checkpoint, as an agent does. Returns the version, what was observed, and the digest."""
        self._version += 1
        source = Checkpoint(path)
        manifest = await to_thread.run_sync(build_manifest, self._setup.root / path, False)
        await self._bench.perform(events.Pause("abort"))
        await self._bench.perform(events.CheckSource(source, manifest, self._version))
        returned = await self._bench.perform(events.Load(self._version, source, manifest))
        observed = await self._bench.observe("loaded")
        if Operation.FLUSH in self._bench.operations:
            await self._bench.perform(events.Flush())
        await self._bench.perform(events.Resume())
        return self._version, observed, returned.digest or observed.digest

    def _two_checkpoints(self) -> tuple[str, str]:
        if self._setup.checkpoints is None:
            raise EngineError("not judged: give two checkpoints of its model")
        return self._setup.checkpoints

    async def _load(self) -> tuple[judge.Seen, ...]:
        first, second = self._two_checkpoints()
        loaded, tokens = [], []
        for path in (first, second, first):
            loaded.append(await self._load_weights(path))
            tokens.append(await self._bench.tokens())
        return (
            judge.LoadSeen(
                tokens=(tokens[0], tokens[1], tokens[2]),
                asked=tuple(version for version, _, _ in loaded),
                labels=tuple(observed.version for _, observed, _ in loaded),
                paused=all(observed.generating is not True for _, observed, _ in loaded),
                digests=tuple(digest for _, _, digest in loaded),
            ),
        )

    async def _bad_checkpoint(self) -> tuple[judge.Seen, ...]:
        path, _ = self._two_checkpoints()
        before = await self._bench.observe("before a bad checkpoint")
        answers = []
        with spoiled_checkpoints(self._setup.root, path) as spoiled:
            good = await to_thread.run_sync(build_manifest, self._setup.root / path, False)
            for what in (MISSING, OUTSIDE, CUT_OFF, OTHER_MODEL):
                manifest = good if what != OTHER_MODEL else build_manifest(self._setup.root / spoiled[what], False)
                source = Checkpoint(spoiled[what])
                check = await self._answer(events.CheckSource(source, manifest, self._version + 1))
                await self._bench.perform(events.Pause("abort"))
                load = await self._answer(events.Load(self._version + 1, source, manifest))
                await self._bench.perform(events.Resume())
                answers.append((what, check, load))
        after = await self._bench.observe("after a bad checkpoint")
        seen = judge.BadCheckpointSeen(
            answers=tuple(answers),
            relaunched=before.instance != after.instance,
            label_kept=before.version == after.version,
            before=self._bench.expected,
            after=await self._bench.tokens_after(),
        )
        return (seen,)

    async def _answer(self, call: events.EngineCall) -> str:
        try:
            await self._bench.perform(call)
        except CheckpointError:
            return "CheckpointError"
        except Exception as error:  # of anybody's adapter
            return f"raised {type(error).__name__}"
        return "was accepted"

    async def _flush(self) -> tuple[judge.Seen, ...]:
        """A prefix that old weights computed must not be used again. Released memory keeps no prefix either."""
        needed = {Operation.LOAD, Operation.SLEEP, Operation.WAKE}
        if self._setup.checkpoints is None or not needed <= self._bench.operations:
            await self._bench.perform(events.Pause("abort"))
            await self._bench.perform(events.Flush())
            await self._bench.perform(events.Resume())
            return (judge.FlushSeen(fresh=(), reused=()),)
        first, second = self._setup.checkpoints
        drawn = secrets.token_bytes(min(PREFIX_MAX, self._bench.long // 2))
        prompt = [byte % 31 + 1 for byte in drawn]
        await self._load_weights(first)
        await self._bench.tokens(prompt)
        await self._load_weights(second)
        reused = await self._bench.tokens(prompt)
        await self._bench.perform(events.Pause("abort"))
        await self._bench.perform(events.Sleep(ALL_TAGS))
        await self._bench.perform(events.Wake(ALL_TAGS))
        await self._bench.perform(events.Resume())
        return (judge.FlushSeen(fresh=await self._bench.tokens(prompt), reused=reused),)

    async def _sleep(self) -> tuple[judge.Seen, ...]:
        await self._bench.perform(events.Pause("abort"))
        awake = await self._bench.memory_bytes()
        await self._bench.perform(events.Sleep(ALL_TAGS))
        asleep, used = await self._bench.observe("asleep"), await self._bench.memory_bytes()
        late = await self._bench.late()
        slept = judge.SleepSeen(observed=asleep, late=len(late.tokens), used=_both(awake, used))
        await self._bench.perform(events.Wake(frozenset({"weights"})))
        await self._bench.perform(events.Wake(frozenset({"kv_cache"})))
        woken, again = await self._bench.observe("awake and paused"), await self._bench.memory_bytes()
        await anyio.sleep(self._bench.silence_s)
        early = len(late.tokens)
        await self._bench.perform(events.Resume())
        await self._bench.end(late)
        after = await self._bench.tokens_after()
        awoken = judge.WakeSeen(
            observed=woken, late=early, used=_both(used, again), before=self._bench.expected, after=after
        )
        return slept, awoken

    # --- profiles and observations ------------------------------------------------------------------------------------

    async def _profile(self) -> tuple[judge.Seen, ...]:
        root, name = self._setup.traces.resolve(), f"conform-{secrets.token_hex(4)}"
        plan, found, during = ProfilePlan(), [], None
        await self._bench.perform(events.CheckProfile(plan))
        directories = tuple(f"{name}/global_step_{step}/replica_0" for step in (1, 2))
        first: dict[str, int] = {}
        for step, directory in enumerate(directories, 1):
            session = ProfileSession(step, plan)
            await self._bench.perform(events.StartProfile(session, directory))
            await self._bench.tokens()
            during = during or await self._bench.observe("profiling")
            returned = await self._bench.perform(events.StopProfile(session, directory))
            found.append(tuple(trace_seen(root, trace) for trace in returned.traces))
            first = first or files_below(root / directory)
        grew = {path for path, size in files_below(root / directories[0]).items() if first.get(path) != size}
        assert during is not None
        seen = judge.ProfileSeen(
            directories=(directories[0], directories[1]),
            during=during,
            afterwards=await self._bench.observe("after a session"),
            traces=(found[0], found[1]),
            grew=tuple(sorted(grew)),
        )
        return (seen,)

    async def _observed(self) -> tuple[judge.Seen, ...]:
        return (judge.ObserveSeen(observations=tuple(self._bench.observations), problems=tuple(self._bench.problems)),)


_Check = tuple[tuple[str, ...], tuple[Operation, ...], Callable[[], Awaitable[tuple[judge.Seen, ...]]]]
_Found = tuple[str, Verdict, str]


def _both(before: int | None, after: int | None) -> tuple[int, int] | None:
    return (before, after) if before is not None and after is not None else None
