"""What one inspection of a verl server's actor reads, and what follows from it for memory and profiles."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal

from msgspec import Struct

from schemas.commands import ProfilePlan, Window
from schemas.desired import ALL_TAGS
from schemas.identity import Label, Tag
from workers.limits import Limit

CACHE: Final[frozenset[Tag]] = frozenset({"kv_cache"})
WEIGHTS: Final[frozenset[Tag]] = frozenset({"weights"})

_OWN: Final = "its rollout.profiler"

_RESTORED: Final[Mapping[tuple[str, str], tuple[frozenset[Tag], ...]]] = {
    ("tokenizer_manager", "hybrid"): (CACHE,),  # wake_up raises
    ("tokenizer_manager", "colocated"): (CACHE, ALL_TAGS),
    ("tokenizer_manager", "standalone"): (CACHE,),  # sleep releases no more than that
    ("engine", "hybrid"): (CACHE, ALL_TAGS),
    ("engine", "colocated"): (ALL_TAGS,),  # release_kv_cache does nothing
    ("engine", "standalone"): (CACHE,),  # sleep does nothing
}
"""By front end and rollout mode: the regions that verl's methods release and restore unchanged."""


class ServerProfiler(Struct, frozen=True, kw_only=True):
    """The profiler of one server, as verl configured it.

    Attributes:
        relocated: Prefix of the traces' names in the directory above, if verl relocates them.
    """

    enabled: bool
    selected: bool
    discrete: bool
    tool: str | None
    contents: tuple[str, ...]
    start: int | None
    end: int | None
    directory: str
    relocated: str | None


class ServerSnapshot(Struct, frozen=True, kw_only=True):
    """The state of one server; None for what it does not have.

    Attributes:
        worker: Ray's id of the actor's process. A restart changes it.
        front_end: Name of the attribute that holds the engine's front end; None while the server launches.
        label: `global_steps`, which verl sets once the weights are in; empty before the first; None for a server
            without that attribute.
        adapters: LoRA weights are loaded as adapters.
    """

    worker: str
    kind: str
    front_end: Literal["tokenizer_manager", "engine"] | None
    serves: bool
    paused: bool | None
    running: int | None
    label: Label | None
    wake_up: tuple[str, ...]
    mode: str | None
    frees: bool | None
    level: int | None
    adapters: bool
    profiler: ServerProfiler | None
    world: int | None
    nnodes: int | None
    node_rank: int | None


def restorable(snapshot: ServerSnapshot | None) -> tuple[frozenset[Tag], ...]:
    """Return the sets of regions that a server can release and restore unchanged."""
    if snapshot is not None and snapshot.frees is False:
        return ()
    if snapshot is None or snapshot.front_end is None or snapshot.mode is None:
        return (CACHE, ALL_TAGS)
    if snapshot.mode != "colocated" and snapshot.level == 2:  # the weights are dropped, and no method restores them
        return ()
    restored = _RESTORED.get((snapshot.front_end, snapshot.mode), ())
    return tuple(tags for tags in restored if tags == CACHE or not snapshot.adapters)


def profile_limits(plan: ProfilePlan, snapshot: ServerSnapshot) -> Iterator[Limit]:
    """Yield what a server can't record; it may record more than was asked for."""
    profiler = snapshot.profiler
    yield Limit(plan.by_stage, "by stage", "verl's servers don't take that from a call")
    yield Limit(not plan.activities, "a plan without activities", "name at least one activity")
    yield from _window_limits(plan.window, snapshot)
    if profiler is None:
        return
    lacking = {
        "stack": (plan.with_stack or plan.with_modules) and not {"stack", "module"} & set(profiler.contents),
        "shapes": plan.record_shapes and "shapes" not in profiler.contents,
        "memory": "memory" in plan.activities and "memory" not in profiler.contents,
    }
    yield Limit(not profiler.enabled, "anything", f"enable is off in {_OWN}")
    yield Limit(not profiler.selected, "this replica", f"ranks and all_ranks in {_OWN} leave this replica out")
    yield Limit(
        not profiler.discrete,
        "on command",
        f"discrete is off in {_OWN}, and verl's servers profile in discrete mode only",
    )
    yield Limit(profiler.tool != plan.tool, f"with tool {plan.tool}", f"the tool of {_OWN} is {profiler.tool}")
    yield Limit(plan.merge, "a merged trace", "verl's servers have nothing that merges traces")
    missing = [name for name, lacks in lacking.items() if lacks]
    yield Limit(bool(missing), ", ".join(missing), f"the contents of {_OWN} lack it")


def _window_limits(window: Window | None, snapshot: ServerSnapshot) -> Iterator[Limit]:
    """Yield why a window can't be recorded. Servers take none from a call; vLLM's keep the one of their launch.

    SGLang gets the same two numbers with each start, but counts the first from its launch, and records one step fewer
    without it.
    """
    profiler = snapshot.profiler
    bounded = profiler is not None and (profiler.start is not None or profiler.end is not None)
    if window is None:
        ends = f"{_OWN} sets profile_token_start or profile_token_end, which would end the session before it is stopped"
        yield Limit(bounded, "from start to stop", ends)
    elif not bounded or profiler is None:
        text = "verl's servers take no window from a call. Profile from start to stop"
        yield Limit(True, f"the window {window}", f"{text}, or set profile_token_start and profile_token_end in {_OWN}")
    else:
        counts = "SGLang counts it from its launch. Profile from start to stop"
        yield Limit(snapshot.front_end == "tokenizer_manager", f"the window {window}", counts)
        own = f"[{profiler.start or 0}, {'…' if profiler.end is None else profiler.end})"
        yield Limit(
            (profiler.start or 0, profiler.end) != (window.start, window.end),
            f"the window {window}",
            f"that of {_OWN} is {own}",
        )


def inspector() -> Callable[[Any], dict[str, object]]:
    """Return the function that inspects a server, from inside its actor.

    It is made here so that Ray ships it by value: the actor needs none of our packages.
    """

    def profiler(server: Any) -> dict[str, object] | None:
        controller = getattr(server, "profiler_controller", None)
        config = getattr(controller, "config", None)
        if controller is None or config is None:
            return None
        tool = getattr(controller, "tool_config", None)
        rank = server.replica_rank
        return {
            "enabled": bool(controller.check_enable()),
            "selected": bool(controller.check_this_rank()),
            "discrete": bool(controller.is_discrete_mode()),
            "tool": getattr(config, "tool", None),
            "contents": [str(content) for content in getattr(tool, "contents", None) or ()],
            "start": getattr(tool, "profile_token_start", None),
            "end": getattr(tool, "profile_token_end", None),
            "directory": f"{getattr(config, 'save_path', None)}/agent_loop_rollout_replica_{rank}",
            "relocated": f"rollout-replica{rank}" if getattr(config, "relocate_results", False) else None,
        }

    def gpus(config: Any) -> int | None:
        kinds = ("tensor_model", "data", "pipeline_model")
        tensor, data, pipeline = (getattr(config, f"{kind}_parallel_size", 0) for kind in kinds)
        return tensor * data * pipeline or None

    def inspect_server(server: Any) -> dict[str, object]:
        import inspect

        import ray

        front_end = next((name for name in ("tokenizer_manager", "engine") if hasattr(server, name)), None)
        engine = getattr(server, front_end) if front_end is not None else None
        paused = getattr(engine, "is_pause", getattr(server, "_submission_paused", None))
        requests = getattr(engine, "rid_to_state", None)
        if requests is None:
            requests = getattr(getattr(engine, "output_processor", None), "request_states", None)
        wake_up = getattr(server, "wake_up", None)
        step = getattr(server, "global_steps", None)
        level = getattr(server, "_resolve_sleep_level", None)
        mode = getattr(server, "rollout_mode", None)
        config = getattr(server, "config", None)
        return {
            "worker": ray.get_runtime_context().get_worker_id(),
            "kind": type(server).__name__,
            "front_end": front_end,
            "serves": engine is not None,
            "paused": paused if isinstance(paused, bool) else None,
            "running": len(requests) if requests is not None else None,
            "label": ("" if step is None else str(step)) if hasattr(server, "global_steps") else None,
            "wake_up": list(inspect.signature(wake_up).parameters) if wake_up is not None else [],
            "mode": getattr(mode, "value", None),
            "frees": getattr(config, "free_cache_engine", None),
            "level": level() if level is not None else None,
            "adapters": bool(getattr(server, "lora_as_adapter", False)),
            "profiler": profiler(server),
            "world": gpus(config),
            "nnodes": getattr(server, "nnodes", None),
            "node_rank": getattr(server, "node_rank", None),
        }

    return inspect_server
