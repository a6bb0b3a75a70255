"""Completes the command line of a server that an agent launches: options for the node's place, and for profiling.

Pure. The user's own options are never changed. One that contradicts the agent's place is found when the server is up,
by what it reports of itself.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from schemas.commands import ProfilePlan
from schemas.errors import ConfigError
from schemas.identity import Identity
from schemas.selection import profile_skip_reason

Kind = Literal["sglang", "vllm"]

_SERVES: Final = frozenset(
    {
        "--headless",
        *("--data-parallel-hybrid-lb", "-dph", "--data-parallel-external-lb", "-dpe", "--data-parallel-rank", "-dpn"),
    }
)
"""Beside one of these `--headless` is not added: with the others vLLM has an API server on every node."""


def server_command(kind: Kind, command: Sequence[str], identity: Identity, dist_init: str | None) -> tuple[str, ...]:
    """Return the command with the options for this node's place, unless the user has given them. Raises ConfigError."""
    if identity.nnodes == 1:
        return tuple(command)
    given, added = _flags(command), list[str]()

    def add(names: str, value: str | None) -> bool:
        """Add the option under the first of its names, unless it is given. Returns whether it is there."""
        if not given.isdisjoint(names.split()):
            return True
        if value is not None:
            added.extend((names.split()[0], value))
        return value is not None

    short = kind == "vllm"
    add("--node-rank -r" if short else "--node-rank", str(identity.node_rank))
    add("--nnodes -n" if short else "--nnodes", str(identity.nnodes))
    host, port = (None, None) if dist_init is None else _host_and_port(dist_init)
    if kind == "sglang":
        meets, flags = add("--dist-init-addr --nccl-init-addr", dist_init), "--dist-init-addr HOST:PORT"
    else:
        meets, flags = add("--master-addr", host), "--master-addr HOST --master-port PORT"
        add("--master-port", port)
        added += ["--headless"] if identity.node_rank > 0 and given.isdisjoint(_SERVES) else []
    if not meets:
        raise ConfigError(
            "this replica has more than one node, but no address at which its servers meet. Give the agent the address "
            f"of node rank 0 as HOST:PORT, the same on every node, or put {flags} into the server's command."
        )
    return (*command, *added)


def profiled_command(
    kind: Kind, command: Sequence[str], identity: Identity, plan: ProfilePlan, traces: Path
) -> tuple[str, ...]:
    """Return the command with the options that the engine needs to record what the plan asks of this replica.

    SGLang needs none. vLLM (vllm/config/profiler.py, 0.13 to 0.32) fixes at launch where it writes and what it records;
    a command that has such options itself is returned unchanged.
    """
    profiled = profile_skip_reason(plan, None, identity) is None
    if kind == "sglang" or not profiled or any(flag.startswith("--profiler-config") for flag in _flags(command)):
        return tuple(command)
    chosen = {
        "profiler": "torch",
        "torch_profiler_dir": str(traces.resolve() / f".vllm-{identity.agent}"),
        "torch_profiler_with_stack": plan.with_stack or plan.with_modules,
        "torch_profiler_record_shapes": plan.record_shapes,
        "torch_profiler_with_memory": "memory" in plan.activities,
        "ignore_frontend": True,  # it is not a rank, so no plan asks for its traces
    }
    return (*command, "--profiler-config", json.dumps(chosen))


def _flags(command: Sequence[str]) -> frozenset[str]:
    """The options of a command line: `--flag value`, `--flag=value`, and vLLM's `-n 2`, `-n=2` and `-n2`."""
    flags = (word.partition("=")[0].replace("_", "-") for word in command if word.startswith("-"))
    return frozenset(re.sub(r"^(-[nr])\d+$", r"\1", flag) for flag in flags)


def _host_and_port(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"the address at which the nodes meet is HOST:PORT, e.g. 10.0.0.1:29500, not {address!r}.")
    return host, port
