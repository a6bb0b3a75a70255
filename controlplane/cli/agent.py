"""`rolloutctl agent`: runs one agent beside one node of a replica until it is stopped."""

import signal
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import click
from anyio import CancelScope
from click.core import ParameterSource
from msgspec.structs import replace

from schemas.commands import ProfilePlan
from schemas.config import TIMEOUT_MAX_S, AgentConfig, milliseconds
from schemas.errors import ConfigError, RolloutctlError
from schemas.identity import GPUS_PER_NODE_MAX, NODES_MAX, REPLICAS_MAX, Identity, RolloutMode
from schemas.logs import logger_of
from schemas.profiler.config import ProfilerConfig, read_config
from workers.agent import Agent
from workers.engine import Engine, EngineView
from workers.engines.factory import EngineOptions, make_engine, view_engine
from workers.traces.node import NodeTraces

if TYPE_CHECKING:
    from workers.router import Router

logger = logger_of("agent")


_PATH = click.Path(path_type=Path)
MODES = tuple(mode.value for mode in RolloutMode if mode is not RolloutMode.OBSERVED)
OBSERVING = frozenset(
    {
        *("bus", "keys", "replica", "node_rank", "nnodes", "gpus_per_node", "observe", "kind", "url", "api_key_file"),
        *("state_dir", "wedged_after"),
    }
)
"""Parameters that go with `--observe`. All others are about commands."""


def _state_home() -> str:
    return str(Path(click.get_app_dir("rolloutctl", force_posix=False)) / "state")


@click.command(short_help="Run an agent beside an engine.")
@click.option("--bus", envvar="ROLLOUTCTL_BUS", required=True, help="Address of the trainer's bus, tcp://HOST:PORT.")
@click.option("--keys", type=_PATH, help="File with this agent's key.  [default: ROLLOUTCTL_KEY_FILE]")
@click.option("--replica", type=click.IntRange(0, REPLICAS_MAX - 1), required=True, help="Its index in the job.")
@click.option(
    "--node-rank", type=click.IntRange(0, NODES_MAX - 1), default=0, show_default=True, help="Index of the node."
)
@click.option("--nnodes", type=click.IntRange(1, NODES_MAX), default=1, show_default=True, help="Nodes of the replica.")
@click.option(
    "--gpus-per-node", type=click.IntRange(1, GPUS_PER_NODE_MAX), default=1, show_default=True, help="On each node."
)
@click.option("--mode", type=click.Choice(MODES), default="hybrid", show_default=True)
@click.option("--observe", is_flag=True, help="Only observe an engine that somebody else commands; change nothing.")
@click.option(
    "--engine", "kind", required=True, help="tiny, sglang, vllm, an installed adapter's name, or MODULE:CLASS of one."
)
@click.option(
    "--url",
    help="Address of this node's engine server, http://HOST:PORT; with --observe, also ipc://PATH of a tiny engine.",
)
@click.option("--api-key-file", type=_PATH, help="File with its API key.  [default: ROLLOUTCTL_ENGINE_API_KEY[_FILE]]")
@click.option("--launch", is_flag=True, help="Start, restart and stop the server whose command follows `--`.")
@click.option("--dist-init", help="With --launch: HOST:PORT at which the servers of a multi-node replica meet.")
@click.option("--launch-log", type=_PATH, help="The server's output.  [default: in --state-dir]")
@click.option(
    "--up-within",
    type=click.FloatRange(1, TIMEOUT_MAX_S),
    default=1800.0,
    show_default=True,
    help="Seconds for a launch.",
)
@click.option("--router", help="SGLang router in which the server is registered while the replica may serve.")
@click.option("--worker-url", help="With --router: address of the server for the router.  [default: --url]")
@click.option("--serve", help="tiny: address for its clients, e.g. ipc:///tmp/engine-0.")
@click.option("--seed", default=0, show_default=True, help="tiny: seed of its initial weights.")
@click.option("--checkpoints", type=_PATH, default=".", help="Root of the paths in weight syncs.")
@click.option("--traces", type=_PATH, help="Folder for traces.  [default: traces]")
@click.option("--finish-hook", help="Command that /bin/sh runs after the last profiled step, e.g. an upload.")
@click.option(
    "--profiler",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The trainer's profiler configuration, verl's or ours: sets --traces, --finish-hook and a launched vLLM.",
)
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=_state_home,
    help="Folder of the journal, on a local disk.  [default: the user's state folder]",
)
@click.option(
    "--on-lost-bus",
    type=click.Choice(["serve", "pause"]),
    default="serve",
    show_default=True,
    help="What the engine does while the bus is out of reach for longer than the lease.",
)
@click.option(
    "--memory",
    type=click.Choice(["agent", "trainer"]),
    default="agent",
    show_default=True,
    help="Who releases the engine's memory: the agent, on command, or the trainer's own data plane.",
)
@click.option(
    "--wedged-after",
    type=click.IntRange(1, TIMEOUT_MAX_S),
    default=AgentConfig().wedged_after_s,
    show_default=True,
    help="Seconds without a token, with requests running, after which the replica is not ready.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def agent(
    bus: str,
    keys: Path | None,
    replica: int,
    node_rank: int,
    nnodes: int,
    gpus_per_node: int,
    mode: str,
    observe: bool,
    state_dir: Path,
    **options: Any,
) -> None:
    """Run the agent of one node. It connects to the bus, executes every command, and answers.

    On SIGTERM or Ctrl-C it waits for the engine call in flight, tells the bus that it leaves, and exits. It may also be
    killed and restarted at any time: it resumes from its journal and the state of its engine.

    \b
    Beside a running server:
      rolloutctl agent --bus tcp://trainer:5555 --replica 0 --engine vllm --url http://127.0.0.1:8000
    Beside a server that somebody else commands, which it never changes (`rolloutctl observe` is its bus):
      rolloutctl agent --observe --bus tcp://host:5555 --replica 0 --engine sglang --url http://127.0.0.1:30000
    With a server that it launches:
      rolloutctl agent --bus tcp://trainer:5555 --replica 0 --engine sglang --url http://127.0.0.1:30000 \\
        --launch -- python -m sglang.launch_server --model-path /models/m --port 30000
    """
    try:
        identity = Identity(
            replica=replica,
            node_rank=node_rank,
            nnodes=nnodes,
            gpus_per_node=gpus_per_node,
            mode=RolloutMode.OBSERVED if observe else RolloutMode(mode),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    engine: Engine | EngineView
    traces, router = None, None
    if observe:
        _require_observing(click.get_current_context())
        engine = view_engine(options["kind"], _engine_options(identity, options, Path()))
    else:
        profiler = _profiler(options)
        traces = NodeTraces(Path(profiler.save_path), identity, profiler.finish_hook_cmd)
        engine = _engine(identity, options, Path(profiler.save_path))
        if options["launch"]:
            engine = _launched(identity, state_dir, options, engine, profiler)
        router = _router(options)
    config = AgentConfig(
        on_lost_bus=options["on_lost_bus"], memory=options["memory"], wedged_after_s=options["wedged_after"]
    )
    node = Agent(
        bus=bus, identity=identity, engine=engine, state_dir=state_dir, traces=traces, config=config, keys=keys
    )
    uvloop = find_spec("uvloop") is not None
    interrupted = anyio.run(_serve, node, bus, router, backend_options={"use_uvloop": uvloop})
    if interrupted:
        raise click.Abort


async def _serve(node: Agent, bus: str, router: "Router | None") -> bool:
    """Return whether Ctrl-C ended it."""
    signals: list[signal.Signals] = []
    failure: RolloutctlError | None = None
    async with anyio.create_task_group() as tasks:
        await tasks.start(_end_on_signal, tasks.cancel_scope, signals)
        try:
            async with node as running:
                logger.info("agent %s is up and connects to %s", node.identity.agent, bus)
                if router is not None:
                    tasks.start_soon(router.follow, running)
                await running.run()
        except RolloutctlError as error:  # raised below: the task group would wrap it
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
        async for received in signals:
            seen.append(received)
            logger.info("%s: shutting down", received.name)
            scope.cancel()


def _profiler(options: dict[str, Any]) -> ProfilerConfig:
    """What this node needs of the profiler configuration: folder of traces, hook, and what the engine records."""
    config = ProfilerConfig(plan=ProfilePlan(enabled=False))
    if options["profiler"] is not None:
        config, warnings = read_config(options["profiler"])
        for warning in warnings:
            logger.warning("%s: %s", options["profiler"], warning)
    traces, hook = options["traces"], options["finish_hook"]
    return replace(
        config,
        save_path=str(traces or config.save_path or "traces"),
        finish_hook_cmd=config.finish_hook_cmd if hook is None else hook,
    )


def _engine(identity: Identity, options: dict[str, Any], traces: Path) -> Engine:
    """The engine that the options name, without its launch."""
    if options["command"] and not options["launch"]:
        raise ConfigError(f"unexpected {' '.join(options['command'])!r}: a server's command follows `--launch --`.")
    return make_engine(options["kind"], _engine_options(identity, options, traces))


def _engine_options(identity: Identity, options: dict[str, Any], traces: Path) -> EngineOptions:
    return EngineOptions(
        identity=identity,
        checkpoints=options["checkpoints"],
        traces=traces,
        url=options["url"],
        key_file=options["api_key_file"],
        serve=options["serve"],
        seed=options["seed"],
    )


def _require_observing(context: click.Context) -> None:
    """Refuse options that are about commands."""
    for option in context.command.params:
        given = context.get_parameter_source(option.name or "")
        if option.name not in OBSERVING and given is not None and given is not ParameterSource.DEFAULT:
            named = option.opts[0] if isinstance(option, click.Option) else "a server's command"
            raise ConfigError(f"--observe does not go with {named}: an observing agent changes nothing.")


def _launched(
    identity: Identity, state_dir: Path, options: dict[str, Any], engine: Engine, profiler: ProfilerConfig
) -> Engine:
    from workers.server.command import profiled_command, server_command
    from workers.server.launch import LaunchedEngine, ServerProcess

    kind, command = options["kind"], options["command"]
    if kind not in ("sglang", "vllm") or not command:
        raise ConfigError("--launch takes a server's command after `--`, and needs --engine sglang or vllm.")
    log = options["launch_log"] or state_dir / f"server-{identity.agent}.log"
    full = server_command(kind, command, identity, options["dist_init"])
    full = profiled_command(kind, full, identity, profiler.plan, Path(profiler.save_path))
    server = ServerProcess(full, log=log, name=f"{kind} server of agent {identity.agent}")
    return LaunchedEngine(engine, server, up_within_s=milliseconds(options["up_within"]) / 1000)


def _router(options: dict[str, Any]) -> "Router | None":
    url, worker = options["router"], options["worker_url"] or options["url"]
    if url is None:
        return None
    if worker is None:
        raise ConfigError("--router needs --url, the server that gets the requests.")
    from workers.engines.http import api_key
    from workers.router import KEY_VARIABLE, Router

    return Router(url, worker, key=api_key(variable=KEY_VARIABLE), worker_key=api_key(options["api_key_file"]))
