"""The simulated trainer: it issues every kind of command, in no sensible order."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final, Literal

from msgspec.structs import replace

from controlplane.bus.callers import checked_order
from controlplane.machine.events import (
    CallerEvent,
    Issued,
    Publish,
    RetireRequested,
    SendFailed,
    SendReturned,
    SyncRequested,
)
from schemas.commands import (
    Broadcast,
    Checkpoint,
    Command,
    EngineCommand,
    Finish,
    Manifest,
    ProfileCommand,
    ProfilePlan,
    Pushed,
    Source,
    Target,
    WeightSync,
    Window,
)
from schemas.errors import CommandError
from schemas.events import Returned
from schemas.identity import REPLICAS_MAX, TIME_MAX_MS, Tag
from schemas.wire import decode_command
from tests.simulation.engine import Engine, delta_of, digest_of, weights_of

if TYPE_CHECKING:
    from tests.simulation.bus import Bus
    from tests.simulation.cluster import World

TAGS: tuple[frozenset[Tag], ...] = (frozenset(), frozenset({"weights"}), frozenset({"kv_cache"}))

FAR: Final = Target(replicas=frozenset({REPLICAS_MAX - 1}))
AT_BOUNDS: Final = (
    (Target(), 1),
    (FAR, TIME_MAX_MS),
    (Target(replicas=frozenset()), TIME_MAX_MS),
    (Target(replicas=frozenset(range(21_000))), 2000),
    # --- beyond ---
    (Target(), TIME_MAX_MS + 1),
    (Target(), 10**16),
    (Target(), 0),
    (Target(replicas=frozenset({0, REPLICAS_MAX})), 2000),
    (Target(replicas=frozenset({0, -1})), 2000),
    (Target(replicas=frozenset(range(100_000))), 2000),
)


class Trainer:
    """Issues commands to the living bus, and to zombies as well if they can still write."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.busy = True
        self.tries = 0
        self.asked: SyncRequested | None = None  # the last sync
        self.step = 0
        self.extremes = random.Random(world.seed)  # of its own, so that the other runs stay as they are
        self.extreme = self.extremes.choice(
            (0.0, 0.0, 0.1)
        )  # chance of a target and a timeout at their bounds or beyond
        self.pushing = random.Random(f"push {world.seed}")
        self.sending = random.Random(f"sending {world.seed}")
        self.deltas = random.Random(f"deltas {world.seed}")
        self.versions = random.Random(f"versions {world.seed}")
        self.counting = random.Random(f"counting {world.seed}")
        self.casting = random.Random(f"casting {world.seed}")
        # Longer than a lease, so that a command is still carried out when it expires.
        self.timeouts_ms = (1000, 3000, 6000, 25_000) if "trainer dies" in world.weather.aim else (1000, 3000, 6000)
        self.pace_ms = 40_000 if world.weather.aim == "quiet" else world.rng.choice((200, 800, 2500))

    def work(self) -> None:
        """Issue a command now and then, sometimes many at once."""
        if not self.busy:
            return
        rng = self.world.rng
        self.world.at(1 + int(rng.expovariate(1.0 / self.pace_ms)), self.work)
        writing = [bus for bus in self.world.buses if bus.alive and (bus is self.world.bus or rng.random() < 0.1)]
        if writing:
            bus = rng.choice(writing)
            for _ in range(20 if rng.random() < 0.02 else 1):
                self.ask(bus)

    def ask(self, bus: Bus) -> None:
        if self.world.rng.random() < self.world.weather.syncs:
            self.sync(bus, self.world.rng.choice((None, None, None, 1, 2, 3)))
        else:
            command, target, timeout_ms = self._command(), self._target(), self.world.rng.choice((300, 2000, 6000))
            if self.extremes.random() < self.extreme:
                target, timeout_ms = self.extremes.choice(AT_BOUNDS)
            self.issue(bus, command, target, timeout_ms)
            if (
                isinstance(command, ProfileCommand) and self.world.rng.random() < 0.2
            ):  # asked once more, before an answer
                self.world.at(self.world.rng.choice((1, 250)), self._ask_again, bus, command, target)

    def _ask_again(self, bus: Bus, command: Command, target: Target) -> None:
        if bus.alive and self.busy:
            self.issue(bus, command, target, 6000)

    def release(self) -> None:
        """Let the data plane release memory: never while a command may call an engine."""
        bus = self.world.bus
        if bus is None or not bus.alive or bus.committing is not None or bus.queue:
            return
        if bus.state.sync is None and not bus.state.open:
            for slot in self.world.slots:
                if slot.engine is not None and self.pushing.random() < 0.7:
                    slot.engine.release()

    def take_back(self) -> None:
        """Take all memory back, before an engine is commanded."""
        for slot in self.world.slots:
            if slot.engine is not None:
                slot.engine.take_back()

    def issue(self, bus: Bus, command: Command, target: Target, timeout_ms: int) -> None:
        if isinstance(command, EngineCommand):
            self.take_back()
        bus.tickets += 1
        operator = self.busy and self.world.rng.random() < 0.2
        self.hand_over(
            bus,
            Issued(
                ticket=bus.tickets,
                command=command,
                target=target,
                timeout_ms=timeout_ms,
                operator=operator,
                force=operator and self.world.rng.random() < 0.3,
            ),
        )

    def hand_over(self, bus: Bus, order: CallerEvent) -> None:
        """A bus refuses what is out of bounds before its machine sees it."""
        try:
            bus.feed(checked_order(order))
        except CommandError:
            self.world.say(f"bus {bus.life} refuses {order!r:.200}")

    def sync(
        self,
        bus: Bus,
        quorum: int | None,
        timeout_ms: int | None = None,
        version: int | None = None,
        again: bool = True,
    ) -> None:
        """Sync to a version above the committed one, or to one that the run counts; If `again`,
        perhaps to one that was tried before, from another source: the bus refuses it if anybody was told to
        load it.
        """
        rng = self.world.rng
        self.take_back()
        bus.tickets += 1
        ticket = bus.tickets
        self.tries += 1
        version = version or self._version(again)
        source = self._source(f"v{version}/try{self.tries}")
        reused = self._pushed_before() if again and isinstance(source, Pushed) else None
        source = reused or self._with_delta(source)
        counted = again and self.counting.random() < 0.2
        content = digest_of(weights_of(source))
        manifest = Manifest(tensors=1, nbytes=1, layout="l", content=content)
        order = SyncRequested(
            ticket=ticket,
            version=None if counted else version,
            source=source,
            manifest=manifest if rng.random() < 0.5 or reused is not None else None,
            in_flight=rng.choice(("abort", "wait", "keep")),
            quorum=quorum,
            target=self._target() if again else Target(),
            timeout_ms=timeout_ms if timeout_ms is not None else rng.choice(self.timeouts_ms),
            on_unreachable=rng.choice(("skip", "skip", "wait")),
            sends=again and isinstance(source, Pushed) and self.sending.random() < 0.5,
            operator=rng.random() < 0.2,
        )
        if again and rng.random() < (0.6 if self.world.weather.aim == "retries" else 0.1):
            order = self._retry(order)
        elif self.world.weather.broadcasts and self.casting.random() < self.world.weather.broadcasts:
            order = self._broadcast(order, f"v{version}/cast{self.tries}")
        self.asked = order
        self.hand_over(bus, order)

    def _retry(self, order: SyncRequested) -> SyncRequested:
        """Ask once more for the weights that were asked for last; now and then they are said to be others."""
        asked = self.asked
        if asked is None or asked.version is None:
            return order
        manifest = asked.manifest if self.world.rng.random() < 0.7 else order.manifest
        return replace(order, version=asked.version, source=asked.source, manifest=manifest)

    def _source(self, path: str) -> Source:
        pushes = self.world.weather.pushes
        if not pushes or self.pushing.random() >= pushes:
            return Checkpoint(path)
        return Pushed(f"push {self.tries}", path if self.pushing.random() < 0.5 else "")

    def _with_delta(self, source: Source) -> Source:
        """Now and then, name a delta beside a checkpoint, most often from what is committed."""
        commits = self.world.promises.commits()
        if not isinstance(source, Checkpoint) or not commits or self.deltas.random() >= 0.5:
            return source
        base = commits[-1] if self.deltas.random() < 0.8 else self.deltas.choice(commits)
        assert base.source is not None
        return Checkpoint(source.path, delta_of(weights_of(base.source)), base.version)

    def _pushed_before(self) -> Pushed | None:
        """Now and then, what was pushed and committed before, to be pushed again as a version of its own."""
        if self.world.promises.lost or self.pushing.random() >= 0.25:
            return None
        sources = [commit.source for commit in self.world.promises.commits()]
        return next((source for source in reversed(sources) if isinstance(source, Pushed)), None)

    def on_published(self, bus: Bus, publish: Publish) -> None:
        """Push the weights of a sync to its members once they may be loaded; now and then that fails."""
        sync, command = bus.state.sync, decode_command(publish.envelope.body)
        if sync is None or not isinstance(command, WeightSync) or command.phase != "load" or sync.seq != publish.seq:
            return
        source = sync.request.source
        if isinstance(source, Broadcast):
            fails = self.casting.random() < 0.2
            self.world.at(self.casting.choice((1, 50, 700)), self._cast, bus, sync.request, source, fails)
        if not isinstance(source, Pushed):
            return
        fails = self.pushing.random() < 0.2
        delay_ms = 0
        for replica in sorted(sync.members - sync.lost):
            engine = self.world.slot(f"{replica}.0").engine
            if engine is None or (fails and self.pushing.random() < 0.5):
                continue
            delay_ms = self.pushing.choice((1, 50, 700))
            self.world.at(delay_ms, self._push, bus, sync.request, engine, source, engine.instance)
        # A sender may return before its last push has arrived.
        if sync.request.sends and not fails and self.sending.random() < 0.3:
            return  # it never returns
        ends, after_ms = (
            (self._send_fails, delay_ms) if fails else (self._send_returns, 1 if sync.request.ticket % 2 else delay_ms)
        )
        self.world.at(after_ms + 1, ends, bus, sync.request.ticket)

    def _push(self, bus: Bus, asked: SyncRequested, engine: Engine, source: Pushed, instance: int) -> None:
        """A trainer that is gone pushes nothing, and a push has ended when the load phase has. Now and then it pushes
        other bytes than it announced, to an engine that would show it.
        """
        sync = bus.state.sync
        lives = bus is self.world.bus and bus.alive
        if lives and sync is not None and sync.request.ticket == asked.ticket and sync.phase == "load":
            seen = engine.kind == "tiny" and asked.manifest is not None
            wrong = self.busy and seen and self.pushing.random() < 0.2
            done = engine.push(source, instance, f"not {source.label}" if wrong else weights_of(source))
            self.world.say(f"the trainer pushes {source.label!r}: {done}")

    def _broadcast(self, order: SyncRequested, path: str) -> SyncRequested:
        """Broadcast to the replicas that are to sync; now and then one of them is left out of the group."""
        places = [slot.identity for slot in self.world.slots if not (slot.double or slot.identity.node_rank)]
        syncing = [place.replica for place in places if place.syncs and order.target.includes(place)]
        replicas = tuple(replica for replica in sorted(syncing) if self.casting.random() < 0.95)
        path = path if self.casting.random() < 0.3 else ""
        source = Broadcast(host="h", port=1, group=f"group {self.tries}", replicas=replicas, path=path)
        content = digest_of(weights_of(source)) if self.casting.random() < 0.5 else None
        manifest = Manifest(tensors=1, nbytes=1, layout="l", content=content)
        return replace(order, source=source, manifest=manifest, sends=True)

    def _cast(self, bus: Bus, asked: SyncRequested, source: Broadcast, fails: bool) -> None:
        """Broadcast once all receivers wait for it; if it `fails`, some may have received all of it. A trainer that is
        gone sends nothing, and an engine whose group is never whole gives up.
        """
        sync = bus.state.sync
        lives = bus is self.world.bus and bus.alive and sync is not None and sync.request.ticket == asked.ticket
        if not lives or sync is None or sync.phase != "load":
            return
        engines = [self.world.slot(f"{replica}.0").engine for replica in source.replicas]
        waiting = [engine.awaiting(source) if engine is not None else None for engine in engines]
        if None in waiting:
            self.world.at(100, self._cast, bus, asked, source, fails)
            return
        for engine, attempt in zip(engines, waiting, strict=True):
            if engine is None or attempt is None or (fails and self.casting.random() < 0.5):
                continue
            attempt.waits, attempt.result = False, Returned()
            if engine.caller is not None:
                self.world.at(self.casting.choice((1, 20, 200)), engine.caller.returned, attempt)
        self.world.say(f"the trainer broadcasts {source.group}")
        self.world.at(300, self._send_fails if fails else self._send_returns, bus, asked.ticket)

    def _send_returns(self, bus: Bus, ticket: int) -> None:
        if bus.alive:
            self.world.promises.sent(bus, ticket)
            self.hand_over(bus, SendReturned(ticket=ticket))

    def _send_fails(self, bus: Bus, ticket: int) -> None:
        self.world.say(f"the trainer can't push the weights of the sync with ticket {ticket}")
        self.hand_over(bus, SendFailed(ticket=ticket, reason="no"))

    def retire(self, bus: Bus, place: str) -> None:
        """Take a place out of the run. The bus refuses one whose agent runs, and one that the run does not know."""
        bus.tickets += 1
        self.world.say(f"bus {bus.life} is asked to retire {place}")
        places = (place,) if self.world.rng.random() < 0.9 else (place, "77")
        self.hand_over(bus, RetireRequested(ticket=bus.tickets, places=places))

    def _version(self, again: bool) -> int:
        """The next version; or, if `again`, perhaps one that was tried before. Never one that the log has lost."""
        promises = self.world.promises
        if again and not promises.lost and self.versions.random() < 0.7:
            return 1 + max((commit.version for commit in promises.commits()), default=0)
        tried = (published.command for published in (*promises.lost.values(), *promises.log.values()))
        return 1 + max((command.version for command in tried if isinstance(command, WeightSync)), default=0)

    def fail_to_send(self, bus: Bus) -> None:
        """Raise in the middle of sending weights, if they are sent now."""
        if bus.state.sync is not None:
            self._send_fails(bus, bus.state.sync.request.ticket)

    def restore(self, *, sync: bool = True) -> None:
        """Issue what a replica needs to come back, then one sync for all, if wanted."""
        bus = self.world.bus
        if bus is None:
            self.world.promises.broken("convergence", "there is no bus to restore from")
        sessions = {desired.profile.step for desired in bus.state.desired.values() if desired.profile is not None}
        for step in sorted(sessions):
            self.issue(bus, ProfileCommand(action="stop", step=step), Target(), timeout_ms=9000)
        self.issue(bus, EngineCommand(operation="wake"), Target(), timeout_ms=9000)
        self.issue(bus, EngineCommand(operation="resume"), Target(), timeout_ms=9000)
        if sync:
            self.world.adapters.unbind(bus)
        self.world.run(self.world.now + 10_000)
        if sync:
            self.sync(bus, quorum=1, timeout_ms=30_000, again=False)  # slow engines are not broken ones
            self.world.adapters.restore(bus)

    def _target(self) -> Target:
        rng = self.world.rng
        return Target(replicas=frozenset({rng.randrange(3)})) if rng.random() < 0.15 else Target()

    def _roles(self) -> dict[str, ProfilePlan]:
        ranks = frozenset({0}) if self.world.rng.random() < 0.3 else None
        return {"actor": ProfilePlan(ranks=ranks)} if self.world.rng.random() < 0.7 else {}

    def _command(self) -> Command:
        rng = self.world.rng
        kind = rng.randrange(8)
        if kind < 2:
            self.step += rng.randrange(2)
            window = Window(0, 3) if rng.random() < 0.3 else None
            plan = ProfilePlan(window=window, enabled=rng.random() < 0.95)
            return ProfileCommand(action="start", step=self.step, plan=plan, roles=self._roles())
        if kind == 2:
            action: Literal["stop", "collect", "check", "finish"] = rng.choice(
                ("stop", "stop", "stop", "collect", "check", "finish")
            )
            finish = Finish(relocate=True, hook=True, hook_all_ranks=rng.random() < 0.5)
            plan = ProfilePlan(finish=finish, ranks=frozenset({0}) if rng.random() < 0.3 else None)
            step = self.step + (1 if self.world.now % 4 == 0 else 0)  # now and then one that is not open
            return ProfileCommand(action=action, step=step, plan=plan, roles=self._roles(), profiled_steps=(step,))
        if kind == 3:
            return EngineCommand(operation=rng.choice(("flush", "abort")))
        if kind == 4:
            return EngineCommand(operation="pause", mode=rng.choice(("abort", "wait", "keep")))
        if kind == 5:
            return EngineCommand(operation="resume")
        operation: Literal["sleep", "wake"] = rng.choice(("sleep", "wake", "wake"))
        discard = operation == "sleep" and rng.random() < 0.3
        return EngineCommand(operation=operation, tags=rng.choice(TAGS), discard=discard)
