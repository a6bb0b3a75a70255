"""Completes the command line of a server that an agent launches: options for the node's place, and for profiling.

Pure. The user's own options are never changed; one that contradicts the agent's place is an error.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, assert_never

from schemas.commands import ProfilePlan
from schemas.errors import ConfigError
from schemas.identity import Identity
from schemas.selection import profile_skip_reason

Kind = Literal["sglang", "vllm"]

_NODE_RANK, _NNODES = ("--node-rank", "-r"), ("--nnodes", "-n")
_ADDRESS = ("--dist-init-addr", "--nccl-init-addr")
_EVERY_NODE_SERVES = (
    *("--data-parallel-hybrid-lb", "-dph", "--data-parallel-external-lb", "-dpe", "--data-parallel-rank", "-dpn"),
)
"""With one of these options vLLM has an API server on every node."""


def server_command(kind: Kind, command: Sequence[str], identity: Identity, dist_init: str | None) -> tuple[str, ...]:
    """Return the command with the options for this node's place, unless the user has given them.

    Args:
        dist_init: HOST:PORT at which the replica's nodes meet; a replica of one node needs none.

    Raises:
        ConfigError: The command contradicts the identity, or there is no address to meet at.
    """
    options = _Options(kind, command)
    missing: list[str] = []
    for names, wanted in ((_NODE_RANK, identity.node_rank), (_NNODES, identity.nnodes)):
        values = options.values(*names) if kind == "vllm" else options.values(names[0])
        for value in values:
            if not (value.isdecimal() and int(value) == wanted):
                raise ConfigError(
                    f"the server's command says {names[0]} {value}, but this agent is node rank {identity.node_rank} "
                    f"of {identity.nnodes}: {names[0]} {wanted}. Give both the same, or leave it out of the command."
                )
        missing += [] if values else [names[0], str(wanted)]
    if kind == "vllm" and identity.node_rank == 0 and options.has("--headless"):
        raise ConfigError(
            "the server's command says --headless, but this agent is node rank 0, whose server takes the commands. "
            "Leave --headless out, or give the agent the --node-rank of its node."
        )
    if identity.nnodes == 1:
        return tuple(command)
    match kind:
        case "sglang":
            missing += _sglang_address(options, dist_init)
        case "vllm":
            missing += _vllm_address(options, dist_init)
            if identity.node_rank > 0 and not options.has("--headless", *_EVERY_NODE_SERVES):
                missing.append("--headless")
        case _:
            assert_never(kind)
    return (*command, *missing)


def profiled_command(
    kind: Kind, command: Sequence[str], identity: Identity, plan: ProfilePlan, traces: Path
) -> tuple[str, ...]:
    """Return the command with the options that the engine needs to record what the plan asks of this replica.

    SGLang needs none. vLLM (vllm/config/profiler.py, 0.13 to 0.32) fixes at launch where it writes and what it records;
    a command that has such options itself is returned unchanged.

    Args:
        traces: Root of this node's session directories.
    """
    profiled = profile_skip_reason(plan, None, identity) is None
    if kind == "sglang" or not profiled or _Options(kind, command).begins("--profiler-config"):
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


class _Options:
    """The options of a command line: `--flag value`, `--flag=value`, and vLLM's `-n 2`, `-n=2` and `-n2`."""

    def __init__(self, kind: Kind, command: Sequence[str]) -> None:
        self.kind = kind
        self._options: list[tuple[str, str | None]] = []
        for word, after in zip(command, (*command[1:], None), strict=True):
            if glued := re.fullmatch(r"(-[nr])(\d+)", word):
                self._options.append((glued[1], glued[2]))
            elif word.startswith("-"):
                flag, has_value, value = word.partition("=")
                self._options.append((flag.replace("_", "-"), value if has_value else after))

    def has(self, *flags: str) -> bool:
        return any(flag in flags for flag, _ in self._options)

    def begins(self, prefix: str) -> bool:
        """Return whether a flag begins with `prefix`. vLLM takes parts of a config as `--flag.part`."""
        return any(flag.startswith(prefix) for flag, _ in self._options)

    def values(self, *flags: str) -> list[str]:
        """Return each value of these flags."""
        found = []
        for flag, value in self._options:
            if flag in flags:
                if value is None:
                    raise ConfigError(f"the server's command ends with {flag}, without a value.")
                found.append(value)
        return found

    def agree(self, flags: tuple[str, ...], wanted: str | None) -> bool:
        """Return whether one of these flags is given. Its value must be the wanted one, if there is one."""
        values = self.values(*flags)
        for value in values:
            if wanted is not None and value != wanted:
                raise ConfigError(
                    f"the server's command says {flags[0]} {value}, but the agent was given {wanted} as the address "
                    "at which its nodes meet. Give only one of them, or the same in both."
                )
        return bool(values)


def _sglang_address(options: _Options, dist_init: str | None) -> list[str]:
    if dist_init is not None:
        _host_and_port(dist_init)
    if options.agree(_ADDRESS, dist_init):
        return []
    return [_ADDRESS[0], dist_init or _missing_address("--dist-init-addr HOST:PORT")]


def _vllm_address(options: _Options, dist_init: str | None) -> list[str]:
    host, port = (None, None) if dist_init is None else _host_and_port(dist_init)
    has_host, has_port = options.agree(("--master-addr",), host), options.agree(("--master-port",), port)
    missing = [] if has_host else ["--master-addr", host or _missing_address("--master-addr HOST --master-port PORT")]
    return missing if has_port or port is None else [*missing, "--master-port", port]


def _missing_address(flags: str) -> str:
    raise ConfigError(
        "this replica has more than one node, but no address at which its servers meet. Give the agent the address of "
        f"node rank 0 as HOST:PORT, the same on every node, or put {flags} into the server's command."
    )


def _host_and_port(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"the address at which the nodes meet is HOST:PORT, e.g. 10.0.0.1:29500, not {address!r}.")
    return host, port
