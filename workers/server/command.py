"""Completes the command line of a server that an agent launches: options for the node's place, for profiling, and for a
running server whose weights it copies.

Pure. The user's own options are never changed. One that contradicts the agent's place is found when the server is up,
by what it reports of itself.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from schemas.commands import ProfilePlan
from schemas.errors import ConfigError
from schemas.identity import Identity
from schemas.selection import profile_skip_reason

Kind = Literal["sglang", "vllm"]

_SERVES: Final = {
    *("--headless", "--data-parallel-hybrid-lb", "-dph", "--data-parallel-external-lb", "-dpe"),
    *("--data-parallel-rank", "-dpn"),
}
"""Beside one of these `--headless` is not added: with the others vLLM has an API server on every node."""

PEER_PORTS: Final = 20_000
"""At a server whose weights are copied: the first for the ranks of replica 0. Each replica has eight."""
_PEER: Final = "--remote-instance-weight-loader-"
_SIZES: Final = {
    "tp_size": ("--tp-size", "--tensor-parallel-size", "--tp"),
    "pp_size": ("--pp-size", "--pipeline-parallel-size"),
    "dp_size": ("--dp-size", "--data-parallel-size", "--dp"),
    "nnodes": (),
}
"""What SGLang says of its size, and the options for it; its agent knows the number of nodes."""


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


def lacks_peer(kind: Kind, command: Sequence[str], identity: Identity) -> bool:
    """Return whether a server is to copy its weights from a running one that its command does not name.

    SGLang reads its checkpoint then (sglang/srt/arg_groups/model_path_hook.py, 0.5.23). ModelExpress needs no name.
    """
    copies = kind == "sglang" and identity.nnodes == 1 and _value(command, "--load-format") == "remote_instance"
    named = f"{_PEER}seed-instance-ip" in _flags(command) or _value(command, f"{_PEER}backend") == "modelexpress"
    return copies and not named


def with_peer(command: Sequence[str], identity: Identity, url: str, info: Mapping[str, object]) -> tuple[str, ...]:
    """Return the command with the running server whose weights this one is to copy, rank by rank.

    `info` is what the server at `url` says of itself. Raises ConfigError if nothing can be copied from it: to try would
    end its scheduler, or have both wait.
    """
    place, own = urlsplit(url), {name: _value(command, *options) or "1" for name, options in _SIZES.items()}
    theirs = {name: str(info.get(name)) for name in _SIZES}
    if place.scheme != "http" or not own == theirs == {**dict.fromkeys(_SIZES, "1"), "tp_size": own["tp_size"]}:
        has, would = (", ".join(f"{name} {size}" for name, size in sizes.items()) for sizes in (theirs, own))
        raise ConfigError(
            "weights are copied over http, between servers with the same --tp and no --pp, --dp or --nnodes. "
            f"{url} has {has}, this one {would}"
        )
    options = {"seed-instance-ip": place.hostname or "", "seed-instance-service-port": str(place.port or 80)}
    if f"{_PEER}send-weights-group-ports" not in _flags(command):
        first = PEER_PORTS + 8 * (identity.replica % 1000)
        options["send-weights-group-ports"] = json.dumps([*range(first, first + int(own["tp_size"]))])
    return (*command, *(word for name, value in options.items() for word in (f"{_PEER}{name}", value)))


def _value(command: Sequence[str], *names: str) -> str | None:
    """The value of an option with one of these names; None if it is not given."""
    words = [part for word in command for part in (word.split("=", 1) if word.startswith("--") else [word])]
    return next((value for name, value in pairwise(words) if name.replace("_", "-") in names), None)


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
