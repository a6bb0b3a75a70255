"""A case put to verl's own code: its answer, in the words of `gates`."""

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.truth import gates
from tests.truth.cases import (
    ABSENT,
    AGAIN,
    ALL,
    ENDED,
    MINE,
    NEVER,
    NEXT,
    NOBODY_FIRST,
    NONE,
    NULL,
    OTHERS,
    ROUTER,
    SOON,
    START,
    STOP,
    STRAY,
    THEIRS,
    UNABLE,
    UNKNOWN,
    Case,
)
from tests.truth.verl_code import Verl, driven, server_class, trainer_class

STEP, WORLD, WINDOW = 3, 4, (1, 4)

Step = tuple[str, int]
"""`start` or `stop`, and the global step in which the trainer comes to it."""
HISTORIES: dict[str, tuple[Step, ...]] = {
    START: (("start", STEP),),
    AGAIN: (("start", STEP), ("start", STEP)),
    NEXT: (("start", STEP - 1), ("start", STEP)),
    STOP: (("start", STEP), ("stop", STEP)),
    ENDED: (("start", STEP), ("stop", STEP)),
    STRAY: (("stop", STEP),),
}


class TokenizerManager:
    """SGLang's, as it answers: an exception for what its schedulers refuse. They end a session of `num_steps`."""

    def __init__(self) -> None:
        self.calls, self.ignored, self.open, self.counted = 0, False, False, False

    async def start_profile(self, *, num_steps: int | None, start_step: int | None, **_: object) -> None:
        self.calls += 1
        if self.open:
            raise RuntimeError("Profiling is already in progress. Call /stop_profile first.")
        self.open, self.counted = True, num_steps is not None

    async def stop_profile(self) -> None:
        self.calls += 1
        if not self.open:
            raise RuntimeError("Profiling is not in progress. Call /start_profile first.")
        self.open = False

    def generate(self) -> None:
        """More forward steps than any window has."""
        self.open = self.open and not self.counted


class AsyncLLM:
    """vLLM's up to 0.31: its workers ignore what holds already. able: it was launched with a profiler."""

    def __init__(self, able: bool) -> None:
        self.calls, self.ignored = 0, False
        self._able, self._open = able, False

    async def start_profile(self) -> None:
        self._profile(True)

    async def stop_profile(self) -> None:
        self._profile(False)

    def generate(self) -> None:
        """A worker whose window has ended stays as it is until it is stopped."""

    def _profile(self, open: bool) -> None:
        self.calls += 1
        if not self._able:
            raise RuntimeError("Profiling is not enabled.")
        self.ignored, self._open = self._open == open, open


class Router:
    """What SGLang puts in the place of several tokenizer managers: it passes on what they say."""

    calls, ignored = 0, False

    def generate(self) -> None:
        """It takes no part in that."""


class Runs:
    """Cases, one by one. Each is a process of its own as far as verl can tell."""

    def __init__(self, verl: Verl, save: Path) -> None:
        self._verl, self._save, self._warnings = verl, save, list[str]()
        self._servers = {engine: server_class(engine, verl, self._warnings) for engine in ("sglang", "vllm")}
        self._trainer = trainer_class()

    def server(self, engine: gates.Engine, case: Case) -> str:
        """What the server of one node does about the last command, and whether the trainer sends it at all."""
        self._warnings.clear()
        server = self._servers[engine]()
        server.config = SimpleNamespace(
            tensor_model_parallel_size=WORLD,
            data_parallel_size=1,
            pipeline_model_parallel_size=1,
            profiler=self._section(case, numbers=[WORLD], window=WINDOW if case.command == ENDED else None),
        )
        server.node_rank, server.replica_rank = int(case.node), _index(case)
        server.configure()
        front = _front(engine, case)
        attribute = {"sglang": "tokenizer_manager", "vllm": "engine"}[engine]
        if engine == "sglang" and front is None and case.front != NEVER:
            setattr(server, attribute, None)  # so it is after a launch that brought none
        elif front is not None and case.front != SOON:
            setattr(server, attribute, front)
        manager = SimpleNamespace(
            start_profile=lambda: driven(server.start_profile()), stop_profile=lambda: driven(server.stop_profile())
        )
        sent, before = False, 0
        for number, (action, step) in enumerate(HISTORIES[case.command]):
            if number and front is not None:
                setattr(server, attribute, front)
                if case.command == ENDED:
                    front.generate()
            before = front.calls if front is not None else 0
            try:
                sent = self._send(case, action, step, manager, SimpleNamespace(start_profile=_no, stop_profile=_no))
            except (AttributeError, RuntimeError) as error:
                return f"raises {type(error).__name__}"
        if not sent:
            return gates.NOT_ASKED
        if front is not None and front.calls > before:
            return gates.IGNORED if front.ignored else gates.ACTS
        return gates.WARNED if self._warnings else gates.NOTHING

    def rank(self, case: Case) -> str:
        """Whether a training rank records its step otherwise for the last command."""
        history = HISTORIES[case.command]
        rest = (("stage", STEP), ("stop", STEP)) if history[-1][0] == "start" else ()
        sent, recorded = self._recorded(case, (*history, *rest))
        _, without = self._recorded(case, (*history[:-1], *rest))
        if not sent:
            return gates.NOT_ASKED
        return gates.ACTS if recorded != without else gates.NOTHING

    def _recorded(self, case: Case, history: Iterable[Step]) -> tuple[bool, list[tuple[object, ...]]]:
        """Was anything sent; and what the tools were asked for."""
        verl = self._verl
        verl.forget()
        section = self._section(case, numbers=[1])
        profiler = verl.profile.DistProfiler(
            rank=_index(case), config=section, tool_config=section.tool_config[section.tool]
        )
        worker = SimpleNamespace(
            profiler=profiler, actor=SimpleNamespace(engine=SimpleNamespace(module=SimpleNamespace(forward=_no)))
        )
        stage = verl.profile.DistProfiler.annotate(role="actor_update")(_stage)
        group = SimpleNamespace(
            start_profile=profiler.start, stop_profile=lambda run_command: profiler.stop(run_command=False)
        )
        sent = False
        for action, step in history:
            if action == "stage":
                stage(worker)
            else:
                sent = self._send(case, action, step, None, group) or sent
        return sent, list(verl.tools.calls)

    def _send(self, case: Case, action: str, step: int, manager: Any, group: Any) -> bool:
        """What the trainer does in this step. Returns whether anything came of it to those that are asked."""
        sent: list[str] = []
        trainer = self._trainer()
        steps = {OTHERS: [9], NONE: None}.get(case.step, [STEP - 1, STEP])  # nobody else looks at them
        trainer.config = SimpleNamespace(global_profiler=SimpleNamespace(steps=steps, profile_continuous_steps=False))
        trainer.global_steps, trainer.total_training_steps = step, 100
        trainer.use_reference_policy = trainer.use_critic = trainer.prev_step_profile = False
        trainer.checkpoint_manager = SimpleNamespace(sleep_replicas=_no)
        trainer.llm_server_manager = _counted(manager, sent) if manager else None
        trainer.actor_rollout_wg = group if manager else _counted(group, sent)
        trainer.choose()
        if action == "start":
            trainer._start_profiling()
        elif manager:
            trainer.on_sample_end()
        else:
            trainer._stop_profiling()
        return bool(sent)

    def _section(self, case: Case, numbers: list[int], window: tuple[int, int] | None = None) -> Any:
        tool = {NULL: None, UNKNOWN: "perf"}.get(case.tool, case.tool)
        options = self._verl.options(tool, case.discrete == "yes", window)
        ranks = {ALL: None, MINE: numbers, THEIRS: [9 * WORLD]}.get(case.ranks, [])
        return self._verl.section(tool, case.enable == "yes", ranks, options, self._save)


def _front(engine: str, case: Case) -> TokenizerManager | AsyncLLM | Router | None:
    """What stands at this node once the engine is up. verl has none on the other nodes of a replica."""
    if case.node != "0" or case.front in (ABSENT, NEVER):
        return None
    if engine == "vllm":
        return AsyncLLM(able=case.front != UNABLE)
    return Router() if case.front in (ROUTER, UNABLE) else TokenizerManager()


def _index(case: Case) -> int:
    """Of the replica, or of the training rank."""
    return 0 if case.ranks == NOBODY_FIRST else 1


def _no(*_: object, **__: object) -> None:
    """Nothing comes of it."""


def _stage(worker: object) -> None:
    """One stage of a training step."""


def _counted(what: Any, sent: list[str]) -> SimpleNamespace:
    """The same two methods, noted in `sent`."""

    def noted(name: str) -> Callable[..., None]:
        def call(*arguments: Any, **named: Any) -> None:
            sent.append(name)
            getattr(what, name)(*arguments, **named)

        return call

    return SimpleNamespace(start_profile=noted("start_profile"), stop_profile=noted("stop_profile"))
