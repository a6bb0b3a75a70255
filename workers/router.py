"""An agent registers its engine with an SGLang router, and removes it, so that requests go where they can be answered.

`routable` and `may_register` decide, from the agent's state alone; `RouterRegistration` carries it out. It keeps no
state that matters: it reads what the router has, compares, and asks for one step. So it does not matter who changed the
router, or which life of the agent did. Nothing that a router does ends an agent.

What sglang-router 0.3.2 does, observed on the real one:

- `POST /workers` is answered 202 before the worker has been contacted. A job then asks the worker's `GET /health`
  (`--health-check-endpoint`, without the key), for 5 s each time, again and again with up to 5 s between, for
  `--worker-startup-timeout-secs` (1800 s). Only after a 200 is the worker in `GET /workers` and gets requests, while
  the job goes on to load its tokenizer. `GET /workers/{id}` reports the job, and for 5 minutes why it failed. For a
  moment after the 202 it is 404: the job has not been taken up.
- Until the worker is listed, the job can't be cancelled: `DELETE` is answered 202 and fails, and the worker is added
  once it is healthy. Removing it means waiting for that.
- Adding a URL that is already listed is answered 202 too; that job fails and changes nothing, not even its key. But if
  the worker is removed while that job runs (half a second), the job adds it again. So nothing here adds what is listed,
  or asks twice; where another program did, the next poll repairs it.
- URLs are compared as text: with a trailing slash it is another worker.
- A listed worker is checked every 60 s. After 3 failures it gets no requests (`is_healthy` false) but stays listed;
  after 2 successes it gets them again. SGLang's `/health` generates a token: a paused engine answers 503 after 20 s, so
  a pause of minutes has the same effect.
- Requests in flight at a removed worker are answered; with no worker left, new requests are refused with 503.
  `DELETE /workers/{id}` of an unknown id is 404. Each registration gets a new id.
- With `--dp-aware` a worker is listed as `URL@0`, `URL@1`, … None of their ids can be deleted, only the one that `POST`
  answered, which deletes them all.
"""

import random
from collections.abc import Callable, Mapping
from typing import Final

import anyio
from anyio import CancelScope

from schemas.errors import EngineError
from schemas.logs import logger_of
from workers.agent import Agent
from workers.engines.client import CallRefused, mapping_at, text_at
from workers.engines.http import HttpClient, Route, base_url
from workers.machine.readiness import in_sync, is_wedged
from workers.machine.state import AgentState
from workers.machine.suppressed import still_desired
from workers.machine.weights import holds_committed, holds_weights

logger = logger_of("router")

KEY_VARIABLE: Final = "ROLLOUTCTL_ROUTER_API_KEY"
"""Holds the router's key. The same name with `_FILE` appended holds the path of a file that contains it."""

POLL_S: Final = 10.0
"""Seconds between two polls of a router that is in the wanted state: another program may have changed it."""
LEAVE_S: Final = 5.0
"""Seconds that an agent may take to leave the router when it ends."""
ANSWER_S: Final = 5.0
"""Seconds that the router may take to answer."""
BUSY_POLL_S: Final = 0.5
"""Seconds between two polls of a router that is working."""
JOB_PICKUP_S: Final = 5.0
"""Seconds for which a router may not know a job that it has accepted. After that, it has lost the job in a restart."""
RETRY_S: Final = 2.0
"""Wait after a failure, with jitter."""
SLOW_S: Final = 30.0
"""Seconds after which a warning says that the worker is still not taken."""

_WORKERS: Final = "/workers"


def routable(state: AgentState) -> bool:
    """Return whether the engine may keep getting requests: each is answered, from committed weights, in finite time.

    A pause alone does not remove it, neither that of a sync nor a commanded one: requests wait at the engine. If every
    replica were removed, a router without workers would refuse requests that can wait, and forget which prefixes each
    worker has. The router's own health check sees a pause of minutes.
    """
    engine, desired = state.engine, still_desired(state.desired, state.suppressed)
    if state.identity.node_rank > 0 or not state.joined or engine.tokenizer != "present":
        return False
    if (
        engine.torn
        or engine.lost
        or engine.asleep
        or engine.unknown
        or desired.asleep
        or desired.quarantined
        or desired.draining
        or state.bus_lost  # another version may be committed by now
        or is_wedged(state)
    ):
        return False
    if engine.stale_cache and engine.generating:
        return False
    syncing = desired.sync is not None and not engine.generating and holds_weights(engine, desired.sync)
    if not (syncing or holds_committed(desired, engine)):
        return False
    stuck = state.reconcile_blocked or (state.activity is not None and state.activity.overdue)
    return bool(engine.generating) or not stuck


def may_register(state: AgentState) -> bool:
    """Return whether an engine that is not in the router may be added: it generates, is in sync, and nothing runs.

    This is stricter than `routable`. The agent must have brought its engine to the desired state at least once, and the
    router checks a new worker's health, which a paused engine fails.
    """
    return routable(state) and in_sync(state) and bool(state.engine.generating)


def should_be_registered(state: AgentState, registered: bool) -> bool:
    """Return whether the engine belongs in the router, given whether it is there."""
    return routable(state) if registered else may_register(state)


class RouterRegistration:
    """One worker's registration in one router. Runs beside `agent.run`: `task_group.start_soon(router.follow, agent)`.

    Raises ConfigError.

    Args:
        url: The router's, http://HOST:PORT.
        worker_url: The engine server's, as the router reaches it.
        key: The router's, sent as a bearer token.
        worker_key: The engine's, which the router needs to call it.
        poll_s: Seconds between two polls of a router that is in the wanted state.
    """

    def __init__(
        self,
        url: str,
        worker_url: str,
        *,
        key: str | None = None,
        worker_key: str | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        self.where = base_url(url, "router", KEY_VARIABLE)
        self.worker = base_url(worker_url)
        self._worker_key, self._poll_s = worker_key, poll_s
        routes = {"add": Route("POST", _WORKERS, timeout_s=ANSWER_S)}
        self._client = HttpClient(self.where, routes, info_path=_WORKERS, key=key)
        self._id: str | None = None  # the router's id of its newest registration
        self._added_s: float | None = None  # when that was requested; None once the router knows of it
        self._yields = False  # removed while its bus is out of reach: who adds the worker again is this one's successor

    async def follow(self, agent: Agent) -> None:
        """Keep the router as the agent's state wants it, until cancelled; then leave it. Never fails; call it once.

        Before the agent has joined, and on node ranks above 0, the router is left alone: an agent that has not joined
        may be a second one of this place, started by mistake while the first is registered.
        """
        try:
            if agent.identity.node_rank == 0:
                await agent.wait_until(lambda state: state.joined)
                try:
                    await self._keep(agent)
                finally:
                    if not self._yields:
                        await self._leave()
        finally:
            await self.close()

    async def step(self, wanted: Callable[[bool], bool]) -> bool | None:
        """Read whether the worker is in the router, and ask once for `wanted(registered)` if that differs.

        Raises EngineError.

        Returns:
            Whether it is registered, if that is as wanted. None while the router is working: poll again soon.
        """
        ids = await self._entries()
        job = await self._job(ids)
        registered = bool(ids)
        busy = text_at(job, "status") in ("pending", "processing")
        adding = text_at(job, "job_type") == "AddWorker"
        if busy and not (registered and adding):
            return None
        if wanted(registered) == registered:
            return registered
        if registered:
            await self._remove(ids, busy)
        elif adding:  # the job has ended and did not add it
            self._id = None  # report this once, then ask again
            reason = text_at(job, "message") or "it gives no reason."
            raise CallRefused(f"{self.where} did not take {self.worker}: {reason}", None, reason)
        else:
            await self._add()
        return None

    def wants(self, state: AgentState, registered: bool) -> bool:
        """Return whether the worker should be in the router, given whether it is there.

        An agent whose bus is out of reach removes it once.
        """
        self._yields = state.bus_lost and (self._yields or not registered)
        return registered if self._yields else should_be_registered(state, registered)

    async def close(self) -> None:
        """Close the connections. `follow` does so itself."""
        with CancelScope(shield=True):
            await self._client.close()

    async def _keep(self, agent: Agent) -> None:
        warned, working_since = False, None
        while True:
            try:
                registered = await self.step(lambda registered: self.wants(agent.state, registered))
            except Exception as error:  # nothing that a router answers ends an agent
                if not warned:
                    logger.warning("agent %s: %s Retrying until it works.", agent.identity.agent, _sentence(error))
                warned, working_since = True, None
                await anyio.sleep(min(RETRY_S, self._poll_s) * random.uniform(0.75, 1.0))
                continue
            if registered is None:
                working_since = working_since or anyio.current_time()
                if not warned and anyio.current_time() - working_since > SLOW_S:
                    logger.warning(
                        "agent %s: router %s has not taken %s for %d s: it checks its health. Can it reach that URL?",
                        *(agent.identity.agent, self.where, self.worker, SLOW_S),
                    )
                    warned = True
                await anyio.sleep(BUSY_POLL_S)
                continue
            if warned:
                logger.info("agent %s: router %s works again", agent.identity.agent, self.where)
            warned, working_since = False, None
            await self._wait(agent, registered)

    async def _wait(self, agent: Agent, registered: bool) -> None:
        """Wait until the agent's state requires a change, or it is time to poll."""
        with anyio.move_on_after(self._poll_s):
            await agent.wait_until(lambda state: self.wants(state, registered) != registered)

    async def _leave(self) -> None:
        """Remove the worker, even while being cancelled, unless that takes too long."""
        with anyio.move_on_after(LEAVE_S, shield=True):
            try:
                while True:
                    if await self.step(lambda registered: False) is not None:
                        return
                    await anyio.sleep(BUSY_POLL_S)
            except Exception as error:
                logger.warning("%s could not be removed from the router: %s", self.worker, _sentence(error))
                return
        logger.warning(
            "router %s did not remove %s within %d s, and may still send requests there: remove it by hand.",
            *(self.where, self.worker, LEAVE_S),
        )

    # --- the router's routes ------------------------------------------------------------------------------------------

    async def _entries(self) -> dict[str, str]:
        """Ids of this worker's entries by URL: one, or one for each rank of a router that is dp-aware."""
        workers = (await self._client.get(_WORKERS)).get("workers")
        if not isinstance(workers, list):
            raise EngineError(f"{self.where}{_WORKERS} answered no list of workers: is it an SGLang router >= 0.3?")
        found = {}
        for entry in workers:
            url, entry_id = (text_at(entry, "url"), text_at(entry, "id")) if isinstance(entry, dict) else (None, None)
            if url is not None and entry_id is not None and url.partition("@")[0].rstrip("/") == self.worker:
                found[url] = entry_id
        return found

    async def _job(self, ids: dict[str, str]) -> Mapping[str, object]:
        """The router's current job for this worker, or its last failed one: `job_type`, `status` and `message`."""
        job_id = self._deletable_id(ids)
        self._added_s = None if ids else self._added_s
        if job_id is None:
            return {}
        try:
            return mapping_at(await self._client.get(f"{_WORKERS}/{job_id}"), "job_status")
        except CallRefused as error:
            if error.status != 404:
                raise
            if not ids and self._added_s is not None and anyio.current_time() - self._added_s < JOB_PICKUP_S:
                return {"status": "pending", "job_type": "AddWorker"}
            if not ids:
                self._id = None
            return {}

    def _deletable_id(self, ids: dict[str, str]) -> str | None:
        """The id by which the worker can be removed, if it is known."""
        return next((entry_id for url, entry_id in ids.items() if "@" not in url), self._id)

    async def _add(self) -> None:
        logger.info("router %s: add %s", self.where, self.worker)
        key = {"api_key": self._worker_key} if self._worker_key else {}
        answer = await self._client.call("add", url=self.worker, **key)
        self._id = text_at(answer, "worker_id") if isinstance(answer, dict) else None
        self._added_s = anyio.current_time()

    async def _remove(self, ids: dict[str, str], adding: bool) -> None:
        """Remove the worker. `adding` says that a job to add it is still running."""
        entry_id = self._deletable_id(ids)
        if entry_id is None:  # dp-aware, and added by an earlier process: adding it again returns the id
            await self._add()
            return
        if adding and entry_id not in ids.values():
            return  # the running job may be our own, just requested, which would add the worker again
        logger.info("router %s: remove %s", self.where, self.worker)
        try:
            await self._client.delete(f"{_WORKERS}/{entry_id}")
        except CallRefused as error:
            if error.status != 404:
                raise
            self._id = None


def _sentence(error: Exception) -> str:
    """The error as a sentence, with the class of an error that is not of this project."""
    message = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
    return message if message.endswith(".") else f"{message}."
