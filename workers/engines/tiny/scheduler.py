"""The generation loop of the tiny engine: one thread, on which every forward, copy and profile of the engine happens.

Theory of operation. Requests queue up, get a row of the cache, and all that run take part in each forward: one that has
just come feeds its prompt, the others their last token. Between two forwards the thread does what it was told by `do`,
so what is told always finds whole tokens. A request is held as its tokens and the number of them that its row of the
cache holds; to freeze it is to stop, to go on is to go on, and a cache that was lost is computed again from the tokens.

Like the engines it stands for, it does not forgive: memory is not released under requests that run, weights are not
loaded into a running or sleeping engine, nothing is released or woken twice. And like them it keeps the prefixes that
old weights computed until it is told to flush them.

The gate is `open` (requests run), `draining` (those that were there run to their end) or `closed`. Whatever comes while
it is not open is held until it opens.
"""

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from schemas.commands import ProfilePlan
from schemas.errors import EngineError, RolloutctlError
from schemas.identity import Count, InFlight, Tag
from workers.engines.tiny.model import Cache, TinyConfig, TinyModel, choose, digest, gumbel, weights
from workers.engines.tiny.profile import FORWARD, Recording
from workers.engines.tiny.server import Answered, Completion, Generate, Weights

ROWS: Final = 64
"""Requests that run at once."""
PROMPTS_MAX: Final = 4096
"""Prompts in the engine, running, waiting and held. Whoever comes later is refused."""
PREFIXES_MAX: Final = 64
"""Prompts whose keys and values are kept; the one that was not used for longest goes first."""


Paused = Callable[[RolloutctlError | None], None]
"""Told once, on the engine's thread, that no request runs, or why not. Must neither block nor raise."""


class Holding(Struct, frozen=True, kw_only=True):
    """What the engine is, between two things that it was told. Replaced as a whole, so any thread may read it."""

    version: Count
    digest: str
    generating: bool = False
    asleep: frozenset[Tag] = frozenset()
    profiling: bool = False


@dataclass
class Sequence:
    """One prompt on its way. row: of the cache, while it runs.   filled: tokens of it that the row holds.

    reused: tokens of the prompt that came from a kept prefix.   noise: what its choices are drawn with, [max_tokens, V]
    """

    tokens: list[int]
    prompt: int
    max_tokens: int
    temperature: float
    noise: Tensor
    row: int = -1
    filled: int = 0
    reused: int = 0
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return len(self.logprobs) == self.max_tokens


@dataclass(eq=False)
class Request:
    """Prompts that were asked for together and are answered together."""

    sequences: list[Sequence]
    done: Answered


class Scheduler:
    """The engine itself. `start` it; then `submit` requests and `do` things, from any thread; `close` it.

    holding: what the engine is.   forwards: how many it has computed since launch.
    It starts closed: nothing is generated before `resume`.
    """

    def __init__(self, config: TinyConfig, seed: int) -> None:
        self.model = TinyModel(config, seed)
        self.holding = Holding(version=0, digest=digest(weights(self.model)))
        self.forwards = 0
        self._config = config
        self._gate: Literal["open", "draining", "closed"] = "closed"
        self._drained: Paused | None = None
        self._cache: Cache | None = Cache(config, ROWS)
        self._free = list(range(ROWS))
        self._prefixes: OrderedDict[tuple[int, ...], tuple[Tensor, Tensor]] = OrderedDict()
        self._backup: dict[str, Tensor] | None = None
        self._recording: Recording | None = None
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._accepted: list[Request] = []
        self._held: deque[Request] = deque()
        # What other threads hand over, under the lock.
        self._changed = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._owed = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tiny-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End what runs, and the thread. Blocks until it has ended: at most one forward, or one export of a trace."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def do(self, action: Callable[[], None]) -> None:
        """Have the thread call `action` between two forwards. It must not raise."""
        with self._changed:
            if self._closed:
                raise EngineError("the engine is closed.")
            self._inbox.append(action)
            self._changed.notify()

    def submit(self, asked: Generate, done: Answered) -> Request:
        """Queue a request. Raises EngineError for one that can't be served, or when too many wait."""
        request = Request(self._sequences(asked), done)
        with self._changed:
            if self._owed + len(request.sequences) > PROMPTS_MAX:
                raise EngineError(f"{self._owed} prompts wait already; at most {PROMPTS_MAX} may. Ask again later.")
            self._owed += len(request.sequences)
        self.do(lambda: self._take(request))
        return request

    def _sequences(self, asked: Generate) -> list[Sequence]:
        config = self._config
        if not asked.prompts or asked.max_tokens < 1 or not 0 <= asked.temperature < float("inf"):
            raise EngineError("a request needs at least one prompt, max_tokens >= 1 and a finite temperature >= 0.")
        for prompt in asked.prompts:
            if not prompt or len(prompt) + asked.max_tokens > config.context:
                raise EngineError(
                    f"a prompt of {len(prompt)} tokens with max_tokens={asked.max_tokens} was refused: it "
                    f"needs at least one, and both together have room for {config.context}."
                )
            if not all(0 <= token < config.vocab for token in prompt):
                raise EngineError(f"a prompt was refused: its tokens must be 0..{config.vocab - 1}: {prompt[:8]}.")
        sequences = []
        seed = int.from_bytes(os.urandom(7), "big") if asked.seed is None else asked.seed
        for index, prompt in enumerate(asked.prompts):
            shape = (asked.max_tokens, config.vocab)
            generator = torch.Generator().manual_seed((seed * 1_000_003 + index) % 2**63)
            noise = gumbel(shape, generator) if asked.temperature > 0 else torch.zeros(shape)
            sequences.append(Sequence(list(prompt), len(prompt), asked.max_tokens, asked.temperature, noise))
        return sequences

    def held(self) -> Weights:
        """Number and digest of the weights it holds. From any thread."""
        holding = self.holding
        return Weights(version=holding.version, digest=holding.digest)

    # --- told, on the thread ------------------------------------------------------------------------------------------

    def pause(self, mode: InFlight, done: Paused) -> None:
        """Close the gate; call `done` when no request runs. Requests that come from now on are held."""
        if mode == "wait" and self._accepted:
            if self.holding.asleep:
                done(EngineError(f"pause(wait) was refused: requests are frozen and {self._asleep()}."))
                return
            self._gate, self._drained = "draining", done
            return
        self._gate = "closed"
        self.holding = replace(self.holding, generating=False)
        if mode == "abort":
            self._end(list(self._accepted))
        done(None)

    def resume(self) -> None:
        """Open the gate: frozen requests go on, held ones begin. Raises EngineError while memory is asleep."""
        if self.holding.asleep:
            raise EngineError(f"resume was refused: {self._asleep()}. Wake it first.")
        self._gate = "open"
        self.holding = replace(self.holding, generating=True)
        while self._held:
            self._accept(self._held.popleft())

    def abort(self) -> None:
        """End every request, running, waiting or held, with what it has."""
        self._end([*self._accepted, *self._held])

    def cancel(self, request: Request) -> None:
        """End one request, if it has not ended."""
        if request in self._accepted or request in self._held:
            self._end([request])

    def flush(self) -> None:
        """Drop every kept prefix. Raises EngineError while a request runs or is frozen: its cache can't be dropped."""
        if self._accepted:
            raise EngineError(
                f"flush was refused: {len(self._accepted)} requests are {self._doing()}. The cache is as it was: abort "
                "them, or let them finish."
            )
        self._prefixes.clear()

    def sleep(self, tags: frozenset[Tag]) -> None:
        """Release memory. The weights leave a copy behind, as at vLLM's level 1; the cache leaves nothing.

        Frozen requests lose their row and compute it again when they go on. Raises EngineError while requests may run,
        and for a tag that is asleep.
        """
        if self._gate != "closed":
            raise EngineError("sleep was refused: requests may run. Pause first; nothing was released.")
        if again := tags & self.holding.asleep:
            raise EngineError(f"sleep was refused: {', '.join(sorted(again))} is asleep already. Nothing was released.")
        if "weights" in tags:
            self._backup = {name: tensor.clone() for name, tensor in weights(self.model).items()}
            for parameter in self.model.parameters():
                parameter.data = torch.empty(0)
        if "kv_cache" in tags:
            self._prefixes.clear()
            self._cache = None
            for sequence in self._running:
                sequence.filled = 0
        self.holding = replace(self.holding, asleep=self.holding.asleep | tags)

    def wake(self, tags: frozenset[Tag]) -> None:
        """Take memory back: the weights as they were, the cache empty. Raises EngineError for a tag that is awake."""
        if awake := tags - self.holding.asleep:
            raise EngineError(f"wake was refused: {', '.join(sorted(awake))} is awake. Nothing was changed.")
        if "weights" in tags and self._backup is not None:
            for name, parameter in self.model.named_parameters():
                parameter.data = self._backup[name]
            self._backup = None
        if "kv_cache" in tags:
            self._cache = Cache(self._config, ROWS)
        self.holding = replace(self.holding, asleep=self.holding.asleep - tags)

    def require_loadable(self) -> None:
        """Raise EngineError unless weights could be loaded now."""
        if self._gate != "closed":
            raise EngineError("load was refused: requests may run. Pause first; the weights are as they were.")
        if "weights" in self.holding.asleep:
            raise EngineError("load was refused: the weights are asleep. Wake them first.")

    def load(self, version: int, tensors: Mapping[str, Tensor]) -> str:
        """Copy tensors of the model's own layout over its weights; return the digest of what it holds then.

        Keeps every prefix, though other weights computed it: `flush`. Raises EngineError as `require_loadable` does.
        """
        self.require_loadable()
        with torch.no_grad():
            for name, tensor in weights(self.model).items():
                tensor.copy_(tensors[name])
        self.holding = replace(self.holding, version=version, digest=digest(weights(self.model)))
        return self.holding.digest

    def start_profile(self, plan: ProfilePlan, file: Path) -> None:
        """Record forwards into `file`. Raises EngineError when a session is open, or torch can't."""
        if self._recording is not None:
            raise EngineError(
                f"a second profile was refused: the session that writes {self._recording.file} is open and goes on."
            )
        self._recording = Recording(plan, file)
        self.holding = replace(self.holding, profiling=True)

    def stop_profile(self) -> bool:
        """Close the session; return whether its window had closed it. Raises EngineError when none is open."""
        recording, self._recording = self._recording, None
        self.holding = replace(self.holding, profiling=False)
        if recording is None:
            raise EngineError("there is no profile to stop: none was started, or it was stopped before.")
        return recording.stop()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with torch.no_grad():
            while self._turn():
                pass
            self._leave()

    def _turn(self) -> bool:
        """Do what was told, then one forward if there is something to compute. False when the engine is to end."""
        with self._changed:
            while not (self._inbox or self._closed or self._busy):
                self._changed.wait()
            told, self._inbox = self._inbox, deque()
            closed = self._closed
        for action in told:
            action()
        if closed:
            return False
        if self._busy:
            try:
                self._forward()
            except Exception as error:  # torch's own, of which there are many: it must not take the thread with it
                self._fail(EngineError(f"a forward failed: {type(error).__name__}: {error}."))
        if self._gate == "draining" and not self._accepted:
            self._gate = "closed"
            self.holding = replace(self.holding, generating=False)
            self._tell_drained(None)
        return True

    @property
    def _busy(self) -> bool:
        return self._gate != "closed" and bool(self._accepted)

    def _forward(self) -> None:
        """One token for every request that has a row."""
        cache = self._cache
        assert cache is not None, "the gate opens only when all memory is awake"
        while self._waiting and self._free:
            self._admit(self._waiting.popleft(), cache)
        running, recording = self._running, self._recording
        fed = [sequence.tokens[sequence.filled :] for sequence in running]
        if recording is not None:
            recording.before()
        with torch.profiler.record_function(FORWARD):
            logits = self.model.step(fed, [one.filled for one in running], [one.row for one in running], cache)
        if recording is not None:
            recording.after()
        self.forwards += 1
        noise = torch.stack([sequence.noise[len(sequence.logprobs)] for sequence in running])
        tokens, logprobs = choose(logits, torch.tensor([sequence.temperature for sequence in running]), noise)
        for sequence, token, logprob in zip(running, tokens.tolist(), logprobs.tolist(), strict=True):
            sequence.filled = len(sequence.tokens)
            if not sequence.logprobs:
                self._keep_prefix(sequence, cache)
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(self.holding.version)
        if any(sequence.finished for sequence in running):
            self._retire()

    def _retire(self) -> None:
        """Free the rows of what is finished, and answer the requests that are."""
        for sequence in self._running:
            if sequence.finished:
                self._free.append(sequence.row)
        self._running = [sequence for sequence in self._running if not sequence.finished]
        whole = [request for request in self._accepted if all(one.finished for one in request.sequences)]
        for request in whole:
            self._accepted.remove(request)
            self._answer(request, [self._completion(sequence) for sequence in request.sequences])

    def _admit(self, sequence: Sequence, cache: Cache) -> None:
        """Give a request its row, with as much of its prompt as a kept prefix has."""
        sequence.row = row = self._free.pop()
        best: tuple[int, ...] = ()
        for prefix in self._prefixes:
            # The last token is fed in any case: its logits are what the first choice is made from.
            if _common(prefix, sequence.tokens[:-1]) > _common(best, sequence.tokens[:-1]):
                best = prefix
        if length := _common(best, sequence.tokens[:-1]):
            keys, values = self._prefixes[best]
            cache.keys[:, row, :, :length] = keys[:, :, :length]
            cache.values[:, row, :, :length] = values[:, :, :length]
            sequence.filled = sequence.reused = length
            self._prefixes.move_to_end(best)
        self._running.append(sequence)

    def _keep_prefix(self, sequence: Sequence, cache: Cache) -> None:
        """Keep what a prompt's forward computed, unless what is kept covers it."""
        prompt = tuple(sequence.tokens[: sequence.prompt])
        if sequence.reused >= len(prompt) - 1 or prompt in self._prefixes:
            return
        keys, values = cache.keys[:, sequence.row, :, : len(prompt)], cache.values[:, sequence.row, :, : len(prompt)]
        self._prefixes[prompt] = keys.clone(), values.clone()
        if len(self._prefixes) > PREFIXES_MAX:
            self._prefixes.popitem(last=False)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _take(self, request: Request) -> None:
        if self._gate == "open":
            self._accept(request)
        else:
            self._held.append(request)

    def _accept(self, request: Request) -> None:
        self._accepted.append(request)
        self._waiting.extend(request.sequences)

    def _end(self, requests: list[Request]) -> None:
        """Answer requests with what they have."""
        self._forget(requests)
        for request in requests:
            self._answer(request, [self._completion(sequence) for sequence in request.sequences])

    def _fail(self, error: RolloutctlError) -> None:
        requests = list(self._accepted)
        self._forget(requests)
        for request in requests:
            self._answer(request, error)

    def _forget(self, requests: list[Request]) -> None:
        gone = {id(sequence) for request in requests for sequence in request.sequences}
        self._free.extend(sequence.row for sequence in self._running if id(sequence) in gone)
        self._running = [sequence for sequence in self._running if id(sequence) not in gone]
        self._waiting = deque(sequence for sequence in self._waiting if id(sequence) not in gone)
        self._accepted = [request for request in self._accepted if request not in requests]
        self._held = deque(request for request in self._held if request not in requests)

    def _answer(self, request: Request, result: list[Completion] | RolloutctlError) -> None:
        with self._changed:
            self._owed -= len(request.sequences)
        request.done(result)

    def _completion(self, sequence: Sequence) -> Completion:
        return Completion(
            tokens=sequence.tokens[sequence.prompt :],
            logprobs=sequence.logprobs,
            finish_reason="length" if sequence.finished else "abort",
            version=self.holding.version,
            versions=sequence.versions,
            reused=sequence.reused,
        )

    def _tell_drained(self, error: RolloutctlError | None) -> None:
        drained, self._drained = self._drained, None
        if drained is not None:
            drained(error)

    def _leave(self) -> None:
        """The end: nobody is left waiting."""
        self.abort()
        self._tell_drained(EngineError("the engine was closed while it drained."))
        if self._recording is not None:
            self._recording.discard()

    def _asleep(self) -> str:
        return f"{' and '.join(sorted(self.holding.asleep))} asleep"

    def _doing(self) -> str:
        return "frozen" if self._gate == "closed" else "running"


def _common(one: tuple[int, ...], other: list[int]) -> int:
    """How many tokens two sequences begin with in common."""
    length = 0
    for first, second in zip(one, other, strict=False):
        if first != second:
            break
        length += 1
    return length
