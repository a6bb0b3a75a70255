"""An agent registers its engine with an SGLang router, and leaves it: traffic goes where it can be answered.

`routable` and `may_register` decide, from the agent's state alone; `Router` tells the router. It remembers nothing that
matters: it looks at what the router holds, compares, and asks for one step. So it does not matter who changed the
router, or which life of the agent did. Nothing that a router does ends an agent.

What sglang-router 0.3.2 does, seen on the real one:
- `POST /workers` is answered 202 before the worker was asked anything. A job then asks `GET /health` of the worker
  (`--health-check-endpoint`, without the key), for 5 s each time, again and again with up to 5 s between, for
  `--worker-startup-timeout-secs` (1800 s). Only when that was 200 is the worker in `GET /workers`, and gets requests,
  while the job goes on to load its tokenizer. `GET /workers/{id}` tells of the job; and why it failed, for 5 minutes.
  For a moment after the 202 it is 404: the job has not been taken up.
- Until the worker is in the list the job can't be taken back: `DELETE` is answered 202 and fails, and the worker comes
  in when it is healthy. So whoever wants it out waits for that.
- A URL that is there already is answered 202 too; that job fails, and changes nothing, nor its key. But if the worker
  is removed while that job is under way (half a second), the job puts it in again. So nothing here adds what is there,
  or asks twice; where somebody else did, the next look repairs it.
- URLs are compared as text: with a slash at its end it is another worker.
- A worker that is in is asked again every 60 s. After 3 failures it gets no requests (`is_healthy` false) and stays in
  the list; after 2 successes it gets them again. SGLang's `/health` generates a token: a paused engine answers 503
  after 20 s, so a pause of minutes ends in the same way.
- What a worker that is removed has in flight is answered; with no worker left, new requests are refused with 503.
  `DELETE /workers/{id}` of an id that is not there is 404. An id is new after each registration.
- With `--dp-aware` a worker stands in the list as `URL@0`, `URL@1`, … None of their ids can be deleted, only the one
  that `POST` answered, which deletes them all.
"""

import logging
import random
from collections.abc import Callable, Mapping
from typing import Final

import anyio
from anyio import CancelScope

from schemas.errors import EngineError
from workers.agent import Agent
from workers.engines.client import CallRefused, mapping_at, text_at
from workers.engines.http import HttpClient, Route, base_url
from workers.machine.decide import AgentState, in_sync
from workers.machine.reconcile import holds_committed, holds_weights
from workers.machine.suppressed import still_desired

logger = logging.getLogger("rolloutctl.router")

KEY_VARIABLE: Final = "ROLLOUTCTL_ROUTER_API_KEY"
"""Holds the router's key; with `_FILE` at its end, the path of a file that does. See `http.api_key`."""

LOOK_S: Final = 10.0
"""Between two looks at a router that is as it should be: somebody else may have changed it."""
LEAVE_S: Final = 5.0
"""How long an agent that ends may take to leave the router."""
ANSWER_S: Final = 5.0
"""How long the router may take for an answer."""
POLL_FIRST_S: Final = 0.1
POLL_LAST_S: Final = 2.0
"""While the router is at work: between the first two looks, doubling to the last."""
TAKEN_UP_S: Final = 5.0
"""How long a router may know nothing of a job that it has accepted. After that it has lost it: it was started again."""
RETRY_S: Final = 0.5
"""After the first failure; doubles up to the time between two looks, with jitter."""
SLOW_S: Final = 30.0
"""When a worker is not taken for so long, people are told."""

_WORKERS: Final = "/workers"


def routable(state: AgentState) -> bool:
    """May the engine go on getting requests: will each be answered, from committed weights, after a wait that ends?

    It may while all of this holds:
    - this is node rank 0, and a snapshot told what is desired in this run;
    - its engine is there (`tokenizer` present);
    - its weights are not torn, and no memory is asleep or to be put to sleep;
    - it is not in quarantine, neither by the trainer nor by itself (`conceded`);
    - it holds what is committed. In a weight sync it may also hold the weights of that sync, as long as it is paused;
    - if it is paused, then not because something failed or hangs (settling inhibited, a call past its deadline).

    A pause alone does not take it out, neither that of a sync nor one that was commanded: requests wait at the engine.
    With every replica paused, a router without workers would refuse what can wait, and forget which prefixes each
    worker has. A pause of minutes is seen by the router's own health check.
    """
    engine, left = state.engine, still_desired(state.desired, state.suppressed)
    if state.identity.node_rank > 0 or not state.joined or engine.tokenizer != "present":
        return False
    if engine.torn or engine.asleep or left.asleep or left.quarantined:
        return False
    syncing = left.sync is not None and not engine.generating and holds_weights(engine, left.sync)
    if not (syncing or holds_committed(left, engine)):
        return False
    stuck = state.reconcile_blocked or (state.activity is not None and state.activity.overdue)
    return engine.generating or not stuck


def may_register(state: AgentState) -> bool:
    """Is an engine that is not in the router to be put in? When it generates, is as desired, and nothing is under way.

    That is more than to stay: an agent must have brought its engine to what is desired at least once, and the router
    asks a new worker for its health, which a paused engine can't give.
    """
    return routable(state) and in_sync(state) and state.engine.generating


def should_be_registered(state: AgentState, there: bool) -> bool:
    """Is the engine to be in the router, given whether it is?"""
    return routable(state) if there else may_register(state)


class Router:
    """One worker's place in one router. Beside `agent.run`, in the same task group: `start_soon(router.follow, agent)`.

    url: of the router, http://HOST:PORT.   worker_url: of the engine's server, as the router reaches it.
    key: the router's, sent as a bearer token.   worker_key: the engine's, told to the router so that it can call it.
    look_s: seconds between two looks at a router that is as it should be.
    Raises ConfigError for a URL that can't be used.
    """

    def __init__(
        self,
        url: str,
        worker_url: str,
        *,
        key: str | None = None,
        worker_key: str | None = None,
        look_s: float = LOOK_S,
    ) -> None:
        self.where = base_url(url, "router", KEY_VARIABLE)
        self.worker = base_url(worker_url)
        self._worker_key, self._look_s = worker_key, look_s
        adding = Route("POST", _WORKERS, timeout_s=ANSWER_S)
        self._front = HttpClient(self.where, {"add": adding}, info_path=_WORKERS, key=key)
        self._id: str | None = None  # as the router named it when it was last asked to add it
        self._asked_s: float | None = None  # when that was, until the router is seen to know of it

    async def follow(self, agent: Agent) -> None:
        """Keep the router as the agent's state wants it, until cancelled; then leave it. Never fails; call it once.

        Before the agent has joined, and beside node ranks above 0, the router is left as it is: who is not told what
        is desired may be a second agent of this place, started by mistake, and the first one is in there.
        """
        try:
            if agent.identity.node_rank == 0:
                await agent.wait_until(lambda state: state.joined)
                try:
                    await self._keep(agent)
                finally:
                    await self._leave()
        finally:
            await self.close()

    async def step(self, wanted: Callable[[bool], bool]) -> bool | None:
        """Look whether the worker is in the router, and ask for what is `wanted(there)`, once.

        Returns whether it is there, when that is as wanted. None: the router is at work, look again in a moment.
        Raises CallRefused (the router's words), also when it could not take the worker; Unanswered.
        """
        ids = await self._listed()
        job = await self._job(ids)
        there = bool(ids)
        busy = text_at(job, "status") in ("pending", "processing")
        adding = text_at(job, "job_type") == "AddWorker"
        if busy and not (there and adding):
            return None
        if wanted(there) == there:
            return there
        if there:
            await self._remove(ids, busy)
        elif adding:  # it is over, and did not put it in
            self._id = None  # said once, and then asked anew
            said = text_at(job, "message") or "it gives no reason."
            raise CallRefused(f"{self.where} did not take {self.worker}: {said}", None, said)
        else:
            await self._add()
        return None

    async def close(self) -> None:
        """Close the connections; `follow` does so itself."""
        with CancelScope(shield=True):
            await self._front.close()

    async def _keep(self, agent: Agent) -> None:
        told, failures, pause = False, 0, POLL_FIRST_S
        began: float | None = None  # when the router's work that is awaited began
        name = agent.identity.agent
        while True:
            try:
                there = await self.step(lambda there: should_be_registered(agent.state, there))
            except Exception as error:  # nothing that a router answers ends an agent
                if not told:
                    logger.warning("agent %s: %s It is tried again until it holds.", name, _said(error))
                told, began = True, None
                await anyio.sleep(min(RETRY_S * 2**failures, self._look_s) * random.uniform(0.75, 1.0))
                failures = min(failures + 1, 10)
                continue
            if there is None:
                began = began or anyio.current_time()
                if not told and anyio.current_time() - began > SLOW_S:
                    slow = "agent %s: router %s has not taken %s for %d s: it asks its health. Can it reach that URL?"
                    logger.warning(slow, name, self.where, self.worker, SLOW_S)
                    told = True
                await anyio.sleep(pause)
                pause = min(2 * pause, POLL_LAST_S)
                continue
            if told:
                logger.info("agent %s: router %s does as it is asked again", name, self.where)
            told, failures, pause, began = False, 0, POLL_FIRST_S, None
            await self._wait(agent, there)

    async def _wait(self, agent: Agent, there: bool) -> None:
        """Until the agent's state wants something else than what is there, or it is time to look."""
        with anyio.move_on_after(self._look_s):
            await agent.wait_until(lambda state: should_be_registered(state, there) != there)

    async def _leave(self) -> None:
        """Take the worker out, whatever is cancelled, unless that takes too long."""
        with anyio.move_on_after(LEAVE_S, shield=True):
            try:
                while True:
                    if await self.step(lambda there: False) is not None:
                        return
                    await anyio.sleep(POLL_FIRST_S)
            except Exception as error:
                logger.warning("%s could not be taken out of the router: %s", self.worker, _said(error))
                return
        logger.warning(
            "router %s did not let go of %s within %d s, and may still send requests there: remove it by hand.",
            *(self.where, self.worker, LEAVE_S),
        )

    # --- the router's routes ------------------------------------------------------------------------------------------

    async def _listed(self) -> dict[str, str]:
        """Ids of the entries of this worker, by their URLs: one, or one for each rank of a router that is dp-aware."""
        listed = (await self._front.get(_WORKERS)).get("workers")
        if not isinstance(listed, list):
            raise EngineError(f"{self.where}{_WORKERS} answered no list of workers: is it an SGLang router >= 0.3?")
        found = {}
        for entry in listed:
            url, its_id = (text_at(entry, "url"), text_at(entry, "id")) if isinstance(entry, dict) else (None, None)
            if url is not None and its_id is not None and url.partition("@")[0].rstrip("/") == self.worker:
                found[url] = its_id
        return found

    async def _job(self, ids: dict[str, str]) -> Mapping[str, object]:
        """What the router does for this worker, or did last and could not: `job_type`, `status` and `message`."""
        its_id = self._to_delete(ids)
        self._asked_s = None if ids else self._asked_s
        if its_id is None:
            return {}
        try:
            return mapping_at(await self._front.get(f"{_WORKERS}/{its_id}"), "job_status")
        except CallRefused as error:
            if error.status != 404:
                raise
            if not ids and self._asked_s is not None and anyio.current_time() - self._asked_s < TAKEN_UP_S:
                return {"status": "pending", "job_type": "AddWorker"}
            if not ids:
                self._id = None
            return {}

    def _to_delete(self, ids: dict[str, str]) -> str | None:
        """The id by which the worker is removed, as far as it is known."""
        return next((its_id for url, its_id in ids.items() if "@" not in url), self._id)

    async def _add(self) -> None:
        logger.info("router %s: add %s", self.where, self.worker)
        key = {"api_key": self._worker_key} if self._worker_key else {}
        answer = await self._front.call("add", url=self.worker, **key)
        self._id = text_at(answer, "worker_id") if isinstance(answer, dict) else None
        self._asked_s = anyio.current_time()

    async def _remove(self, ids: dict[str, str], adding: bool) -> None:
        """adding: a job to add it is under way still."""
        its_id = self._to_delete(ids)
        if its_id is None:  # of a dp-aware router, added by an earlier life: asking it to add it again tells the id
            await self._add()
            return
        if adding and its_id not in ids.values():
            return  # that job is perhaps the one just asked for, and would put it in again
        logger.info("router %s: remove %s", self.where, self.worker)
        try:
            await self._front.delete(f"{_WORKERS}/{its_id}")
        except CallRefused as error:
            if error.status != 404:
                raise
            self._id = None


def _said(error: Exception) -> str:
    """The error's words as a sentence; the kind of one that is not of this project."""
    words = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
    return words if words.endswith(".") else f"{words}."
