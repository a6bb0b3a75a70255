"""Rollouts from the replicas of a fleet, over the completions route of OpenAI that vLLM serves. Needs no trainer.

Where their versions matter, base weights are asked over vLLM's `/inference/v1/generate`, whose answers name them.

Only replicas that are proven to serve the newest weights are asked, or the newest version of an adapter. What one does
not answer is asked of the others; so is what it still owes when it has stopped serving, while others serve.
"""

import asyncio
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import httpx

from schemas.errors import AgentsMissing, BusHeldUp, ConfigError, EngineError
from schemas.formatting import format_replicas
from schemas.logs import logger_of
from schemas.reports import AdapterStatus

logger = logger_of("trainers")

LOOK_AGAIN_S: Final = 0.2
"""Between two looks at which replicas serve, while none does, or while some have not answered."""
MEET_S: Final = 30.0
"""Time for a server to name its model, for which it generates nothing."""
GIVEN_UP_S: Final = 5.0
"""Time for a replica to serve again while others serve: at the end of a sync, one may be later than others."""

T = TypeVar("T")
Prompt = Sequence[int]
Share = Sequence[int]
"""Which of the prompts, by index."""
NewestAdapter = Callable[[], AdapterStatus | None]
"""The newest committed version of a LoRA adapter, from `ControlPlane.adapters`; None while there is none."""


class Rollout(NamedTuple):
    """What a replica sampled for one prompt.

    Attributes:
        token_ids: Of the completion alone.
        logprobs: The engine's, of each of these tokens; None where it has none.
        replica: Who sampled it.
        made_by: What the engine says of the versions that made it, for `ControlPlane.provenance`.
        model: The engine's name of the adapter's version; empty without an adapter.
    """

    token_ids: list[int]
    logprobs: list[float | None]
    replica: int
    made_by: Mapping[str, Any] = {}
    model: str = ""


class CompletionsClient:
    """Asks the replicas that serve for completions.

    vLLM 0.32 draws the random numbers of all requests from one generator, which `--seed` seeds with 0 unless it is
    given, so two servers may sample the same text for the same prompt. Equal prompts that follow each other are asked
    of one replica, in one request, which also lets it prefill them once.

    Args:
        serving: Returns the version that each replica is proven to serve now: `ControlPlane.serving`.
        urls: Where this process reaches each replica's engine, by the index of the replica; or what returns that:
            `ControlPlane.endpoints`.
        timeout: Seconds for one request, and for waiting while no replica serves.
        versions: Ask so that each answer names the versions that made it.
    """

    def __init__(
        self,
        serving: Callable[[], Mapping[int, int]],
        urls: Mapping[int, str] | Callable[[], Mapping[int, str]],
        *,
        timeout: float = 600.0,
        versions: bool = False,
    ) -> None:
        if not urls:
            raise ConfigError("urls is empty: name each replica's engine, for example {0: 'http://127.0.0.1:8000'}")
        self._serving, self._timeout, self._versions = serving, timeout, versions
        self._endpoints: Callable[[], Mapping[int, str]] = urls if callable(urls) else partial(dict, urls)
        self._urls: dict[int, str] = {}  # also of replicas that have left: one of them may still be asked
        self._http = httpx.Client(timeout=timeout, trust_env=False)
        self._models: dict[int, str] = {}

    def generate(
        self, prompts: Sequence[Prompt], sampling: Mapping[str, Any], adapter: NewestAdapter | None = None
    ) -> list[Rollout]:
        """Return one completion for each prompt, in their order; with an adapter, each of one version of it.

        Prompts are token ids, `sampling` has the other fields of the request, such as `max_tokens`. `adapter` looks up
        the LoRA adapter to name, and which replicas hold it.

        Raises:
            ConfigError: A replica that serves has no URL, or an URL no vLLM, before anything was ever sampled. Or its
                server has no route whose answers name versions.
            EngineError: A server refused the request (4xx): asking another one would not help.
            AgentsMissing: No replica served for as long as the timeout.
        """
        if not self._models:
            self._meet_all()
        completions: dict[int, Rollout] = {}
        avoided, told = set[int](), set[int]()
        until = time.monotonic() + self._timeout
        while open_ := [index for index in range(len(prompts)) if index not in completions]:
            replicas, model = self._able(adapter, avoided, until)
            shares = dict(zip(replicas, split(prompts, open_, len(replicas)), strict=False))
            for replica, answer in self._ask(shares, prompts, {**model, **sampling}):
                if isinstance(answer, httpx.TransportError):
                    avoided.add(replica)
                    if replica not in told:  # during a pause it is asked again and again
                        logger.warning("replica %d did not answer; its prompts are asked again: %r", replica, answer)
                    told.add(replica)
                else:
                    told.discard(replica)
                    completions |= answer
                    until = time.monotonic() + self._timeout
        return [completions[index] for index in range(len(prompts))]

    def _meet_all(self) -> None:
        """Learn the models' names; say at once which URL is wrong."""
        serving = sorted(self._find())
        if missing := [replica for replica in serving if replica not in self._urls]:
            raise ConfigError(f"urls: {format_replicas(missing)} has no URL; there are {self._urls}")
        for replica in serving:
            try:
                self._model(replica)
            except (httpx.HTTPError, KeyError, IndexError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"urls: {self._urls[replica]} of replica {replica} does not answer as vLLM's server does: "
                    f"{error!r}. Its agent says that it serves, so the URL is wrong, or out of this process's reach, "
                    "or the server has frozen"
                ) from None

    def _find(self) -> Mapping[int, int]:
        """Return the replicas that serve, once it is known where they are. One may come back at another address."""
        serving = known(self._serving) or {}
        for replica, url in (known(self._endpoints) or {}).items():
            if self._urls.get(replica) != url.rstrip("/"):
                self._urls[replica] = url.rstrip("/")
                self._models.pop(replica, None)
        return serving

    def _model(self, replica: int) -> str:
        if replica not in self._models:
            url, timeout_s = f"{self._urls[replica]}/v1/models", min(MEET_S, self._timeout)
            answer = self._http.get(url, timeout=timeout_s).raise_for_status()
            self._models[replica] = answer.json()["data"][0]["id"]
        return self._models[replica]

    def _able(self, adapter: NewestAdapter | None, avoided: set[int], until: float) -> tuple[list[int], dict[str, str]]:
        """Return the replicas to ask, those that failed a moment ago only if there are no others; wait for one."""
        while True:
            able, model = self._holders(adapter)
            if better := [replica for replica in able if replica not in avoided]:
                return better, model
            if time.monotonic() > until:
                what = "weights" if adapter is None else "adapter"
                found = f"{format_replicas(able)} did not answer" if able else f"none serves the newest {what}"
                raise AgentsMissing(f"no replica has answered for {self._timeout:g} s: {found}")
            avoided.clear()
            threading.Event().wait(LOOK_AGAIN_S)

    def _holders(self, adapter: NewestAdapter | None) -> tuple[list[int], dict[str, str]]:
        serving = self._find()
        if adapter is None:
            newest = max(serving.values(), default=0)
            return sorted(replica for replica in serving.keys() & self._urls if serving[replica] == newest), {}
        if (held := known(adapter)) is None:
            return [], {}
        return [replica for replica in held.replicas if replica in self._urls], {"model": held.model}

    def _ask(
        self, shares: Mapping[int, Share], prompts: Sequence[Prompt], sampling: Mapping[str, Any]
    ) -> list[tuple[int, dict[int, Rollout] | httpx.TransportError]]:
        """Ask all replicas at once. The threads are daemons, so that Ctrl-C does not wait for a server."""
        answers: queue.SimpleQueue[tuple[int, dict[int, Rollout] | Exception]] = queue.SimpleQueue()

        def ask(replica: int, share: Share) -> None:
            try:
                answers.put((replica, self._complete(replica, share, prompts, sampling)))
            except Exception as error:  # raised below, in the thread that waits
                answers.put((replica, error))

        for shared in shares.items():
            threading.Thread(target=ask, args=shared, daemon=True).start()
        collected: dict[int, dict[int, Rollout] | httpx.TransportError] = {}
        out_since = dict.fromkeys(shares, math.inf)
        while owing := shares.keys() - collected:
            try:
                replica, answer = answers.get(timeout=LOOK_AGAIN_S)
            except queue.Empty:
                collected |= self._given_up(owing, out_since)
                continue
            if isinstance(answer, Exception) and not isinstance(answer, httpx.TransportError):
                raise answer
            collected[replica] = answer
        return list(collected.items())

    def _given_up(self, owing: Iterable[int], out_since: dict[int, float]) -> dict[int, httpx.TransportError]:
        """Return those that have served no more for a while in which others did. Their servers may be frozen."""
        now, serving = time.monotonic(), known(self._serving) or {}
        for replica in owing:
            out_since[replica] = min(out_since[replica], now) if serving and replica not in serving else math.inf
        return {
            replica: httpx.ReadTimeout("it no longer serves, and had not answered")
            for replica in owing
            if now - out_since[replica] >= GIVEN_UP_S
        }

    def _complete(
        self, replica: int, share: Share, prompts: Sequence[Prompt], sampling: Mapping[str, Any]
    ) -> dict[int, Rollout]:
        """Ask one replica. What an abort cut off is left out, and so asked again."""
        asked = [list(prompts[index]) for index in share]
        if self._versions and "model" not in sampling:
            choices = asyncio.run(self._generate(replica, asked, sampling))
        else:
            body: dict[str, Any] = {"model": self._model(replica), "prompt": asked}
            body |= {"logprobs": 0, "return_token_ids": True, **sampling}
            answer = self._http.post(f"{self._urls[replica]}/v1/completions", json=body)
            choices = self._choices(replica, answer, dropped="model" in sampling)  # a newer one is named then
        return {
            index: Rollout(
                choice["token_ids"],
                _logprobs(choice["logprobs"]),
                replica,
                {"token_ids": choice["token_ids"], "weight_versions": choice.get("weight_versions")},
                sampling.get("model", ""),
            )
            for index, choice in zip(share, choices, strict=True)
            if choice["finish_reason"] != "abort"
        }

    async def _generate(
        self, replica: int, asked: list[list[int]], sampling: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Ask for all at once: this route takes one prompt."""
        url, model = f"{self._urls[replica]}/inference/v1/generate", self._model(replica)
        how: dict[str, Any] = {"logprobs": 0, **sampling}
        bodies = [{"model": model, "token_ids": prompt, "sampling_params": how} for prompt in asked]
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=self._timeout, trust_env=False, limits=limits) as http:
            answers = await asyncio.gather(*(http.post(url, json=body) for body in bodies))
        if any(answer.status_code == httpx.codes.NOT_FOUND for answer in answers):
            raise ConfigError(
                f"the vLLM of replica {replica} has no {url}, whose answers name the versions of weights. Launch vLLM "
                f"0.32 or newer with --enable-scale-out, or train without a gate"
            )
        return [choice for answer in answers for choice in self._choices(replica, answer)]

    def _choices(self, replica: int, answer: httpx.Response, *, dropped: bool = False) -> list[dict[str, Any]]:
        """The sequences of an answer. An adapter that is not found was `dropped`."""
        if answer.is_server_error or (dropped and answer.status_code == httpx.codes.NOT_FOUND):
            raise httpx.RemoteProtocolError(f"it answers {answer.status_code}: {answer.text[:200]}")
        if answer.is_error:
            raise EngineError(f"replica {replica} refused the rollout with {answer.status_code}: {answer.text[:500]}")
        return list(answer.json()["choices"])


def _logprobs(said: Mapping[str, Any]) -> list[float | None]:
    """Of the sampled tokens, as either route gives them."""
    return [at["logprob"] for at in said["content"]] if "content" in said else list(said["token_logprobs"])


def known(look: Callable[[], T]) -> T | None:
    """Return what is known of the fleet: nothing, while its log takes no record. The bus logs that it waits."""
    try:
        return look()
    except BusHeldUp:
        return None


def split(prompts: Sequence[Prompt], open_: Share, replicas: int) -> list[Share]:
    """Share prompts out evenly, without parting equal ones that follow each other. At most `replicas` shares."""
    groups = [list(group) for _, group in itertools.groupby(open_, key=lambda index: tuple(prompts[index]))]
    shares: list[list[int]] = [[] for _ in range(min(replicas, len(groups)))]
    for group in groups:
        min(shares, key=len).extend(group)
    return list(shares)


def again_and_again(dataset: Iterable[T]) -> Iterator[T]:
    """Yield the rows of a dataset, from its beginning again after the last. Raises ConfigError if none are left."""
    while True:
        empty = True
        for row in dataset:
            empty = False
            yield row
        if empty:
            raise ConfigError(
                "the dataset has no rows, or none left: it is read again from its beginning whenever it ends, so it "
                "must be a sequence (a list, a datasets.Dataset), and no iterator that is used up"
            )
