"""The generation loop of the tiny engine: one thread, on which every forward, copy and profile of the engine happens.

Theory of operation. Requests queue up, each prompt gets a row of the KV cache, and every running prompt takes part in
each forward: a new one feeds its whole prompt, the others feed their last token. The thread is an executor with one
worker. A forward is a task that submits the next forward; a command is a task that runs between two forwards, so it
always finds whole tokens, and nothing here needs a lock. A prompt is held as its tokens and the number of them that
its row covers. Freezing it only stops the forwards, and a cache that was released is computed again from the tokens.

Like the engines it stands for, it refuses what would break them: memory is not released under running requests,
weights are not loaded into a running or sleeping engine, and nothing is released or woken twice. And like them it
reuses prefixes that old weights computed until it is told to flush them.

The gate is `open` (requests run), `draining` (accepted requests run to their end) or `closed`. Requests that arrive
while it is not open are held until it opens.
"""

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor

from schemas.commands import ProfilePlan
from schemas.errors import EngineError
from schemas.events import Observation
from schemas.identity import InFlight, Tag
from workers.engines.tiny.model import KVCache, TinyConfig, TinyModel, choose, digest, weights
from workers.engines.tiny.profile import FORWARD, ForwardProfile
from workers.engines.tiny.server import Completion, Generate

ROWS: Final = 64
"""Prompts that run at once."""
PREFIXES_MAX: Final = 64
"""Prompts whose keys and values are kept for the next request with the same prompt."""

T = TypeVar("T")


@dataclass
class _Sequence:
    """A prompt and its completion so far. `row` is its row of the cache, which covers its first `cached` tokens."""

    tokens: list[int]
    prompt_length: int
    max_tokens: int
    temperature: float
    row: int = -1
    cached: int = 0
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return len(self.logprobs) == self.max_tokens

    @property
    def completion(self) -> Completion:
        return Completion(
            tokens=self.tokens[self.prompt_length :],
            logprobs=self.logprobs,
            versions=self.versions,
            finish_reason="length" if self.finished else "abort",
        )


@dataclass(eq=False)
class _PendingRequest:
    """Prompts that arrived together and are answered together."""

    sequences: list[_Sequence]
    completions: Future[list[Completion]] = field(default_factory=Future)

    @property
    def finished(self) -> bool:
        return all(sequence.finished for sequence in self.sequences)


class Scheduler:
    """The engine itself. It starts with its gate closed: nothing is generated before `resume`.

    `run`, `generate` and `close` may be called from any thread; the commands only through `run`.

    Attributes:
        observation: What the engine is now. Replaced as a whole, so any thread may read it.
        forwards: Forwards computed since launch.
    """

    def __init__(self, config: TinyConfig, seed: int, launched: Observation) -> None:
        self.model = TinyModel(config, seed)
        self.observation = replace(launched, digest=digest(weights(self.model)))
        self.forwards = 0
        self._config = config
        self._random = torch.Generator().manual_seed(seed)
        self._gate: Literal["open", "draining", "closed"] = "closed"
        self._drained: Future[None] = Future()
        self._asleep: frozenset[Tag] = frozenset()
        self._cache: KVCache | None = KVCache(config, ROWS)
        self._prefixes: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._backup: dict[str, Tensor] = {}
        self._profile: ForwardProfile | None = None
        self._accepted: list[_PendingRequest] = []
        self._held: list[_PendingRequest] = []
        self._forward_is_due = False
        self._ended = False
        self._thread = ThreadPoolExecutor(1, "tiny-engine", initializer=lambda: torch.set_grad_enabled(False))

    # --- from any thread ----------------------------------------------------------------------------------------------

    def run(self, command: Callable[..., T], *args: object) -> T:
        """Call a command on the engine's thread, between two forwards, and return its result."""
        try:
            result = self._thread.submit(command, *args)
        except RuntimeError as error:
            raise EngineError("the engine is closed.") from error
        return result.result()

    def generate(self, request: Generate) -> list[Completion]:
        """Queue a request and wait for its completions. Raises EngineError for one that can't be served."""
        pending = _PendingRequest(self._sequences(request))
        self.run(self._take, pending)
        return pending.completions.result()

    def close(self) -> None:
        """End all requests, the profile and the thread. Waits for at most one forward, or the export of a trace."""
        self.run(self._end)
        self._thread.shutdown()

    # --- commands, on the thread --------------------------------------------------------------------------------------

    def pause(self, mode: InFlight) -> Future[None]:
        """Close the gate; requests that arrive from now on are held. The future resolves when no request runs."""
        if self._gate != "draining":
            self._drained = Future()
        if mode == "wait" and self._accepted:
            if self._asleep:
                raise EngineError(f"pause(wait) was refused: requests are frozen, and asleep: {self._sleepers()}.")
            self._gate = "draining"
            self._schedule()
            return self._drained
        self._close_gate()
        if mode == "abort":
            self._answer(self._accepted)
        return self._drained

    def resume(self) -> None:
        """Open the gate: frozen requests go on, held ones begin."""
        if self._asleep:
            raise EngineError(f"resume was refused: asleep: {self._sleepers()}. Wake it first.")
        self._gate = "open"
        self.observation = replace(self.observation, generating=True)
        self._accepted += self._held
        self._held = []
        self._schedule()

    def abort(self) -> None:
        """Answer every request, running or held, with the tokens that it has."""
        self._answer([*self._accepted, *self._held])

    def flush(self) -> None:
        """Drop every kept prefix. Refused while a request runs or is frozen: it needs its part of the cache."""
        if self._accepted:
            state = "frozen" if self._gate == "closed" else "running"
            raise EngineError(
                f"flush was refused: {len(self._accepted)} requests are {state}. The cache is as it was: abort them, "
                "or let them finish."
            )
        self._prefixes.clear()

    def sleep(self, tags: frozenset[Tag]) -> None:
        """Release memory. A copy of the weights is kept, as at vLLM's level 1; of the cache nothing is kept."""
        if self._gate != "closed":
            raise EngineError("sleep was refused: requests may run. Pause first; nothing was released.")
        if again := tags & self._asleep:
            raise EngineError(f"sleep was refused: {', '.join(sorted(again))} is asleep already. Nothing was released.")
        if "weights" in tags:
            self._backup = {name: tensor.clone() for name, tensor in weights(self.model).items()}
            for parameter in self.model.parameters():
                parameter.data = torch.empty(0)
        if "kv_cache" in tags:
            self._cache = None
            self._prefixes.clear()
            for request in self._accepted:
                for sequence in request.sequences:
                    sequence.cached = 0
        self._set_asleep(self._asleep | tags)

    def wake(self, tags: frozenset[Tag]) -> None:
        """Take memory back: the weights as they were, the cache empty."""
        if awake := tags - self._asleep:
            raise EngineError(f"wake was refused: {', '.join(sorted(awake))} is awake. Nothing was changed.")
        if "weights" in tags:
            for name, parameter in self.model.named_parameters():
                parameter.data = self._backup.pop(name)
        if "kv_cache" in tags:
            self._cache = KVCache(self._config, ROWS)
        self._set_asleep(self._asleep - tags)

    def load(self, version: int, tensors: Mapping[str, Tensor]) -> str:
        """Copy tensors of the model's own layout over its weights. Kept prefixes stay until `flush`.

        Returns:
            The content digest of the weights that it holds now.
        """
        if self._gate != "closed":
            raise EngineError("load was refused: requests may run. Pause first; the weights are as they were.")
        if "weights" in self._asleep:
            raise EngineError("load was refused: the weights are asleep. Wake them first.")
        for name, tensor in weights(self.model).items():
            tensor.copy_(tensors[name])
        held = digest(weights(self.model))
        self.observation = replace(self.observation, version=version, digest=held)
        return held

    def start_profile(self, plan: ProfilePlan, file: Path) -> None:
        """Record forwards into `file`. Refused while a session is open, or when torch can't record."""
        if self._profile is not None:
            raise EngineError(
                f"a second profile was refused: the session that writes {self._profile.file} is open and goes on."
            )
        self._profile = ForwardProfile(plan, file)
        self.observation = replace(self.observation, profiling=True)

    def stop_profile(self) -> bool:
        """Close the session. Returns whether its window had ended it before."""
        profile, self._profile = self._profile, None
        self.observation = replace(self.observation, profiling=False)
        if profile is None:
            raise EngineError("there is no profile to stop: none was started, or it was stopped before.")
        return profile.stop()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        if self._accepted and self._gate != "closed" and not self._forward_is_due:
            self._forward_is_due = True
            self._thread.submit(self._advance)

    def _advance(self) -> None:
        """Compute one token for every prompt that has a row, and answer the requests that are finished by it."""
        self._forward_is_due = False
        if self._gate == "closed" or not self._accepted:
            return
        try:
            self._forward()
        except Exception as error:  # torch raises many kinds, and none may end the loop
            self._answer(self._accepted, EngineError(f"a forward failed: {type(error).__name__}: {error}."))
        self._answer([request for request in self._accepted if request.finished])
        self._schedule()

    def _forward(self) -> None:
        cache = self._cache
        assert cache is not None, "the gate opens only when all memory is awake"
        running = self._running(cache)
        recorded = self._profile.forward() if self._profile is not None else nullcontext()
        with recorded, torch.profiler.record_function(FORWARD):
            logits = self.model.step(
                [sequence.tokens[sequence.cached :] for sequence in running],
                [sequence.cached for sequence in running],
                [sequence.row for sequence in running],
                cache,
            )
        self.forwards += 1
        temperatures = torch.tensor([sequence.temperature for sequence in running])
        tokens, logprobs = choose(logits, temperatures, self._random)
        for sequence, token, logprob in zip(running, tokens.tolist(), logprobs.tolist(), strict=True):
            sequence.cached = len(sequence.tokens)
            if not sequence.logprobs:
                self._keep_prefix(sequence, cache)
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(self.observation.version or 0)

    def _running(self, cache: KVCache) -> list[_Sequence]:
        """Return the first unfinished prompts, as many as there are rows. New ones get a row, and a kept prefix."""
        sequences = itertools.chain.from_iterable(request.sequences for request in self._accepted)
        running = list(itertools.islice((sequence for sequence in sequences if not sequence.finished), ROWS))
        free = iter(set(range(ROWS)) - {sequence.row for sequence in running})
        for sequence in running:
            if sequence.row < 0:
                sequence.row = next(free)
                self._reuse_prefix(sequence, cache)
        return running

    def _reuse_prefix(self, sequence: _Sequence, cache: KVCache) -> None:
        if (kept := self._prefixes.get(tuple(sequence.tokens))) is not None:
            # The last token is fed in any case: its logits choose the first token of the completion.
            sequence.cached = len(sequence.tokens) - 1
            cache.keys[:, sequence.row, :, : len(sequence.tokens)] = kept[0]
            cache.values[:, sequence.row, :, : len(sequence.tokens)] = kept[1]

    def _keep_prefix(self, sequence: _Sequence, cache: KVCache) -> None:
        """Keep what a prompt's forward has computed; the oldest kept prefix makes room."""
        prompt = tuple(sequence.tokens)
        if len(prompt) == 1 or prompt in self._prefixes:
            return
        if len(self._prefixes) == PREFIXES_MAX:
            del self._prefixes[next(iter(self._prefixes))]
        row, length = sequence.row, len(prompt)
        self._prefixes[prompt] = cache.keys[:, row, :, :length].clone(), cache.values[:, row, :, :length].clone()

    # --- requests -----------------------------------------------------------------------------------------------------

    def _sequences(self, request: Generate) -> list[_Sequence]:
        config = self._config
        if not request.prompts:
            raise EngineError("a request needs at least one prompt.")
        for prompt in request.prompts:
            if not prompt or len(prompt) + request.max_tokens > config.context:
                raise EngineError(
                    f"a prompt of {len(prompt)} tokens with max_tokens={request.max_tokens} was refused: it needs at "
                    f"least one, and both together have room for {config.context}."
                )
            if max(prompt) >= config.vocab:
                raise EngineError(f"a prompt was refused: its tokens must be 0..{config.vocab - 1}: {prompt[:8]}.")
        return [
            _Sequence(list(prompt), len(prompt), request.max_tokens, request.temperature) for prompt in request.prompts
        ]

    def _take(self, request: _PendingRequest) -> None:
        if self._ended:
            raise EngineError("the engine is closed.")
        (self._accepted if self._gate == "open" else self._held).append(request)
        self._schedule()

    def _answer(self, requests: list[_PendingRequest], failure: EngineError | None = None) -> None:
        """Answer requests with what they have, or with the failure, and forget them."""
        self._accepted = [request for request in self._accepted if request not in requests]
        self._held = [request for request in self._held if request not in requests]
        for request in requests:
            if failure is None:
                request.completions.set_result([sequence.completion for sequence in request.sequences])
            else:
                request.completions.set_exception(failure)
        if self._gate == "draining" and not self._accepted:
            self._close_gate()

    def _close_gate(self) -> None:
        self._gate = "closed"
        self.observation = replace(self.observation, generating=False)
        self._drained.set_result(None)

    def _end(self) -> None:
        self._ended = True
        self.abort()
        if self._profile is not None:
            with suppress(EngineError):  # nobody waits for the outcome any more
                self._profile.stop()

    def _set_asleep(self, tags: frozenset[Tag]) -> None:
        self._asleep = tags
        self.observation = replace(self.observation, asleep=tags)

    def _sleepers(self) -> str:
        return ", ".join(sorted(self._asleep))
