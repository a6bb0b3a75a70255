"""Guards that the simulation must go on noticing: each is taken out of the source, alone, and a promise breaks.

The first ones are ablations of whole mechanisms: without one of them most runs still end well; it is there for the few
that do not. Of the others, 41 were tried, and those were kept that some seed notices. So they say nothing of the share
that is noticed of changes drawn at random, which `tests/mutants.py` measures. A line that has changed has to be changed
here as well.

    python -m tests.simulation.test_guards NAME 400       # its `first` if that notices, else the first of 400 that does
"""

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


class Guard(NamedTuple):
    """line: as it is.   without: without it.   first: a seed that notices.   breaks: what that has to find broken."""

    line: str
    without: str
    first: int
    breaks: str = ""


Guards = Mapping[str, Mapping[str, Guard]]
"""By file and name."""

GUARDS: Guards = {
    "controlplane/machine/adapters.py": {
        "one path at a time": Guard(
            "if any(sync.key and sync.request.source == Checkpoint(adapter.path) for sync in state.syncs.values()):",
            "if False:",
            407,
        ),
    },
    "controlplane/machine/agents.py": {
        # A judge that comes back to the next trainer is taken for a replica that syncs, and waits for a commit for
        # ever.
        "who left": Guard(
            "if first is not None and first.hello.identity.syncs != hello.identity.syncs:",
            "if False:",
            64,
            "P4 late joiner",
        ),
        # Every report goes on to name a place that was retired, as absent.
        "retired members": Guard("        members=members,\n", "", 18, "P3 answer"),
        # Nodes of one replica disagree on its mode, and commands mean one thing to one and another to the other.
        "one shape": Guard(
            "if theirs.node_rank == identity.node_rank or theirs.shape == identity.shape:",
            "if True:",
            3,
            "P4 late joiner",
        ),
        # An agent that started again said hello twice, and stays in the quarantine that its restart was to end.
        "hello twice": Guard(
            "fresh=not same or (holder is not None and holder.fresh),", "fresh=not same,", 500, "I5 quarantine"
        ),
        "an assigned place is kept": Guard(
            "taken = known.union(replica for replica, _ in assigned.values())", "taken = known", 136
        ),
        # Two processes take turns at one place, each with an engine of its own.
        "one holder": Guard(
            "if holder is not None and not same and holder.state in ALIVE:", "if False:", 2, "P3 answer"
        ),
    },
    "controlplane/machine/coordinator.py": {
        # An agent comes back at a place that was taken out of the run for good.
        "retired places": Guard("        claims={},\n", "        claims={},\n        retired={},\n", 1, "P3 answer"),
        # Engines load other bytes than they were told to, and report success.
        "digests compared": Guard(
            "outcomes = with_digests_compared(ended.command, ended.all_outcomes, served_digests(state))",
            "outcomes = ended.all_outcomes",
            1493,
            "I2 proof",
        ),
        # A sender returned, and some weights have not arrived: the engines wait for as long as for a whole load.
        "a sender that returned": Guard(
            "events.SendReturned: sync.on_send_returned,",
            "events.SendReturned: lambda state, event, _: state,",
            39,
            "P11 true",
        ),
        "an answer is newer than a status": Guard("        state = note_shown(state, outcomes.values())\n", "", 51),
    },
    "controlplane/machine/provenance.py": {
        # A trainer takes samples whatever the run knows of the weights that made them.
        "samples of proven weights": Guard(
            "(not unproven and provenance.proof not in PROVEN)", "False", 0, "I15 proven samples"
        ),
        "samples of a launch": Guard(
            'return "", 0, newest, "unproven" if newest else "launch"', 'return "", 0, newest, "launch"', 0
        ),
        "samples of a holder": Guard(
            "held = bool(holders) if replica is None else _is_in(holders, replica)", "held = True", 19
        ),
        "samples of a launch under a label": Guard(
            "state = replace(state, loaded=loaded, launch_labels={**state.launch_labels, **labels})", "pass", 101
        ),
        "a holder again after a launch under its label": Guard(
            "if desired.committed is None or label_of(desired.committed) in state.launch_labels.get(replica, ()):",
            "if desired.committed is None:",
            101,
        ),
        "samples of an aborted sync": Guard('return "unproven" if open_ else "aborted"', 'return "proven"', 87),
    },
    "controlplane/machine/publishing.py": {
        # A report has no line for an agent that is away when the command is issued, and nothing to raise for.
        "absent agents": Guard("absent=_absent_outcomes(state, event.at_us),", "absent=(),", 0, "P3 answer"),
        "agents end first": Guard("ttl_ms = timeout_ms - min(1000, timeout_ms // 10)", "ttl_ms = timeout_ms", 0),
        "sent again": Guard("ttl_ms=max(0, expires_us - at_us) // 1000", "ttl_ms=record.envelope.ttl_ms", 1),
    },
    "controlplane/machine/quorum.py": {
        # A replica that is out of reach serves the old version, and the sync of the others is a success.
        "unproven replicas": Guard("unproven=tuple(sorted(unproven - joining)),", "unproven=(),", 2, "P11 true"),
        "quorum": Guard(
            "len(sync.members - sync.joining or sync.members) // 2 + 1",
            "len(sync.members - sync.joining or sync.members) // 2",
            1,
        ),
    },
    "controlplane/machine/replicas.py": {
        "listed as serving": Guard(
            "and identity.syncs and not (waiting and identity.agent in waiting):",
            "and identity.syncs and (waiting and identity.agent in waiting):",
            0,
        ),
    },
    "controlplane/machine/stops.py": {
        "by whose order": Guard(
            "if isinstance(unit, int) and (paused or asleep):", "if isinstance(unit, int) and (paused and asleep):", 3
        ),
    },
    "controlplane/machine/sync.py": {
        # An agent without its journal takes its engine's label for the weights that an aborted sync had under that
        # version.
        "one version for the same weights": Guard(
            "state = replace(state, loaded=with_loaded(state.loaded, sync))", "pass", 2, "I4 monotonic"
        ),
        # A trainer begins a sync, and forgets it: the engines stay paused.
        "a held commit expires": Guard(
            "until_us = ended.issued_us + sync.request.timeout_ms * 1000", "until_us = 10**18", 92, "convergence"
        ),
        "absent waits": Guard(
            'elif sync.request.on_unreachable != "wait" and is_engine_down', "elif is_engine_down", 15
        ),
        "adapter flips at once": Guard("state = with_committed(state, adapter)", "pass", 34),
    },
    "controlplane/bus/callers.py": {
        # A timeout of ten billion seconds is published, and the log can't be read any more.
        "bounds": Guard("return _order_decoder.decode(encode(order))", "return order", 10, "P3 answer"),
    },
    "workers/machine/decide.py": {
        # An agent that starts again has forgotten which calls it made.
        "journal": Guard("        calls_made=state.calls_made,\n", "", 3, "P5 one effect"),
        # What a trainer paused stays paused when it is gone.
        "lease": Guard(
            "events.LeaseExpired: _on_lease_expired,",
            "events.LeaseExpired: lambda state, event, _: state,",
            117,
            "P7 trainer first",
        ),
        # It pauses, and resumes before a bus has said what is committed.
        "resumed by a bus": Guard(
            "_proceed(_end_activity(state, outcome, effects), now_ms, effects)",
            "_proceed(replace(_end_activity(state, outcome, effects), bus_lost=False), now_ms, effects)",
            9,
            "I1 no torn serving",
        ),
        # The trainer releases memory for its own work, and the agent wakes it.
        "memory of the trainer": Guard(
            "engine=replace(unseen, memory=event.settings.memory, trouble=None),",
            "engine=replace(unseen, trouble=None),",
            28,
            "P5 one effect",
        ),
        # An agent that is cut off brings its engine back to what it remembers, and its successor to what is committed.
        "one commander": Guard(
            "changed_by_others=state.changed_by_others or changed,", "changed_by_others=False,", 961, "P6 fencing"
        ),
        # A sync of a few megabytes stops the whole fleet.
        "adapters pause nothing": Guard(
            "call=activity.calls[0]))",
            'call=events.Pause("keep") if type(activity.calls[0]) is events.LoadAdapter else activity.calls[0]))',
            4,
            "P12 adapters",
        ),
        # A session had ended when the bus was lost, and its step is recorded again when the bus is back.
        "a recorded step": Guard(
            "state = with_recorded(state, activity, result)", "state = state", 299, "P5 one effect"
        ),
        "a recorded step in the next life": Guard(
            "suppressed=only_recorded(state.suppressed, state.suppressed.recorded),", "", 299, "P5 one effect"
        ),
        "taken over": Guard(
            "if state.bus_lost and activity.trigger is None and taken_over(state.engine, call, engine, state.desired):",
            "if False:",
            2024,
        ),
    },
    "workers/machine/lora.py": {
        "drained": Guard(
            "UnloadAdapter(model, waited=now_ms >= unload.until_ms)", "UnloadAdapter(model, waited=True)", 177
        ),
        "adapters left": Guard(
            "leftover, activity = left(_pursued(state), state.engine), state.activity",
            "leftover, activity = (), None",
            28,
        ),
        "adapter in flight": Guard(
            "leftover, activity = left(_pursued(state), state.engine), state.activity",
            "leftover, activity = left(_pursued(state), state.engine), None",
            65,
        ),
        "a place that is free again": Guard(
            "return engine.adapter_places is not None and has_place(engine) and not has_place(before)",
            "return False",
            270,
        ),
    },
    "workers/machine/observe.py": {
        # An engine can't be read, so it shows no operation: its session is closed as one that it can't have.
        "an engine that can't be read": Guard(
            "after = apply_observation(called, observation)",
            'after = apply_observation(called, replace(observation, tokenizer="present"))',
            64,
            "I7 sessions stay open",
        ),
        # An agent without its journal finds an engine paused that was given other weights, and lets it go on.
        "a cache that is found": Guard(
            "return replace(engine, stale_cache=given and not observation.generating)",
            "return engine",
            1039,
            "I1 no torn serving",
        ),
        # An engine that an agent without its journal has found paused, and that does not say so, stays paused.
        "silence that is told": Guard(
            "return replace(engine, generating=None, stale_cache=given)",
            "return replace(engine, stale_cache=given)",
            395,
            "P4 late joiner",
        ),
        # An engine evicts an adapter, and its replica goes on to be listed for it.
        "adapters read back": Guard(
            "with_listed(_with_label(engine, observation), observation.adapters),",
            "_with_label(engine, observation),",
            29,
            "P12 adapters",
        ),
        "asleep as asked": Guard(
            "case Sleep() if asleep is not None and not call.tags <= asleep:",
            "case Sleep() if asleep is not None and not call.tags > asleep:",
            31,
        ),
        # A session that ended with its window looks like one that is not open, and its step is recorded again.
        "a window's end": Guard(
            "return None if windowed and not observation.profiling else observation.profiling",
            "return observation.profiling",
            456,
            "P5 one effect",
        ),
        "interrupted load": Guard(
            "return replace(_torn(engine), stale_cache=True)", "return replace(engine, stale_cache=True)", 24
        ),
        "stale adapters": Guard(
            "return replace(_torn(engine), stale_adapters=frozenset(engine.adapters))", "return _torn(engine)", 45
        ),
        "a launch under a label": Guard(
            "launch = _torn(launch) if launch.version or launch.label_changed else launch", "pass", 419
        ),
    },
    "workers/machine/reconcile.py": {
        "looks alone": Guard(
            "return (Observe(),) if alone and calls and calls[0] is not state.deferred_finish else calls",
            "return calls",
            1138,
        ),
        "broadcast once": Guard(
            "source = source_to_take(wanted, desired, engine) if load_commanded else durable_source(wanted.source)",
            "source = wanted.source",
            39,
        ),
        "delta once": Guard(
            "source = source_to_take(wanted, desired, engine) if load_commanded else durable_source(wanted.source)",
            "source = wanted.source if load_commanded else durable_source(wanted.source)",
            24,
        ),
    },
    "workers/machine/rules.py": {
        # What was lost is never asked for, and what comes after it is applied without it.
        "hole check": Guard("if event.seq > state.seq + 1:", "if False:", 0, "P2 no hole"),
        # A trainer that was replaced and does not know it is still obeyed.
        "fence": Guard("if event.epoch >= state.epoch:", "if True:", 8, "P6 fencing"),
        # The records of earlier lives, replayed by the living bus, are refused as old.
        "split of the epochs": Guard(
            "if event.epoch >= state.epoch:", "if event.origin >= state.epoch:", 52, "P6 fencing"
        ),
        # An agent that is ahead of a log that lost its tail waits for what will never come.
        "position per epoch": Guard(
            "replace(state, epoch=epoch, reorder_buffer=(), suppressed=known)",
            "replace(state, epoch=epoch, snapshot_epoch=epoch * state.joined, reorder_buffer=())",
            48,
            "convergence",
        ),
        "a sync waits for a place": Guard("return event.at_ms + event.ttl_ms // 2", "return None", 542),
    },
    "workers/machine/state.py": {
        # A replica out of reach serves what is not committed any more, though it was told to pause.
        "pause on a lost bus": Guard(
            'return self.bus_lost and self.settings.on_lost_bus == "pause"', "return False", 10, "I1 no torn serving"
        ),
        # An agent is given a new key, and leaves the sync that it has prepared.
        "a new key waits": Guard(
            "return self.desired.sync is not None or loading or bool(self.queue)", "return False", 3, "P3 answer"
        ),
    },
    "workers/machine/suppressed.py": {
        "lifted": Guard(
            'lifted = command.phase == "commit" or command.version == suppressed.quarantined', "lifted = True", 19
        ),
    },
    "workers/machine/weights.py": {
        # The trainer pushed weights, and the sync was aborted: the engine goes on with what was not committed.
        "weights read again": Guard(
            "return replace(engine, maybe_pushed=True) if pushing and not engine.maybe_pushed else engine",
            "return engine",
            380,
            "I1 no torn serving",
        ),
        "torn": Guard("return not (engine.torn or engine.maybe_pushed) and", "return not engine.maybe_pushed and", 24),
        "base": Guard("held.version == loaded.version == source.base", "loaded.version > 0", 98),
    },
    "schemas/desired.py": {
        # A stop closes whatever is open: what the trainer wants recorded ends with somebody else's session.
        "a stop names its session": Guard(
            "desired.profile is not None and desired.profile.step == command.step",
            "desired.profile is not None",
            13,
            "I7 sessions stay open",
        ),
        # A command for others takes away the session of this replica.
        "a session of one's own": Guard(
            "        case _ if not targeted:\n            return desired\n",
            "        case _ if not targeted:\n            return replace(desired, profile=None)\n",
            8,
            "I7 sessions stay open",
        ),
    },
    "tests/simulation/bus.py": {
        # A bus that was replaced goes on writing into the log, between the records of its successor.
        "lock of the log": Guard("return self.world.log.owner != self.life", "return False", 23, "P1 order"),
    },
}


class Changed(SourceFileLoader):
    """Loads a module without one of its guards."""

    guard: Guard

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the changed source."""
        source = Path(self.path).read_text()
        assert source.count(self.guard.line) == 1, f"{self.path} has {self.guard.line!r} not once: look for it"
        return compile(source.replace(self.guard.line, self.guard.without), self.path, "exec")


class Finder:
    """Finds the module that a guard is taken out of."""

    def __init__(self, file: str, guard: Guard) -> None:
        self.path, self.guard = str(ROOT / file), guard
        self.module = file.removesuffix(".py").replace("/", ".")

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of that module."""
        if fullname != self.module:
            return None
        loader = Changed(fullname, self.path)
        loader.guard = self.guard
        return importlib.util.spec_from_file_location(fullname, self.path, loader=loader)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for guards in GUARDS.values() for name in guards])
def test_without_a_guard_a_promise_breaks(name: str) -> None:
    check_noticed(__name__, name, 400)


def check_noticed(module: str, name: str, seeds: int) -> None:
    """Check in another process that a seed notices: its first, or else one of so many."""
    command = [sys.executable, "-m", module, name, str(seeds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


def search(every: Guards, worlds: str) -> int:
    """Run seeds without a guard until one notices, and print which.

    Args:
        every: The guards.
        worlds: The module that runs a seed.
    """
    name, seeds = sys.argv[1], int(sys.argv[2])
    file, guard = next((file, guards[name]) for file, guards in every.items() if name in guards)
    sys.meta_path.insert(0, Finder(file, guard))
    simulate, others = importlib.import_module(worlds).simulate, set[str]()
    for seed in (guard.first, *range(seeds)):
        try:
            simulate(seed)
        except Exception as error:
            if str(error).startswith(guard.breaks):
                sys.stdout.write(f"{name}: seed {seed}: {type(error).__name__} {error!s:.150}\n")
                return 0
            others.add(str(error).partition(":")[0])
    sys.stdout.write(f"{name}: not noticed; what broke was {others or 'nothing'}\n")
    return 1


if __name__ == "__main__":
    raise SystemExit(search(GUARDS, "tests.simulation.cluster"))
