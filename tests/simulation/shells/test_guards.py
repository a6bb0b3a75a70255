"""Guards of the shells that their worlds must go on noticing: each is taken out, alone, and a promise breaks.

The worlds of `tests.simulation.cluster` can notice none of them: their shells are other ones.

    python -m tests.simulation.shells.test_guards NAME 200
"""

import pytest

from tests.simulation.test_guards import Guard, Guards, check_noticed, search

GUARDS: Guards = {
    "controlplane/bus/bus_loop.py": {
        # Nothing shows that the last command, or a resend request, was lost.
        "head beacon": Guard("self.publisher.send_nowait([wire.TOPIC_HEAD,", "len([wire.TOPIC_HEAD,", 8),
        "recorded first": Guard("if effects and not self._commit():", "if False:", 20),
        "silent agents": Guard(
            "if drained and not self.inbox.drop_silent(at_us - self._config.agent_timeout_ms * 1000):", "if False:", 9
        ),
        "a stranger says hello": Guard("for connection, reply in replies.items():", "for connection, reply in ():", 0),
    },
    "workers/agent.py": {
        "an end that nothing asked for": Guard("if not life.restarting:", "if False:", 8),
        "write first": Guard("if not later or is_written_first(before, effects):", "if False:", 19),
    },
    "workers/driver.py": {
        # A push that did not arrive counts as a load.
        "a label proves": Guard("return observation.label == label", "return True", 21),
        "a stray cancellation of a call": Guard(
            "except (Exception, asyncio.CancelledError) as error:\n            if ends_this_task(error):",
            "except Exception as error:\n            if ends_this_task(error):",
            0,
        ),
        "a stray cancellation of an observation": Guard(
            "if not (scope.cancel_called and isinstance(error, asyncio.CancelledError)):",
            "if isinstance(error, asyncio.CancelledError):\n                    raise\n                else:",
            0,
        ),
        "an observation that ends late": Guard(
            "if not (scope.cancel_called and isinstance(error, asyncio.CancelledError)):",
            "if scope.cancel_called and not isinstance(error, Exception):\n                    raise\n"
            "                else:",
            25,
        ),
        "no late call": Guard("elif self._is_late():", "elif False:", 33),
        "no cancelled call": Guard("self._shield.shield = not at_once", "self._shield.shield = False", 21),
        "an observation gives way": Guard(
            "self._requested = perform\n        self._observing.cancel()", "self._requested = perform", 3
        ),
    },
    "workers/link/connection.py": {
        "a half-open connection": Guard(
            "if not connecting.cancelled_caught and await self._answers(dealer):", "if False:", 39
        ),
    },
    "workers/link/link.py": {
        "a silent subscription": Guard(
            "if self._published_ms < since <= self._connection.answered_ms:", "if False:", 434
        ),
        "join again": Guard("self._session.scope.cancel()", "pass", 3),
        "lease of members": Guard(
            "joined = self._session is not None and self._session.snapshot.is_set()", "joined = True", 24
        ),
    },
    "workers/machine/observe.py": {
        "other bytes under a label": Guard(
            "torn=engine.torn or _has_other_bytes(engine, observation)", "torn=engine.torn", 114
        ),
    },
}


@pytest.mark.long
@pytest.mark.timeout(600)  # it tries 200 worlds, if need be
@pytest.mark.parametrize("name", [name for guards in GUARDS.values() for name in guards])
def test_without_a_guard_a_promise_breaks(name: str) -> None:
    check_noticed(__name__, name, 200)


if __name__ == "__main__":
    raise SystemExit(search(GUARDS, "tests.simulation.shells.world"))
