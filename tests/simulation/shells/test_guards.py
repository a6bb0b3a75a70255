"""Guards of the shells that their worlds must go on noticing: each is taken out, alone, and a promise breaks.

The worlds of `tests.simulation.cluster` can notice none of them: their shells are other ones. A line that has changed
has to be changed here as well.

    python -m tests.simulation.shells.test_guards NAME 0 200       # the first seed that notices
"""

import subprocess
import sys

import pytest

from tests.simulation.test_guards import ROOT, Finder, Guard

GUARDS = {
    "an end that nothing asked for": Guard(
        "workers/agent.py",
        "if not life.restarting:",
        "if False:",
        0,
    ),
    "write first": Guard(
        "workers/agent.py",
        "if not later or is_written_first(before, effects):",
        "if False:",
        0,
    ),
    "a stray cancellation of a call": Guard(
        "workers/driver.py",
        "except (Exception, asyncio.CancelledError) as error:\n            if ends_this_task(error):",
        "except Exception as error:\n            if ends_this_task(error):",
        0,
    ),
    "a stray cancellation of an observation": Guard(
        "workers/driver.py",
        "if not (scope.cancel_called and isinstance(error, asyncio.CancelledError)):",
        "if isinstance(error, asyncio.CancelledError):\n                    raise\n                else:",
        0,
    ),
    "an observation that ends late": Guard(
        "workers/driver.py",
        "if not (scope.cancel_called and isinstance(error, asyncio.CancelledError)):",
        "if scope.cancel_called and not isinstance(error, Exception):\n                    raise\n"
        "                else:",
        0,
    ),
    "no late call": Guard(
        "workers/driver.py",
        "elif self._is_late():",
        "elif False:",
        0,
    ),
    "no cancelled call": Guard(
        "workers/driver.py",
        "with CancelScope(shield=True):",
        "with CancelScope(shield=False):",
        0,
    ),
    "an observation gives way": Guard(
        "workers/driver.py",
        "self._requested = perform\n        self._observing.cancel()",
        "self._requested = perform",
        0,
    ),
    "a half-open connection": Guard(
        "workers/link/connection.py",
        "if not connecting.cancelled_caught and await self._answers(dealer):",
        "if False:",
        0,
    ),
    "a silent subscription": Guard(
        "workers/link/link.py",
        "if self._published_ms < since <= self._connection.answered_ms:",
        "if False:",
        0,
    ),
    "join again": Guard(
        "workers/link/link.py",
        "self._session.scope.cancel()",
        "pass",
        0,
    ),
    "lease of members": Guard(
        "workers/link/link.py",
        "joined = self._session is not None and self._session.snapshot.is_set()",
        "joined = True",
        0,
    ),
    "recorded first": Guard(
        "controlplane/bus/bus_loop.py",
        "if effects and not self._commit():",
        "if False:",
        0,
    ),
    "silent agents": Guard(
        "controlplane/bus/bus_loop.py",
        "if drained and not self.inbox.drop_silent(at_us - self._config.agent_timeout_ms * 1000):",
        "if False:",
        0,
    ),
    "tickets of a closed bus": Guard(
        "controlplane/bus/bus.py",
        "self.run([events.Closed(at_us=at_us, at_ns=at_ns)], at_us, at_ns)",
        "pass",
        0,
    ),
    "a stranger says hello": Guard(
        "controlplane/bus/bus_loop.py",
        "self._tell_unregistered()",
        "pass",
        0,
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", GUARDS)
def test_without_a_guard_a_promise_breaks(name: str) -> None:
    command = [sys.executable, "-m", __name__, name, str(GUARDS[name].first), "200"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


def main() -> int:
    """Run seeds without a guard until one notices, and print which."""
    name, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    sys.meta_path.insert(0, Finder(GUARDS[name]))
    from tests.simulation.shells.world import simulate

    for seed in (first, *range(last)):
        try:
            simulate(seed)
        except Exception as error:
            sys.stdout.write(f"{name}: seed {seed}: {type(error).__name__} {error!s:.150}\n")
            return 0
    sys.stdout.write(f"{name}: not noticed\n")
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
