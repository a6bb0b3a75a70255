"""An engine that is only modelled: what it holds, and what an engine of its kind shows of that."""

from collections.abc import Mapping
from typing import Final, Literal, get_args

from msgspec.structs import replace

from schemas import events
from schemas.identity import Operation

Kind = Literal["tiny", "sglang", "vllm", "verl"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
IDEMPOTENT: Final[Mapping[Kind, frozenset[Operation]]] = {
    "tiny": frozenset({Operation.PAUSE, Operation.RESUME}),
    "sglang": frozenset({Operation.PAUSE, Operation.RESUME}),
    "vllm": frozenset({Operation.PAUSE, Operation.RESUME, Operation.SLEEP, Operation.WAKE}),
    "verl": frozenset({Operation.PAUSE, Operation.RESUME}),
}
"""What may be asked of them twice."""
LAUNCH_LABEL: Final = "default"
"""The label of what a fresh engine holds."""


def reported(kind: Kind, state: events.Observation, stopped: bool) -> events.Observation:
    """Return what an engine of this kind shows of its state: None for what the real one does not report.

    Args:
        kind: Of the engine.
        state: All of its state.
        stopped: It is paused, or memory is released: vLLM says that it sleeps also while it is merely paused.
    """
    match kind:
        case "tiny":
            return state
        case "sglang":
            return replace(state, asleep=None, profiling=None, digest=None)
        case "vllm":
            return replace(state, asleep=None if stopped else frozenset(), profiling=None, digest=None)
        case "verl":  # it has no label before the first push
            label = "" if state.label == LAUNCH_LABEL else state.label
            hidden = replace(state, generating=None, version=None, asleep=None, profiling=None, digest=None)
            return replace(hidden, label=label)


class ModelledEngine:
    """The engine of one replica.

    Attributes:
        launch: Number of its launch.
        ready: It answers.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.launch, self.ready = 0, True
        self._begin()

    def _begin(self) -> None:
        self.launch += 1
        self._paused, self._version, self._label = False, 0, LAUNCH_LABEL
        self._adapters: dict[str, str] = {}

    def end(self) -> None:
        """Die, with all that it holds."""
        self._begin()
        self.ready = False

    def observe(self) -> events.Observation:
        """Return what a backend would read now."""
        if not self.ready:
            return events.Observation(engine=self.kind, tokenizer="unknown")
        state = events.Observation(
            engine=self.kind,
            instance=f"launch {self.launch}",
            tokenizer="present",
            operations=frozenset(Operation),
            remedies=events.Remedies(idempotent=IDEMPOTENT[self.kind]),
            generating=not self._paused,
            asleep=frozenset(),
            profiling=False,
            version=self._version,
            label=self._label,
            adapters=dict(self._adapters),
        )
        return reported(self.kind, state, self._paused)

    def carry_out(self, call: events.Call, result: events.Returned | events.Fault) -> None:
        """Do what a call with this result does. After a load that failed, nothing is known of the weights."""
        if isinstance(result, events.Fault):
            if isinstance(call, events.Load | events.Restore) and result.kind != "refused":
                self._version, self._label = 0, "torn"
            return
        match call:
            case events.Pause():
                self._paused = True
            case events.Resume():
                self._paused = False
            case events.Load():
                self._version, self._label = call.version, call.label or str(call.version)
            case events.LoadAdapter():
                self._adapters[call.adapter.model] = call.adapter.path
            case events.UnloadAdapter():
                self._adapters.pop(call.model, None)
