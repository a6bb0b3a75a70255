"""`rolloutctl agent`: one agent beside one node of one replica, until it is told to end."""

import logging
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import anyio
import click
from anyio import CancelScope
from msgspec.structs import replace

from schemas.commands import ProfilePlan
from schemas.errors import ConfigError, RolloutctlError
from schemas.identity import Identity, RolloutMode
from schemas.profiler.config import ProfilerConfig
from workers.agent import Agent
from workers.engine import Engine
from workers.traces.node import NodeTraces

if TYPE_CHECKING:
    from workers.router import Router

logger = logging.getLogger("rolloutctl.agent")


class EngineOptions(TypedDict):
    """Those options that say which engine, and how it is reached."""

    kind: str
    url: str | None
    api_key_file: Path | None
    launch: bool
    dist_init: str | None
    launch_log: Path | None
    up_within: float
    router: str | None
    worker_url: str | None
    serve: str | None
    seed: int
    checkpoints: Path
    traces: Path | None
    finish_hook: str | None
    profiler: Path | None
    command: tuple[str, ...]


ENGINES = ("tiny", "sglang", "vllm")
"""Engines that an agent can drive from a process of its own."""


def _state_home() -> str:
    return str(Path(click.get_app_dir("rolloutctl", force_posix=False)) / "state")


@click.command(short_help="Run an agent beside an engine.")
@click.option("--bus", envvar="ROLLOUTCTL_BUS", required=True, help="Address of the trainer's bus, tcp://HOST:PORT.")
@click.option("--replica", type=click.IntRange(0), required=True, help="Index of the replica in the job.")
@click.option("--node-rank", type=click.IntRange(0), default=0, show_default=True, help="Index of this node in it.")
@click.option("--nnodes", type=click.IntRange(1), default=1, show_default=True, help="Nodes of the replica.")
@click.option("--gpus-per-node", type=click.IntRange(1), default=1, show_default=True, help="For global ranks.")
@click.option("--mode", type=click.Choice([one.value for one in RolloutMode]), default="hybrid", show_default=True)
@click.option("--engine", "kind", type=click.Choice(ENGINES), required=True, help="What the agent commands.")
@click.option("--url", help="sglang, vllm: where the server of this node answers, http://HOST:PORT.")
@click.option(
    "--api-key-file", type=click.Path(path_type=Path), help="Holds its key; else ROLLOUTCTL_ENGINE_API_KEY[_FILE]."
)
@click.option("--launch", is_flag=True, help="Start the server that follows `--`, restart it, end it with this agent.")
@click.option("--dist-init", help="With --launch: HOST:PORT at which the servers of a replica of several nodes meet.")
@click.option("--launch-log", type=click.Path(path_type=Path), help="Output of the server.  [default: in --state-dir]")
@click.option("--up-within", type=click.FloatRange(1), default=1800.0, show_default=True, help="Seconds for a launch.")
@click.option("--router", help="SGLang router that the server is put into while the replica may serve.")
@click.option("--worker-url", help="With --router: the server as the router reaches it.  [default: --url]")
@click.option("--serve", help="tiny: where clients find its front end, e.g. ipc:///tmp/engine-0.")
@click.option("--seed", default=0, show_default=True, help="tiny: of the weights that it starts with.")
@click.option("--checkpoints", type=click.Path(path_type=Path), default=".", help="Root of paths in weight syncs.")
@click.option("--traces", type=click.Path(path_type=Path), help="Root below which traces are put.  [default: traces]")
@click.option("--finish-hook", help="Command for /bin/sh after the last profiled step, e.g. an upload.")
@click.option(
    "--profiler",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The trainer's profiler configuration, verl's or ours: gives both, and what a launched vLLM must record.",
)
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=_state_home,
    help="Where the journal lies, on a disk of this machine.  [default: the user's state folder]",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def agent(
    bus: str,
    replica: int,
    node_rank: int,
    nnodes: int,
    gpus_per_node: int,
    mode: str,
    state_dir: Path,
    **engine: Unpack[EngineOptions],
) -> None:
    """Run the agent of one node. It dials the bus, follows every command, and answers.

    It ends in good order on SIGTERM or Ctrl-C: the engine call under way is awaited and the bus is told. It may be
    killed and started again at any time: it reads its journal and its engine, and goes on.

    \b
    Beside a server that runs:
      rolloutctl agent --bus tcp://trainer:5555 --replica 0 --engine vllm --url http://127.0.0.1:8000
    With one that it launches:
      rolloutctl agent --bus tcp://trainer:5555 --replica 0 --engine sglang --url http://127.0.0.1:30000 \\
        --launch -- python -m sglang.launch_server --model-path /models/m --port 30000
    """
    try:
        place = Identity(
            replica=replica, node_rank=node_rank, nnodes=nnodes, gpus_per_node=gpus_per_node, mode=RolloutMode(mode)
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    profiler = _profiler(engine)
    left = NodeTraces(Path(profiler.save_path), place, profiler.finish_hook_cmd)
    driven = _engine(place, engine, Path(profiler.save_path))
    if engine["launch"]:
        driven = _launched(place, state_dir, engine, driven, profiler)
    uvloop = find_spec("uvloop") is not None
    beside = _router(engine)
    interrupted = anyio.run(_serve, bus, place, driven, state_dir, left, beside, backend_options={"use_uvloop": uvloop})
    if interrupted:
        raise click.Abort


async def _serve(
    bus: str, place: Identity, engine: Engine, state_dir: Path, traces: NodeTraces, router: "Router | None"
) -> bool:
    """Returns whether it was Ctrl-C that ended it."""
    signals: list[signal.Signals] = []
    failure: RolloutctlError | None = None
    async with anyio.create_task_group() as tasks:
        await tasks.start(_end_on_signal, tasks.cancel_scope, signals)
        try:
            async with Agent(bus=bus, identity=place, engine=engine, state_dir=state_dir, traces=traces) as running:
                logger.info("agent %s is up and dials %s", place.agent, bus)
                if router is not None:
                    tasks.start_soon(router.follow, running)
                await running.run()
        except RolloutctlError as error:  # kept out of the group, which would wrap it
            failure = error
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return signal.SIGINT in signals


async def _end_on_signal(
    scope: CancelScope, seen: list[signal.Signals], *, task_status: anyio.abc.TaskStatus[None]
) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for one in signals:
            seen.append(one)
            logger.info("%s: ending in good order", one.name)
            scope.cancel()


def _profiler(options: EngineOptions) -> ProfilerConfig:
    """What this node has to know of profiling: where traces go, the hook, and what the engine is to record."""
    config = ProfilerConfig(plan=ProfilePlan(enabled=False))
    if options["profiler"] is not None:
        from schemas.profiler.files import read

        config, remarks = read(options["profiler"])
        for remark in remarks:
            logger.warning("%s: %s", options["profiler"], remark)
    traces, hook = options["traces"], options["finish_hook"]
    return replace(
        config,
        save_path=str(traces or config.save_path or "traces"),
        finish_hook_cmd=config.finish_hook_cmd if hook is None else hook,
    )


def _engine(place: Identity, options: EngineOptions, traces: Path) -> Engine:
    """The engine that the options name; one that is launched is built on top of it."""
    if options["command"] and not options["launch"]:
        raise ConfigError(f"what is {' '.join(options['command'])!r} for? A server's command follows `--launch --`.")
    checkpoints = options["checkpoints"]
    if options["kind"] == "tiny":
        from workers.engines.tiny.engine import TinyEngine

        serve, seed = options["serve"], options["seed"]
        return TinyEngine(place, checkpoints=checkpoints, traces=traces, serve=serve, seed=seed)
    from workers.engines.http import api_key
    from workers.engines.sglang.engine import SGLangEngine
    from workers.engines.sglang.server import SGLangServer
    from workers.engines.vllm.engine import VLLMEngine
    from workers.engines.vllm.server import VLLMServer

    url, key = options["url"], api_key(options["api_key_file"])
    if url is None and place.node_rank == 0:
        raise ConfigError(f"--engine {options['kind']} on node rank 0 needs --url http://HOST:PORT of its server.")
    if options["kind"] == "vllm":
        return VLLMEngine(place, VLLMServer(url, key) if url else None, checkpoints=checkpoints, traces=traces)
    return SGLangEngine(place, SGLangServer(url, key) if url else None, checkpoints=checkpoints, traces=traces)


def _launched(
    place: Identity, state_dir: Path, options: EngineOptions, engine: Engine, profiler: ProfilerConfig
) -> Engine:
    from workers.server.command import Kind, profiled_command, server_command
    from workers.server.launch import LaunchedEngine, ServerProcess

    kind, command = options["kind"], options["command"]
    if kind == "tiny" or not command:
        raise ConfigError("--launch takes a server's command after `--`, and --engine sglang or vllm.")
    log = options["launch_log"] or state_dir / f"server-{place.agent}.log"
    server_kind: Kind = "vllm" if kind == "vllm" else "sglang"
    full = server_command(server_kind, command, place, options["dist_init"])
    full = profiled_command(server_kind, full, place, profiler.plan, Path(profiler.save_path))
    server = ServerProcess(full, log=log, name=f"{kind} server of agent {place.agent}")
    return LaunchedEngine(engine, server, up_within_s=options["up_within"])


def _router(options: EngineOptions) -> "Router | None":
    url, worker = options["router"], options["worker_url"] or options["url"]
    if url is None:
        return None
    if worker is None:
        raise ConfigError("--router needs --url, the server that it is to send requests to.")
    from workers.engines.http import api_key
    from workers.router import KEY_VARIABLE, Router

    return Router(url, worker, key=api_key(variable=KEY_VARIABLE), worker_key=api_key(options["api_key_file"]))
