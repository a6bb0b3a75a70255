"""Guards that the simulation must go on noticing: each is taken out of a machine's source, alone, and a promise breaks.

`tests/mutants.py` measures how much is noticed of changes that are drawn at random. These say nothing of that: of 41
that were tried they were kept because some seed notices them. A line that has changed has to be changed here as well.

    python -m tests.simulation.test_guards NAME 0 400       # the first seed that notices
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
    """file: where it is.   line: as it is.   without: without it.   first: a seed that notices."""

    file: str
    line: str
    without: str
    first: int


GUARDS = {
    "quorum": Guard(
        "controlplane/machine/quorum.py",
        "len(sync.members - sync.joining or sync.members) // 2 + 1",
        "len(sync.members - sync.joining or sync.members) // 2",
        1,
    ),
    "absent waits": Guard(
        "controlplane/machine/sync.py",
        'elif sync.request.on_unreachable != "wait" and is_engine_down',
        "elif is_engine_down",
        15,
    ),
    "an answer is newer than a status": Guard(
        "controlplane/machine/coordinator.py",
        "        state = note_shown(state, outcomes.values())\n",
        "",
        21,
    ),
    "by whose order": Guard(
        "controlplane/machine/stops.py",
        "if isinstance(unit, int) and (paused or asleep):",
        "if isinstance(unit, int) and (paused and asleep):",
        3,
    ),
    "listed as serving": Guard(
        "controlplane/machine/replicas.py",
        "and identity.syncs and not (waiting and identity.agent in waiting):",
        "and identity.syncs and (waiting and identity.agent in waiting):",
        0,
    ),
    "asleep as asked": Guard(
        "workers/machine/observe.py",
        "case Sleep() if asleep is not None and not call.tags <= asleep:",
        "case Sleep() if asleep is not None and not call.tags > asleep:",
        31,
    ),
    "lifted": Guard(
        "workers/machine/suppressed.py",
        'lifted = command.phase == "commit" or command.version == suppressed.quarantined',
        "lifted = True",
        136,
    ),
    "torn": Guard(
        "workers/machine/weights.py",
        "return not (engine.torn or engine.maybe_pushed) and",
        "return not engine.maybe_pushed and",
        24,
    ),
    "looks alone": Guard(
        "workers/machine/reconcile.py",
        "return (Observe(),) if alone and calls and calls[0] is not state.deferred_finish else calls",
        "return calls",
        1138,
    ),
    "taken over": Guard(
        "workers/machine/decide.py",
        "if state.bus_lost and activity.trigger is None and taken_over(state.engine, call, engine, state.desired):",
        "if False:",
        2024,
    ),
    "broadcast once": Guard(
        "workers/machine/reconcile.py",
        "source = source_to_take(wanted, desired, engine) if load_commanded else durable_source(wanted.source)",
        "source = wanted.source",
        39,
    ),
    "base": Guard(
        "workers/machine/weights.py",
        "held.version == loaded.version == source.base",
        "loaded.version > 0",
        98,
    ),
    "delta once": Guard(
        "workers/machine/reconcile.py",
        "source = source_to_take(wanted, desired, engine) if load_commanded else durable_source(wanted.source)",
        "source = wanted.source if load_commanded else durable_source(wanted.source)",
        24,
    ),
    "agents end first": Guard(
        "controlplane/machine/publishing.py",
        "ttl_ms = timeout_ms - min(1000, timeout_ms // 10)",
        "ttl_ms = timeout_ms",
        0,
    ),
    "sent again": Guard(
        "controlplane/machine/publishing.py",
        "ttl_ms=max(0, expires_us - at_us) // 1000",
        "ttl_ms=record.envelope.ttl_ms",
        1,
    ),
    "interrupted load": Guard(
        "workers/machine/observe.py",
        "return replace(_torn(engine), stale_cache=True)",
        "return replace(engine, stale_cache=True)",
        24,
    ),
    "stale adapters": Guard(
        "workers/machine/observe.py",
        "return replace(_torn(engine), stale_adapters=frozenset(engine.adapters))",
        "return _torn(engine)",
        45,
    ),
    "drained": Guard(
        "workers/machine/lora.py",
        "UnloadAdapter(model, waited=now_ms >= unload.until_ms)",
        "UnloadAdapter(model, waited=True)",
        177,
    ),
    "adapters left": Guard(
        "workers/machine/lora.py",
        "leftover, activity = left(_pursued(state), state.engine), state.activity",
        "leftover, activity = (), None",
        28,
    ),
    "adapter in flight": Guard(
        "workers/machine/lora.py",
        "leftover, activity = left(_pursued(state), state.engine), state.activity",
        "leftover, activity = left(_pursued(state), state.engine), None",
        65,
    ),
    "a place that is free again": Guard(
        "workers/machine/lora.py",
        "return engine.adapter_places is not None and has_place(engine) and not has_place(before)",
        "return False",
        270,
    ),
    "a sync waits for a place": Guard(
        "workers/machine/rules.py",
        "return event.at_ms + event.ttl_ms // 2",
        "return None",
        542,
    ),
    "adapter flips at once": Guard(
        "controlplane/machine/sync.py",
        "state = with_committed(state, adapter)",
        "pass",
        34,
    ),
    "one path at a time": Guard(
        "controlplane/machine/adapters.py",
        "if any(sync.key and sync.request.source == Checkpoint(adapter.path) for sync in state.syncs.values()):",
        "if False:",
        407,
    ),
    "an assigned place is kept": Guard(
        "controlplane/machine/agents.py",
        "taken = known.union(replica for replica, _ in assigned.values())",
        "taken = known",
        136,
    ),
    "samples of a launch": Guard(
        "controlplane/machine/provenance.py",
        'return "", 0, newest, "unproven" if newest else "launch"',
        'return "", 0, newest, "launch"',
        0,
    ),
    "samples of a holder": Guard(
        "controlplane/machine/provenance.py",
        "held = bool(holders) if replica is None else _is_in(holders, replica)",
        "held = True",
        19,
    ),
    "samples of a launch under a label": Guard(
        "controlplane/machine/provenance.py",
        "state = replace(state, loaded=loaded, launch_labels={**state.launch_labels, **labels})",
        "pass",
        101,
    ),
    "a holder again after a launch under its label": Guard(
        "controlplane/machine/provenance.py",
        "if desired.committed is None or label_of(desired.committed) in state.launch_labels.get(replica, ()):",
        "if desired.committed is None:",
        101,
    ),
    "a launch under a label": Guard(
        "workers/machine/observe.py",
        "launch = _torn(launch) if launch.version or launch.label_changed else launch",
        "pass",
        419,
    ),
    "samples of an aborted sync": Guard(
        "controlplane/machine/provenance.py",
        'return "unproven" if open_ else "aborted"',
        'return "proven"',
        87,
    ),
}


class Changed(SourceFileLoader):
    """Loads a module without one of its guards."""

    guard: Guard

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the changed source."""
        source = Path(self.path).read_text()
        assert source.count(self.guard.line) == 1, f"{self.guard.file} has {self.guard.line!r} not once: look for it"
        return compile(source.replace(self.guard.line, self.guard.without), self.path, "exec")


class Finder:
    """Finds the module that a guard is taken out of."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.module = guard.file.removesuffix(".py").replace("/", ".")

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of that module."""
        if fullname != self.module:
            return None
        loader = Changed(fullname, str(ROOT / self.guard.file))
        loader.guard = self.guard
        return importlib.util.spec_from_file_location(fullname, ROOT / self.guard.file, loader=loader)


@pytest.mark.long
@pytest.mark.parametrize("name", GUARDS)
def test_without_a_guard_a_promise_breaks(name: str) -> None:
    check_noticed(__name__, name, GUARDS[name].first, 400)


def check_noticed(module: str, name: str, first: int, last: int) -> None:
    """Check in another process that a seed notices."""
    command = [sys.executable, "-m", module, name, str(first), str(last)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


def search(guards: Mapping[str, Guard], worlds: str) -> int:
    """Run seeds without a guard until one notices, and print which.

    Args:
        guards: By name.
        worlds: The module that runs a seed.
    """
    name, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    sys.meta_path.insert(0, Finder(guards[name]))
    simulate = importlib.import_module(worlds).simulate
    for seed in (first, *range(last)):
        try:
            simulate(seed)
        except Exception as error:
            sys.stdout.write(f"{name}: seed {seed}: {type(error).__name__} {error!s:.150}\n")
            return 0
    sys.stdout.write(f"{name}: not noticed\n")
    return 1


if __name__ == "__main__":
    raise SystemExit(search(GUARDS, "tests.simulation.cluster"))
