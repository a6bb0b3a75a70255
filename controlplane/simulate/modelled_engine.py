"""An engine that is only modelled: what it holds, and what an engine of its kind shows of that."""

from collections.abc import Mapping
from typing import Final, Literal, get_args

from msgspec.structs import replace

from schemas import events
from schemas.identity import Operation

Kind = Literal["tiny", "sglang", "vllm", "verl"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
_PAUSES: Final = frozenset({Operation.PAUSE, Operation.RESUME})
IDEMPOTENT: Final[Mapping[Kind, frozenset[Operation]]] = {
    **dict.fromkeys(KINDS, _PAUSES),
    "vllm": _PAUSES | {Operation.SLEEP, Operation.WAKE},
}
"""What may be asked of them twice."""
LAUNCH_LABEL: Final = "default"
"""The label of what a fresh engine holds."""
FIRST_LAUNCH: Final = "launch 1"


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


def launched(kind: Kind) -> events.Observation:
    """Return the state of a fresh engine, but for the name of its launch."""
    return events.Observation(
        engine=kind,
        tokenizer="present",
        operations=frozenset(Operation),
        remedies=events.Remedies(idempotent=IDEMPOTENT[kind]),
        generating=True,
        asleep=frozenset(),
        profiling=False,
        version=0,
        label=LAUNCH_LABEL,
        adapters={},
    )


class ModelledEngine:
    """The engine of one replica.

    Attributes:
        ready: It answers.
        state: What it holds.
        instance: Its launch.
    """

    def __init__(self, state: events.Observation) -> None:
        self.ready, self.state, self.instance, self._launch = True, state, FIRST_LAUNCH, 1
        self._kind: Kind = state.engine  # type: ignore[assignment]

    def end(self) -> None:
        """Die, with all that it holds."""
        self.ready, self._launch, self.state = False, self._launch + 1, launched(self._kind)
        self.instance = f"launch {self._launch}"

    def observe(self) -> events.Observation:
        """Return what a backend would read now."""
        if not self.ready:
            return events.Observation(engine=self._kind, tokenizer="unknown")
        shown = reported(self._kind, self.state, stopped=not self.state.generating)
        return replace(shown, instance=self.instance)

    def carry_out(self, call: events.Call, result: events.Returned | events.Fault) -> None:
        """Do what a call with this result does. After a load that failed, nothing is known of the weights."""
        state, adapters = self.state, self.state.adapters or {}
        match call:
            case events.Load() | events.Restore() if isinstance(result, events.Fault):
                self.state = state if result.kind == "refused" else replace(state, version=0, label="torn")
            case _ if isinstance(result, events.Fault):
                pass
            case events.Pause() | events.Resume():
                self.state = replace(state, generating=isinstance(call, events.Resume))
            case events.Load():
                self.state = replace(state, version=call.version, label=call.label or str(call.version))
            case events.LoadAdapter():
                self.state = replace(state, adapters={**adapters, call.adapter.model: call.adapter.path})
            case events.UnloadAdapter():
                left = {model: path for model, path in adapters.items() if model != call.model}
                self.state = replace(state, adapters=left)
