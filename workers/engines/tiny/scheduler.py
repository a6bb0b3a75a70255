"""The generation loop of the tiny engine: one thread, on which every forward, copy and profile of the engine happens.

Theory of operation. The thread is an executor with one worker. The prompts of a request are one batch, and a forward
of it is a task that submits the next one, so requests take turns. A command is a task between two forwards: it always
finds whole tokens, and nothing here needs a lock. Requests that arrive while the engine is paused are held. Freezing a
request just stops its forwards, and a cache that was released is computed again from the tokens.

Like the engines it stands for, it refuses what would break them: memory is not released under running requests,
weights are not loaded into a running or sleeping engine, and nothing is released or woken twice. And like them, it
reuses the cache of a prompt that old weights computed until it is flushed.

A request that names a LoRA adapter has it until its end, whatever is unloaded meanwhile, on the base weights of the
moment.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Final, TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.func import functional_call

from schemas.commands import ProfilePlan
from schemas.errors import EngineError, RefusedError
from schemas.events import Observation
from schemas.identity import InFlight, Tag
from workers.engines.tiny.model import TinyConfig, TinyModel, digest, weights, with_adapter
from workers.engines.tiny.profile import FORWARD, ForwardProfile
from workers.engines.tiny.server import Completion, Generate

MAX_KEPT_PROMPTS: Final = 64
"""Requests whose prompts' keys and values are kept for the next request with the same prompts."""

T = TypeVar("T")


class TinyRequest:
    """The prompts of one request, and their completions so far.

    Attributes:
        tokens: Prompts and completions [B, T].
        logprobs: Log-probabilities of the completions' tokens.
        versions: For each position of the completions, the version of the weights that it was drawn from.
        cache: Keys and values of all tokens but the last; None if they must be computed again.
    """

    def __init__(self, message: Generate, config: TinyConfig) -> None:
        length = len(message.prompts[0]) if message.prompts else 0
        if not length or any(len(prompt) != length for prompt in message.prompts):
            raise EngineError("a request needs at least one prompt and one token, and prompts of the same length.")
        if length + message.max_tokens > config.context:
            raise EngineError(
                f"prompts of {length} tokens with max_tokens={message.max_tokens} were refused: both together have "
                f"room for {config.context}."
            )
        if max(map(max, message.prompts)) >= config.vocab:
            raise EngineError(f"a prompt was refused: its tokens must be 0..{config.vocab - 1}.")
        self.message = message
        self.prompts = tuple(map(tuple, message.prompts))
        self.tokens = torch.tensor(message.prompts)
        self.logprobs = torch.empty(len(message.prompts), 0)
        self.versions: list[int] = []
        self.cache: Tensor | None = None
        self.adapter: Mapping[str, Tensor] = {}
        self.answer: Future[list[Completion]] = Future()

    @property
    def finished(self) -> bool:
        return len(self.versions) == self.message.max_tokens

    def append(self, logits: Tensor, version: int, random: torch.Generator) -> None:
        """Draw the next token of each prompt. Logprobs are those of the distribution that was drawn from."""
        temperature = self.message.temperature
        logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
        drawn = torch.multinomial(logprobs.exp(), 1, generator=random) if temperature else logits.argmax(-1, True)
        self.tokens = torch.cat([self.tokens, drawn], dim=1)
        self.logprobs = torch.cat([self.logprobs, logprobs.gather(-1, drawn)], dim=1)
        self.versions.append(version)

    def made(self, start: int) -> list[int]:
        """Tokens of the first completion so far, from `start` on. Any thread may ask."""
        tokens: list[int] = self.tokens[0, len(self.prompts[0]) + start :].tolist()
        return tokens

    def completions(self) -> list[Completion]:
        generated = self.tokens[:, len(self.prompts[0]) :].tolist()
        return [
            Completion(
                tokens=tokens,
                logprobs=logprobs,
                versions=self.versions,
                finish_reason="length" if self.finished else "abort",
            )
            for tokens, logprobs in zip(generated, self.logprobs.tolist(), strict=True)
        ]


class Scheduler:
    """The engine itself. It starts paused: nothing is generated before `resume`.

    `run`, `generate` and `close` may be called from any thread; the commands only through `run`.
    """

    def __init__(self, config: TinyConfig, seed: int, launched: Observation, device: str) -> None:
        self.model = TinyModel(config, seed).to(device)
        self.observation = replace(launched, digest=digest(weights(self.model)))
        self.forwards = 0
        self._device = device
        self._random = torch.Generator().manual_seed(seed)
        self._kept: dict[tuple[str, tuple[tuple[int, ...], ...]], Tensor] = {}  # by adapter and prompts
        self._adapters: dict[str, Mapping[str, Tensor]] = {}
        self._backup: dict[str, Tensor] = {}
        self._profile: ForwardProfile | None = None
        self._requests: list[TinyRequest] = []
        self._thread = ThreadPoolExecutor(1, "tiny-engine", initializer=_use_one_core)

    # --- from any thread ----------------------------------------------------------------------------------------------

    def counted(self) -> Observation:
        """Return the observation with what the engine counts: its requests, and its forwards in place of tokens."""
        running, requests = len(self._begun()), len(self._requests)
        return replace(self.observation, running=running, waiting=requests - running, generated=self.forwards)

    def run(self, command: Callable[..., T], *args: object) -> T:
        """Call a command on the engine's thread, between two forwards, and return its result."""
        try:
            result = self._thread.submit(command, *args)
        except RuntimeError as error:
            raise EngineError("the engine is closed.") from error
        return result.result()

    def generate(self, message: Generate) -> list[Completion]:
        """Queue a request and wait for its completions. Raises EngineError for one that can't be served."""
        return self.begin(message).answer.result()

    def begin(self, message: Generate) -> TinyRequest:
        """Queue a request. Raises EngineError for one that can't be served."""
        request = TinyRequest(message, self.model.config)
        self.run(self._accept, request)
        return request

    def memory_bytes(self) -> int:
        """Return the bytes of the weights and of all caches."""
        caches = [*self._kept.values(), *(request.cache for request in self._requests if request.cache is not None)]
        return sum(tensor.nbytes for tensor in (*weights(self.model).values(), *caches))

    def close(self) -> None:
        """End the profile, the thread and all requests. Waits for at most one forward, or the export of a trace."""
        with suppress(EngineError):  # the outcome of the profile is not waited for any more
            self.run(self.stop_profile)
        self._thread.shutdown()
        self.abort()

    # --- commands, on the thread --------------------------------------------------------------------------------------

    def pause(self, mode: InFlight) -> None:
        """End, finish or freeze the requests that have begun. All others are held from now on."""
        begun = self._begun()
        if mode == "wait" and begun and self._asleep:
            raise RefusedError(f"pause(wait) was refused: requests are frozen, and asleep: {_list(self._asleep)}.")
        if mode == "wait":
            for request in begun:
                while request in self._requests:
                    self._step(request)
        if mode == "abort":
            self._answer(begun)
        self._change(generating=False)

    def resume(self) -> None:
        """Let frozen requests go on, and held ones begin."""
        if self._asleep:
            raise RefusedError(f"resume was refused: asleep: {_list(self._asleep)}. Wake it first.")
        if not self.observation.generating:
            self._change(generating=True)
            for request in self._requests:
                self._thread.submit(self._take_turn, request)

    def abort(self) -> None:
        """Answer every request, running or held, with the tokens that it has."""
        self._answer(list(self._requests))

    def flush(self) -> None:
        """Drop all kept prompts, and the caches of frozen requests, which are computed anew. Refused while one runs."""
        begun = self._begun()
        if begun and self.observation.generating:
            raise RefusedError(
                f"flush was refused: {len(begun)} requests are running. The cache is as it was: pause, abort them, or "
                "let them finish."
            )
        self._drop_cache()

    def sleep(self, tags: frozenset[Tag]) -> None:
        """Release memory, a GPU's to other processes. The CPU keeps a copy of the weights, as at vLLM's level 1."""
        if self.observation.generating:
            raise RefusedError("sleep was refused: requests may run. Pause first; nothing was released.")
        if again := tags & self._asleep:
            raise RefusedError(f"sleep was refused: {_list(again)} is asleep already. Nothing was released.")
        if "weights" in tags:
            self._backup = self.copied()
            for parameter in self.model.parameters():
                parameter.data = torch.empty(0)
        if "kv_cache" in tags:
            self._drop_cache()
        torch.cuda.empty_cache()  # does nothing where there is no GPU
        self._change(asleep=self._asleep | tags)

    def wake(self, tags: frozenset[Tag]) -> None:
        """Take memory back: the weights as they were, the cache empty."""
        if awake := tags - self._asleep:
            raise RefusedError(f"wake was refused: {_list(awake)} is awake. Nothing was changed.")
        if "weights" in tags:
            for name, parameter in self.model.named_parameters():
                parameter.data = self._backup.pop(name).to(self._device)
        self._change(asleep=self._asleep - tags)

    def load(self, version: int, tensors: Mapping[str, Tensor], label: str, content: str | None) -> None:
        """Take tensors of the model's own layout for its weights. Kept prompts stay until `flush`."""
        self._require_loadable()
        for name, parameter in self.model.named_parameters():
            parameter.data = tensors[name].to(self._device)
        self._change(version=version, label=label or str(version), digest=content)

    def copied(self) -> dict[str, Tensor]:
        """Return a copy of the weights, for a load that changes some of them."""
        self._require_loadable()
        return {name: tensor.to("cpu", copy=True) for name, tensor in weights(self.model).items()}

    def load_adapter(self, model: str, path: str, deltas: Mapping[str, Tensor]) -> None:
        """Take an adapter under a name that it has for no other."""
        if model in self._adapters:
            raise RefusedError(f"adapter {model} was refused: it has been loaded already, and none is replaced.")
        self._adapters[model] = {name: delta.to(self._device) for name, delta in deltas.items()}
        self._change(adapters={**(self.observation.adapters or {}), model: path})

    def unload_adapter(self, model: str) -> None:
        """Forget an adapter. Refused while a request runs on it."""
        if running := sum(request.message.model == model for request in self._requests):
            raise RefusedError(f"adapter {model} was not unloaded: {running} requests run on it.")
        self._adapters.pop(model, None)
        self._kept = {key: cache for key, cache in self._kept.items() if key[0] != model}
        self._change(adapters={name: path for name, path in (self.observation.adapters or {}).items() if name != model})

    def digest(self) -> str:
        """Return the content digest of the weights that it holds now."""
        return digest(weights(self.model))

    def _require_loadable(self) -> None:
        if self.observation.generating:
            raise RefusedError("load was refused: requests may run. Pause first; the weights are as they were.")
        if "weights" in self._asleep:
            raise RefusedError("load was refused: the weights are asleep. Wake them first.")

    def start_profile(self, plan: ProfilePlan, file: Path) -> None:
        """Record forwards into `file`. Refused while a session is open, or when torch can't record."""
        if self._profile is not None:
            raise RefusedError(
                f"a second profile was refused: the session that writes {self._profile.file} is open and continues."
            )
        self._profile = ForwardProfile(plan, file)
        self._change(profiling=True)

    def stop_profile(self) -> bool:
        """Close the session. Returns whether its window had ended it before."""
        profile, self._profile = self._profile, None
        self._change(profiling=False)
        if profile is None:
            raise EngineError("there is no profile to stop: none was started, or it was stopped before.")
        return profile.stop()

    # --- requests, on the thread --------------------------------------------------------------------------------------

    def _accept(self, request: TinyRequest) -> None:
        if model := request.message.model:
            if model not in self._adapters:
                raise EngineError(f"a request was refused: there is no adapter {model}.")
            request.adapter = self._adapters[model]
        self._requests.append(request)
        self._take_turn(request)

    def _take_turn(self, request: TinyRequest) -> None:
        """Compute one forward of a request, then queue its next turn. Pausing ends the turns, `resume` begins them."""
        if self.observation.generating and request in self._requests:
            self._step(request)
            with suppress(RuntimeError):  # the engine closes, and will answer the request
                self._thread.submit(self._take_turn, request)

    def _step(self, request: TinyRequest) -> None:
        """Generate one token for each prompt of a request, and answer it if that was the last one."""
        try:
            self._forward(request)
        except Exception as error:  # torch raises many kinds, and none may end the loop
            self._requests.remove(request)
            request.answer.set_exception(EngineError(f"a forward failed: {type(error).__name__}: {error}."))
            return
        if request.finished:
            self._answer([request])

    def _forward(self, request: TinyRequest) -> None:
        key = request.message.model, request.prompts
        past = request.cache if request.versions else self._kept.get(key)
        recorded = self._profile.forward() if self._profile is not None else nullcontext()
        with recorded, torch.profiler.record_function(FORWARD):
            tokens = request.tokens if past is None else request.tokens[:, -1:]
            tokens = tokens.to(self._device)
            if request.adapter:
                logits, cache = functional_call(self.model, with_adapter(self.model, request.adapter), (tokens, past))
            else:
                logits, cache = self.model(tokens, past)
        self.forwards += 1
        if not request.versions:
            # Without the last token, which is fed in any case: its logits choose the first token of the completion.
            self._kept[key] = cache[..., :-1, :]
            if len(self._kept) > MAX_KEPT_PROMPTS:
                del self._kept[next(iter(self._kept))]
        request.cache = cache
        request.append(logits[:, -1].cpu(), self.observation.version or 0, self._random)

    def _answer(self, requests: list[TinyRequest]) -> None:
        """Answer requests with what they have, and forget them."""
        for request in requests:
            self._requests.remove(request)
            request.answer.set_result(request.completions())

    def _drop_cache(self) -> None:
        self._kept.clear()
        for request in self._requests:
            request.cache = None

    def _begun(self) -> list[TinyRequest]:
        return [request for request in self._requests if request.versions]

    @property
    def _asleep(self) -> frozenset[Tag]:
        return self.observation.asleep or frozenset()

    def _change(self, **changes: object) -> None:
        self.observation = replace(self.observation, **changes)


def _list(tags: frozenset[Tag]) -> str:
    return ", ".join(sorted(tags))


def _use_one_core() -> None:
    """Of this thread. A model so small is slower on several cores, and more so beside another engine."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
