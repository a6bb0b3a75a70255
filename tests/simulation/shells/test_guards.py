"""Guards of the shells that their worlds must go on noticing: each is taken out, alone, and a promise breaks.

The worlds of `tests.simulation.cluster` can notice none of them: their shells are other ones.

    python -m tests.simulation.shells.test_guards NAME 0 200       # the first seed that notices
"""

import pytest

from tests.simulation.test_guards import Guard, check_noticed, search

GUARDS = {
    "an end that nothing asked for": Guard(
        "workers/agent.py",
        "if not life.restarting:",
        "if False:",
        8,
    ),
    "write first": Guard(
        "workers/agent.py",
        "if not later or is_written_first(before, effects):",
        "if False:",
        19,
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
        25,
    ),
    "no late call": Guard(
        "workers/driver.py",
        "elif self._is_late():",
        "elif False:",
        33,
    ),
    "no cancelled call": Guard(
        "workers/driver.py",
        "self._shield.shield = not at_once",
        "self._shield.shield = False",
        21,
    ),
    "an observation gives way": Guard(
        "workers/driver.py",
        "self._requested = perform\n        self._observing.cancel()",
        "self._requested = perform",
        3,
    ),
    "other bytes under a label": Guard(
        "workers/machine/observe.py",
        "torn=engine.torn or _has_other_bytes(engine, observation)",
        "torn=engine.torn",
        114,
    ),
    "a half-open connection": Guard(
        "workers/link/connection.py",
        "if not connecting.cancelled_caught and await self._answers(dealer):",
        "if False:",
        39,
    ),
    "a silent subscription": Guard(
        "workers/link/link.py",
        "if self._published_ms < since <= self._connection.answered_ms:",
        "if False:",
        434,
    ),
    "join again": Guard(
        "workers/link/link.py",
        "self._session.scope.cancel()",
        "pass",
        3,
    ),
    "lease of members": Guard(
        "workers/link/link.py",
        "joined = self._session is not None and self._session.snapshot.is_set()",
        "joined = True",
        24,
    ),
    # Nothing shows that the last command, or a resend request, was lost.
    "head beacon": Guard(
        "controlplane/bus/bus_loop.py",
        "self.publisher.send_nowait([wire.TOPIC_HEAD, wire.encode_header(self.state.epoch, 0, self.state.seq), _NIL])",
        "pass",
        8,
    ),
    # A push that did not arrive counts as a load.
    "a label proves": Guard(
        "workers/driver.py",
        "return observation.label == label",
        "return True",
        21,
    ),
    "recorded first": Guard(
        "controlplane/bus/bus_loop.py",
        "if effects and not self._commit():",
        "if False:",
        20,
    ),
    "silent agents": Guard(
        "controlplane/bus/bus_loop.py",
        "if drained and not self.inbox.drop_silent(at_us - self._config.agent_timeout_ms * 1000):",
        "if False:",
        9,
    ),
    "a stranger says hello": Guard(
        "controlplane/bus/bus_loop.py",
        "for connection, reply in replies.items():",
        "for connection, reply in ():",
        0,
    ),
}


@pytest.mark.long
@pytest.mark.timeout(600)  # it tries 200 worlds, if need be
@pytest.mark.parametrize("name", GUARDS)
def test_without_a_guard_a_promise_breaks(name: str) -> None:
    check_noticed(__name__, name, GUARDS[name].first, 200)


if __name__ == "__main__":
    raise SystemExit(search(GUARDS, "tests.simulation.shells.world"))
