"""verl's own code run in a case: its answer, in the words of `gates`."""

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.truth import gates
from tests.truth.cases import Case, Command, Manager, Ranks, Step, Tool
from tests.truth.verl_code import Verl, driven, server_class, trainer_class

STEP, WORLD, WINDOW = 3, 4, (1, 4)

Action = tuple[str, int]
"""`start`, `stop` or `stage` (one annotated stage), and the global step in which the trainer does it."""
HISTORIES: dict[str, tuple[Action, ...]] = {
    Command.START: (("start", STEP),),
    Command.AGAIN: (("start", STEP), ("start", STEP)),
    Command.NEXT: (("start", STEP - 1), ("start", STEP)),
    Command.STOP: (("start", STEP), ("stop", STEP)),
    Command.ENDED: (("start", STEP), ("stop", STEP)),
    Command.STRAY: (("stop", STEP),),
}


class TokenizerManager:
    """Stands in for SGLang's: raises what its schedulers refuse. They end a session of `num_steps`."""

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
    """Stands in for vLLM's up to 0.31: its workers ignore a second start or stop. `able`: launched with a profiler."""

    def __init__(self, able: bool) -> None:
        self.calls, self.ignored = 0, False
        self._able, self._open = able, False

    async def start_profile(self) -> None:
        self._profile(True)

    async def stop_profile(self) -> None:
        self._profile(False)

    def generate(self) -> None:
        """Do nothing: a worker whose window has ended stays as it is until it is stopped."""

    def _profile(self, open: bool) -> None:
        self.calls += 1
        if not self._able:
            raise RuntimeError("Profiling is not enabled.")
        self.ignored, self._open = self._open == open, open


class Router:
    """Stands in for what SGLang has in manager of several tokenizer managers: it cannot profile."""

    calls, ignored = 0, False

    def generate(self) -> None:
        """Do nothing."""


class Runs:
    """Runs cases one by one. To verl each looks like a process of its own."""

    def __init__(self, verl: Verl, save: Path) -> None:
        self._verl, self._save, self._warnings = verl, save, list[str]()
        self._servers = {engine: server_class(engine, verl, self._warnings) for engine in ("sglang", "vllm")}
        self._trainer = trainer_class()

    def server(self, engine: gates.Engine, case: Case) -> str:
        """Return what the server of one node does about the last command."""
        self._warnings.clear()
        server = self._servers[engine]()
        server.config = SimpleNamespace(
            tensor_model_parallel_size=WORLD,
            data_parallel_size=1,
            pipeline_model_parallel_size=1,
            profiler=self._section(case, numbers=[WORLD], window=WINDOW if case.command == Command.ENDED else None),
        )
        server.node_rank, server.replica_rank = int(case.node), _index(case)
        server.configure()
        manager = _manager(engine, case)
        attribute = {"sglang": "tokenizer_manager", "vllm": "engine"}[engine]
        if engine == "sglang" and manager is None and case.manager != Manager.NEVER:
            setattr(server, attribute, None)  # as after a launch that made none
        elif manager is not None and case.manager != Manager.SOON:
            setattr(server, attribute, manager)
        replicas = SimpleNamespace(
            start_profile=lambda: driven(server.start_profile()), stop_profile=lambda: driven(server.stop_profile())
        )
        sent, before = False, 0
        for number, (action, step) in enumerate(HISTORIES[case.command]):
            if number and manager is not None:
                setattr(server, attribute, manager)
                if case.command == Command.ENDED:
                    manager.generate()
            before = manager.calls if manager is not None else 0
            try:
                sent = self._send(case, action, step, replicas, SimpleNamespace(start_profile=_no, stop_profile=_no))
            except (AttributeError, RuntimeError) as error:
                return f"raises {type(error).__name__}"
        if not sent:
            return gates.NOT_ASKED
        if manager is not None and manager.calls > before:
            return gates.IGNORED if manager.ignored else gates.ACTS
        return gates.WARNED if self._warnings else gates.NOTHING

    def rank(self, case: Case) -> str:
        """Return whether the last command changes what a training rank records of its step."""
        history = HISTORIES[case.command]
        rest = (("stage", STEP), ("stop", STEP)) if history[-1][0] == "start" else ()
        sent, recorded = self._recorded(case, (*history, *rest))
        _, without = self._recorded(case, (*history[:-1], *rest))
        if not sent:
            return gates.NOT_ASKED
        return gates.ACTS if recorded != without else gates.NOTHING

    def _recorded(self, case: Case, history: Iterable[Action]) -> tuple[bool, list[tuple[object, ...]]]:
        """Whether anything was sent, and the calls that the tools received."""
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
        """Run the trainer's part of this step. Return whether it sent anything to whoever is asked."""
        sent: list[str] = []
        trainer = self._trainer()
        steps = {Step.OTHERS: [9], Step.NONE: None}.get(case.step, [STEP - 1, STEP])  # only the trainer checks them
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
        tool = {Tool.NULL: None, Tool.UNKNOWN: "perf"}.get(case.tool, case.tool)
        options = self._verl.options(tool, case.discrete == "yes", window)
        ranks = {Ranks.ALL: None, Ranks.MINE: numbers, Ranks.THEIRS: [9 * WORLD]}.get(case.ranks, [])
        return self._verl.section(tool, case.enable == "yes", ranks, options, self._save)


def _manager(engine: str, case: Case) -> TokenizerManager | AsyncLLM | Router | None:
    """What this node has for commanding its engine once that is up. verl has none on other nodes of a replica."""
    if case.node != "0" or case.manager in (Manager.ABSENT, Manager.NEVER):
        return None
    if engine == "vllm":
        return AsyncLLM(able=case.manager != Manager.UNABLE)
    return Router() if case.manager in (Manager.ROUTER, Manager.UNABLE) else TokenizerManager()


def _index(case: Case) -> int:
    """The index of the replica, or of the training rank."""
    return 0 if case.ranks == Ranks.NOBODY_FIRST else 1


def _no(*_: object, **__: object) -> None:
    """Do nothing."""


def _stage(worker: object) -> None:
    """One stage of a training step."""


def _counted(target: Any, sent: list[str]) -> SimpleNamespace:
    """The same two methods, which note their names in `sent`."""

    def noting(name: str) -> Callable[..., None]:
        def call(*arguments: Any, **named: Any) -> None:
            sent.append(name)
            getattr(target, name)(*arguments, **named)

        return call

    return SimpleNamespace(start_profile=noting("start_profile"), stop_profile=noting("stop_profile"))
