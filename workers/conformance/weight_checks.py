"""Checks of the calls about weights, memory and profiles, by tokens, by used memory, and by files on the disk."""

import gzip
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import anyio
from anyio import to_thread

from schemas import events
from schemas.commands import Checkpoint, Manifest, ProfilePlan
from schemas.desired import ALL_TAGS, ProfileSession
from schemas.errors import EngineError
from schemas.identity import InFlight, Operation
from schemas.outcomes import Trace
from schemas.safetensors.format import safetensors_files
from schemas.safetensors.manifest import build_manifest
from workers.conformance.bad_checkpoints import refused
from workers.conformance.engine_under_test import CheckResult, EngineUnderTest, Setup, Tokens, if_true

EVENTS: Final = b'"ph"'
"""In every trace of events; other kinds of traces are only required not to be empty."""
PREFIX_MAX: Final = 300
"""Most tokens of a prompt that is long enough to be cached."""


class WeightChecks:
    """Each check begins with an engine that serves, and leaves it serving."""

    def __init__(self, engine: EngineUnderTest, setup: Setup, version: int) -> None:
        self._engine, self._setup, self._version = engine, setup, version

    async def load(self) -> tuple[CheckResult, ...]:
        """Checkpoint a, then b, then a again: tokens, labels and digests follow."""
        first, second = self._two_checkpoints()
        tokens: list[Tokens] = []
        labels: list[int | None] = []
        digests: list[str | None] = []
        faults: list[str] = []
        paused = True
        for path in (first, second, first):
            observed, loaded = await self._load_weights(path)
            tokens.append(await self._engine.tokens())
            labels.append(observed.version)
            digests.append(loaded.digest or observed.digest)
            paused = paused and observed.generating is not True
            wrong = observed.version not in (None, self._version)
            faults += if_true(wrong, f"version {self._version} was loaded, and it reports version {observed.version}")
        one, two, again = digests
        same = "both checkpoints gave the same tokens: they were not loaded, or are the same weights"
        faults += if_true(tokens[0] == tokens[1], same)
        faults += if_true(tokens[0] != tokens[2], "the first checkpoint, loaded again, gave other tokens than before")
        faults += if_true(not paused, "it generates after a load, without a resume")
        faults += if_true(one is not None and (one != again or one == two), "its digest does not follow its weights")
        return (CheckResult(faults, f"tokens followed the checkpoint; labels {', '.join(map(str, labels))}"),)

    async def delta(self) -> tuple[CheckResult, ...]:
        """Each file of the first checkpoint alone, over the second, and at the end that is all of the first."""
        first, second = self._two_checkpoints()
        await self._load_weights(first)
        whole = await self._engine.tokens()
        await self._load_weights(second)
        with TemporaryDirectory(prefix="conform-", dir=self._setup.root) as folder:
            for file in safetensors_files(self._setup.root / first):
                delta = Path(folder, file.stem)
                os.mkdir(delta)
                await to_thread.run_sync(shutil.copy, file, delta)
                _, loaded = await self._load_weights(first, delta=f"{delta.parent.name}/{delta.name}")
        wrong = if_true(await self._engine.tokens() != whole, "it gave other tokens than the whole checkpoint")
        return (CheckResult(wrong, f"the same tokens as the whole; it took {loaded.took or 'the whole'}"),)

    async def bad_checkpoint(self) -> tuple[CheckResult, ...]:
        """Checkpoints that can't be loaded are refused by the check and by the load, and nothing else changes."""
        path, _ = self._two_checkpoints()
        return (await refused(self._engine, self._setup.root, path, self._check_and_load, paused=True),)

    def _check_and_load(self, path: str, manifest: Manifest, delta: str = "") -> tuple[events.CheckSource, events.Load]:
        source, version = Checkpoint(path, delta, self._version if delta else 0), self._version + 1
        return events.CheckSource(source, manifest, version), events.Load(version, source, manifest)

    async def flush(self) -> tuple[CheckResult, ...]:
        """A prefix that old weights computed must not be used again. Released memory keeps no prefix either."""
        engine = self._engine
        needed = {Operation.LOAD, Operation.SLEEP, Operation.WAKE}
        if self._setup.checkpoints is None or not needed <= engine.operations:
            await engine.perform(events.Pause("abort"))
            await engine.perform(events.Flush())
            await engine.perform(events.Resume())
            return (CheckResult((), "accepted; nothing to judge it by"),)
        first, second = self._setup.checkpoints
        drawn = secrets.token_bytes(min(PREFIX_MAX, engine.long // 2))
        prompt = [byte % 31 + 1 for byte in drawn]
        await self._load_weights(first)
        await engine.tokens(prompt)
        await self._load_weights(second)
        reused = await engine.tokens(prompt)
        for call in (events.Pause("abort"), events.Sleep(ALL_TAGS), events.Wake(ALL_TAGS), events.Resume()):
            await engine.perform(call)
        fresh = await engine.tokens(prompt)
        continued, anew = await self._frozen(first)
        frozen = "a frozen request was not computed anew after the flush: it went on as the new weights alone would not"
        faults = (
            *if_true(fresh != reused, "a prefix that other weights had computed was used again after the flush"),
            *if_true(continued != anew, frozen),
        )
        return (CheckResult(faults, "a prompt of old weights was computed anew"),)

    async def _frozen(self, path: str) -> tuple[Tokens, Tokens]:
        """Change the weights under a frozen request. Returns its last tokens, and what the new weights make of it."""
        engine = self._engine
        if not (await engine.observe("before a sync that keeps requests")).recomputes:
            return (), ()
        request = await engine.begin_long()
        await self._load_weights(path, "keep")
        return await engine.continued(request, len(request.tokens))

    async def sleep_and_wake(self) -> tuple[CheckResult, ...]:
        """All memory is released, then taken back."""
        engine = self._engine
        await engine.perform(events.Pause("abort"))
        awake = await engine.memory_bytes()
        await engine.perform(events.Sleep(ALL_TAGS))
        asleep, slept = await engine.observe("asleep"), await engine.memory_bytes()
        late = await engine.late()
        made, tags = len(late.tokens), asleep.asleep
        listed = ", ".join(sorted(tags or ())) or "nothing"
        released, memory = _memory(awake, slept)
        sleep = (
            *if_true(asleep.generating, "it reports that it generates"),
            *if_true(tags not in (None, ALL_TAGS), f"it reports as asleep: {listed}"),
            *if_true(made, f"asleep, it made {made} tokens"),
            *if_true(released is not None and released <= 0, f"no memory was released: {memory}"),
        )
        sleeping = CheckResult(sleep, f"asleep, no token; {memory}")
        await engine.perform(events.Wake(frozenset({"weights"})))
        await engine.perform(events.Wake(frozenset({"kv_cache"})))
        woken, again = await engine.observe("awake and paused"), await engine.memory_bytes()
        await anyio.sleep(engine.silence_s)
        early = bool(late.tokens or woken.generating)
        await engine.perform(events.Resume())
        await engine.end(late)
        released, memory = _memory(slept, again)
        wake = (
            *if_true(woken.asleep, f"it reports as asleep: {', '.join(sorted(woken.asleep or ()))}"),
            *if_true(early, "it generates before the resume"),
            *if_true(released is not None and released >= 0, f"no memory was taken back: {memory}"),
            *await engine.changed(),
        )
        return sleeping, CheckResult(wake, f"the same tokens as before; {memory}")

    async def profile(self) -> tuple[CheckResult, ...]:
        """Two sessions one after the other, with requests in each."""
        engine, plan = self._engine, ProfilePlan()
        root, name = self._setup.traces.resolve(), f"conform-{secrets.token_hex(4)}"
        await engine.perform(events.CheckProfile(plan))
        faults: list[str] = []
        counts: list[str] = []
        directories = [f"{name}/global_step_{step}/replica_0" for step in (1, 2)]
        first: dict[str, int] = {}
        for step, directory in enumerate(directories, 1):
            session = ProfileSession(step, plan)
            await engine.perform(events.StartProfile(session, directory))
            await engine.tokens()
            closed = (await engine.observe("profiling")).profiling is False
            faults += if_true(closed and step == 1, "it reported no session while one was open")
            traces = (await engine.perform(events.StopProfile(session, directory))).traces
            faults += _trace_faults(root, directory, traces)
            counts.append(str(len(traces)))
            first = first or _files_below(root / directory)
        open_ = (await engine.observe("after a session")).profiling
        faults += if_true(open_, "it reports a session after the stop")
        grew = {path for path, size in _files_below(root / directories[0]).items() if first.get(path) != size}
        faults += if_true(grew, f"the first session was written to after its stop: {', '.join(sorted(grew))}")
        return (CheckResult(faults, f"two sessions left {' and '.join(counts)} traces, each in its own directory"),)

    async def _load_weights(
        self, path: str, mode: InFlight = "abort", delta: str = ""
    ) -> tuple[events.Observation, events.Returned]:
        """Load one checkpoint, as an agent does, as the next version. Returns what was seen and what it returned."""
        manifest = await to_thread.run_sync(build_manifest, self._setup.root / path, False)
        check, load = self._check_and_load(path, manifest, delta)
        self._version = load.version
        await self._engine.perform(events.Pause(mode))
        await self._engine.perform(check)
        returned = await self._engine.perform(load)
        observed = await self._engine.observe("loaded")
        if Operation.FLUSH in self._engine.operations:
            await self._engine.perform(events.Flush())
        await self._engine.perform(events.Resume())
        return observed, returned

    def _two_checkpoints(self) -> tuple[str, str]:
        if self._setup.checkpoints is None:
            raise EngineError("not judged: give two checkpoints of its model")
        return self._setup.checkpoints


def _memory(before: int | None, after: int | None) -> tuple[int | None, str]:
    """Bytes that were released, and the same in words; None if they can't be measured."""
    if before is None or after is None:
        return None, "its memory can't be measured from here"
    return before - after, f"memory {before:,} to {after:,} bytes"


def _trace_faults(root: Path, directory: str, traces: Sequence[Trace]) -> Iterator[str]:
    """Yield what is wrong with the traces that a session in a directory below `root` reported."""
    if not traces:
        yield f"the session of {directory} left no trace"
    for trace in traces:
        file = root / trace.path
        size = file.stat().st_size if file.is_file() else None
        if size is None:
            yield f"{trace.path} is reported, and not on the disk"
        elif size != trace.nbytes:
            yield f"{trace.path} has {size} bytes, and {trace.nbytes} are reported"
        elif not (size and _has_events(file)):
            yield f"{trace.path} holds no events"
        if not trace.path.startswith(f"{directory}/"):
            yield f"{trace.path} is not below {directory}"


def _files_below(directory: Path) -> dict[str, int]:
    """Return the size of each file."""
    return {str(path.relative_to(directory)): path.stat().st_size for path in directory.rglob("*") if path.is_file()}


def _has_events(file: Path) -> bool:
    if ".json" not in file.suffixes:
        return True
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
            return EVENTS in opened.read()
    except (OSError, EOFError):
        return False
