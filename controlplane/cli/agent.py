"""`rolloutctl agent`: runs one agent beside one node of a replica until it is stopped."""

import os
import signal
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

import anyio
import click
from click.core import ParameterSource
from msgspec.structs import replace

from controlplane.cli import interrupt
from controlplane.cli.command_line import BUS_HELP, FILE, FOLDER, PATH, Command, api_key_file, metrics_port
from schemas.commands import ProfilePlan
from schemas.config import TIMEOUT_MAX_S, AgentConfig, milliseconds
from schemas.errors import ConfigError, IdentityTaken, RolloutctlError
from schemas.fault_plan import read_plan
from schemas.identity import GPUS_PER_NODE_MAX, NODES_MAX, REPLICAS_MAX, Identity, RolloutMode
from schemas.logs import logger_of
from schemas.profiler.config import ProfilerConfig, read_config
from schemas.storage.atomic_write import atomic_write
from schemas.transport.addresses import is_file
from schemas.transport.keys import KeySource
from schemas.transport.sockets import stays_here
from schemas.wire import PeerFound
from workers.agent import Agent
from workers.engine import EngineView
from workers.engines.factory import EngineOptions, make_engine, make_observer
from workers.faults import FaultInjector
from workers.stacks import StackDumps
from workers.state_folder import state_folder
from workers.traces.node import NodeTraces

if TYPE_CHECKING:
    from workers.router import RouterRegistration
    from workers.server.launch import LaunchedEngine

logger = logger_of("agent")

AUTO: Final = "auto"
MODES = tuple(mode.value for mode in RolloutMode if mode is not RolloutMode.OBSERVED)
OBSERVING = frozenset(
    {
        *("bus", "keys", "replica", "node_rank", "nnodes", "gpus_per_node", "observe", "engine", "url", "api_key_file"),
        *("state_dir", "wedged_after", "metrics_port", "drain", "rejoin"),
    }
)
"""Parameters that go with `--observe`. All others are about commands."""


SECTIONS = {
    "Place and bus": ("bus", "keys", "replica", "node_rank", "nnodes", "gpus_per_node", "mode", "rejoin", "observe"),
    "Engine": (
        *("engine", "url", "api_key_file", "checkpoints", "digests", "launch", "router"),
        *("dist_init", "launch_log", "up_within", "worker_url", "memory", "on_lost_bus", "wedged_after", "serve"),
        "seed",
    ),
    "This process": (
        *("drain", "state_dir", "profiler", "traces", "finish_hook", "dump_stacks"),
        *("metrics_port", "faults"),
    ),
}
RARE = frozenset(
    {
        *("memory", "on_lost_bus", "wedged_after", "serve", "seed", "dist_init", "launch_log", "up_within"),
        *("worker_url", "finish_hook", "dump_stacks", "metrics_port", "mode", "traces"),
        *("api_key_file", "profiler", "digests", "faults", "drain"),
    }
)


class _ReplicaOption(click.IntRange):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the index, or `auto`."""
        return value if value == AUTO else super().convert(value, param, ctx)


@click.command(
    cls=Command,
    sections=SECTIONS,
    rare=RARE,
    short_help="Run an agent beside an engine.",
    context_settings={"auto_envvar_prefix": "ROLLOUTCTL_AGENT"},
)
@click.option("--bus", envvar="ROLLOUTCTL_BUS", required=True, help=BUS_HELP)
@click.option("--key", "keys", type=PATH, envvar="ROLLOUTCTL_KEY_FILE", help="File with this agent's key.")
@click.option(
    "--replica",
    metavar="N|auto",
    type=_ReplicaOption(0, REPLICAS_MAX - 1),
    required=True,
    help="Index of the replica in the job; auto: one that is free, see docs/fleet.md.",
)
@click.option(
    "--node-rank",
    metavar="N",
    type=click.IntRange(0, NODES_MAX - 1),
    default=0,
    help="Index of this node in its replica.",
)
@click.option(
    "--nnodes", metavar="N", type=click.IntRange(1, NODES_MAX), default=1, help="Number of nodes of the replica."
)
@click.option(
    "--gpus-per-node",
    metavar="N",
    type=click.IntRange(1, GPUS_PER_NODE_MAX),
    default=1,
    help="GPUs of the replica on each node.",
)
@click.option(
    "--mode",
    type=click.Choice(MODES),
    default="hybrid",
    help="hybrid: shares its GPUs with the trainer; standalone: has its own; colocated: is never synced, as a judge.",
)
@click.option("--rejoin", is_flag=True, help="Take up the place again if it was retired, as a new replica.")
@click.option("--observe", is_flag=True, help="Only observe an engine that another program commands; change nothing.")
@click.option(
    "--engine", required=True, help="tiny, sglang, vllm, an installed backend's name, or MODULE:CLASS of one."
)
@click.option("--url", help="Address of this node's engine server, http://HOST:PORT.")
@api_key_file
@click.option("--launch", is_flag=True, help="Start, restart and stop the server whose command follows `--`.")
@click.option("--dist-init", help="With --launch: HOST:PORT at which the servers of a multi-node replica meet.")
@click.option("--launch-log", type=PATH, help="File for the server's output.  [default: in --state-dir]")
@click.option(
    "--up-within",
    type=click.FloatRange(1, TIMEOUT_MAX_S),
    default=1800.0,
    help="Seconds that a launched server may take to start.",
)
@click.option("--router", help="SGLang router in which the server is registered while the replica may serve.")
@click.option("--worker-url", help="Address of the server for its clients and the router.  [default: --url]")
@click.option("--serve", help="tiny: address for its clients, e.g. ipc:///tmp/engine-0.")
@click.option("--seed", default=0, help="tiny: seed of its initial weights.")
@click.option("--checkpoints", type=PATH, default=".", help="Root of the paths in weight syncs.")
@click.option(
    "--digests",
    type=click.Choice(["always", "announced", "never"]),
    default="announced",
    help="After which loads to compare a digest of the engine's weights: all, those of syncs with a digest, none.",
)
@click.option("--traces", type=PATH, help="Folder for traces.  [default: traces]")
@click.option("--finish-hook", help="Command that /bin/sh runs after the last profiled step, e.g. an upload.")
@click.option(
    "--profiler",
    type=FILE,
    help="The trainer's profiler configuration, verl's or ours: sets --traces, --finish-hook and a launched vLLM.",
)
@click.option(
    "--state-dir",
    type=FOLDER,
    help="Folder of the journal, on a local disk.  [default: one for this bus in ~/.local/state/rolloutctl]",
)
@click.option(
    "--on-lost-bus",
    type=click.Choice(["serve", "pause"]),
    default="serve",
    help="What the engine does while the bus is out of reach for longer than the lease.",
)
@click.option(
    "--memory",
    type=click.Choice(["agent", "trainer"]),
    default="agent",
    help="Who releases the engine's memory: the agent, on command, or the trainer's own data plane.",
)
@click.option(
    "--wedged-after",
    type=click.IntRange(1, TIMEOUT_MAX_S),
    default=AgentConfig().wedged_after_s,
    help="Seconds without a token, with requests running, after which the replica is not ready.",
)
@click.option(
    "--dump-stacks",
    is_flag=True,
    help="Shortly before an engine call passes its deadline, write down where the engine hangs (needs py-spy).",
)
@click.option(
    "--faults", type=FILE, help="Staging only: a game day's plan (TOML) of what goes wrong with this agent on purpose."
)
@click.option(
    "--drain",
    metavar="SECONDS",
    type=click.FloatRange(0, TIMEOUT_MAX_S / 2),
    help="At SIGTERM, drain the replica: its requests may end for so long, then it is retired.  [default: end at once]",
)
@metrics_port
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def agent(
    bus: str,
    keys: Path | None,
    gpus_per_node: int,
    mode: str,
    observe: bool,
    state_dir: Path | None,
    faults: Path | None,
    drain: float | None,
    rejoin: bool,
    **options: Any,
) -> None:
    """Run the agent of one node until it is stopped. It connects to the bus, executes every command, and answers.

    It may be killed and restarted at any time: it resumes from its journal and the state of its engine.

    \b
    Beside a running server:
      rolloutctl agent --bus tcp://trainer:5555 --replica 0 \\
        --engine vllm --url http://127.0.0.1:8000
    With a server that it launches:
      rolloutctl agent --bus tcp://trainer:5555 --replica 0 \\
        --engine sglang --url http://127.0.0.1:30000 \\
        --launch -- python -m sglang.launch_server --model-path /m --port 30000
    """
    assigned = _assigned(state_dir, options, bus, keys) if options["replica"] == AUTO else None
    state_dir = assigned.parent if assigned is not None else state_dir
    identity = _identity(options, gpus_per_node, RolloutMode.OBSERVED if observe else RolloutMode(mode))
    traces, stacks, router, server_pid = None, None, None, None
    if observe:
        _require_observing(click.get_current_context())
        engine: EngineView = make_observer(options["engine"], _engine_options(identity, options, Path()))
    else:
        profiler = _profiler(options)
        traces = NodeTraces(Path(profiler.save_path), identity, profiler.finish_hook_cmd)
        engine_options = _engine_options(identity, options, Path(profiler.save_path))
        if options["launch"]:
            state_dir = state_dir or state_folder(bus)
            engine = launched = _launched(engine_options, state_dir, options, profiler.plan, bus, keys)
            server_pid = launched.server_pid
        else:
            engine = make_engine(options["engine"], engine_options)
        if options["dump_stacks"]:
            stacks = StackDumps(foreign_server=options["url"] is not None and not options["launch"])
        router = _router(options)
    config = AgentConfig(
        on_lost_bus=options["on_lost_bus"],
        memory=options["memory"],
        wedged_after_s=options["wedged_after"],
        rejoin=rejoin or assigned is not None,
    )
    node = Agent(
        bus=bus,
        identity=identity,
        engine=engine,
        state_dir=state_dir,
        traces=traces,
        stacks=stacks,
        config=config,
        keys=keys,
        faults=FaultInjector(read_plan(faults), identity, server_pid) if faults is not None else None,
        endpoint=_endpoint(options, bus),
    )
    ends = (signal.SIGTERM,) if drain is None else ()
    try:
        interrupt.run(_serve, node, bus, router, options["metrics_port"], drain, ends=ends)
    except IdentityTaken:
        if assigned is not None:
            assigned.unlink(missing_ok=True)  # started again, it is assigned another one
        raise


def _assigned(state_dir: Path | None, options: dict[str, Any], bus: str, keys: Path | None) -> Path:
    """Set the replica to the one that the agent was assigned. Return the file that names it, in a folder of its engine.

    It asks the bus the first time only: an agent that starts again while there is no bus has its engine to look after.
    """
    from controlplane.bus.operator import assigned_replica

    if options["nnodes"] > 1:
        raise ConfigError("--replica auto is for replicas of one node: give all nodes of a larger one the same index.")
    engine = options["url"] or options["serve"] or options["engine"]
    file = (state_dir or state_folder(bus)) / f"auto-{quote(engine, safe='')}" / "replica"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not file.exists():
            replica = interrupt.run(assigned_replica, bus, KeySource.find(keys))
            with atomic_write(file, force=True) as out:
                out.write(str(replica).encode())
        options["replica"] = int(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file} can't be used ({error.strerror}): name another --state-dir") from error
    except ValueError:
        raise ConfigError(f"{file} names no replica: delete it, and the bus assigns one anew") from None
    return file


def _identity(options: dict[str, Any], gpus_per_node: int, mode: RolloutMode) -> Identity:
    place = {name: options[name] for name in ("replica", "node_rank", "nnodes")}
    try:
        return Identity(**place, gpus_per_node=gpus_per_node, mode=mode)
    except ValueError as error:
        raise ConfigError(str(error)) from None


async def _serve(
    node: Agent, bus: str, router: "RouterRegistration | None", metrics: str | None, drain: float | None
) -> None:
    up = anyio.Event()
    async with anyio.create_task_group() as ending:
        if drain is not None:
            await ending.start(_drain_at_sigterm, node, up, drain, ending.cancel_scope)
        async with node as running, anyio.create_task_group() as tasks:
            logger.info("agent %s is up and connects to %s", node.identity.agent, bus)
            if router is not None:
                tasks.start_soon(router.follow, running)
            if metrics is not None:
                _serve_metrics(running, metrics)
            up.set()
            await running.run()
            tasks.cancel_scope.cancel()
        ending.cancel_scope.cancel()


async def _drain_at_sigterm(
    node: Agent,
    up: anyio.Event,
    grace_s: float,
    scope: anyio.CancelScope,
    *,
    task_status: anyio.abc.TaskStatus[None],
) -> None:
    """End the agent once its replica is drained, or could not be in time. A second SIGTERM ends it at once."""

    async def drain() -> None:
        await node.drain(grace_s)
        logger.warning("no bus has retired agent %s: reports name it until it is back, or retired", node.identity.agent)
        tasks.cancel_scope.cancel()

    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        task_status.started()
        await anext(signals)
        logger.info("SIGTERM: replica %d leaves the fleet", node.identity.replica)
        async with anyio.create_task_group() as tasks:
            if up.is_set():
                tasks.start_soon(drain)
                await anext(signals)
            tasks.cancel_scope.cancel()
    scope.cancel()


def _serve_metrics(node: Agent, address: str) -> None:
    """In a thread that ends with the process."""
    from schemas.transport.exposition import serve_metrics
    from workers.exporter import AgentCollector

    collector = AgentCollector(node)
    served, _ = serve_metrics(collector, address, collector.ready)
    logger.info("agent %s: metrics at %s", node.identity.agent, served)


def _require_trusted(file: Path) -> None:
    """Raise ConfigError if any user of the machine may have written a file that names commands to run."""
    mode = os.stat(file).st_mode
    if stat.S_ISREG(mode) and mode & stat.S_IWOTH:
        raise ConfigError(
            f"every user of this machine can write {file} (mode {stat.S_IMODE(mode):04o}), and it can name commands "
            f"that are run here. Look at what it says, then run `chmod o-w {file}`"
        )


def _profiler(options: dict[str, Any]) -> ProfilerConfig:
    """What this node needs of the profiler configuration: folder of traces, hook, and what the engine records."""
    config = ProfilerConfig(plan=ProfilePlan(enabled=False))
    if options["profiler"] is not None:
        _require_trusted(options["profiler"])
        config, warnings = read_config(options["profiler"])
        for warning in warnings:
            logger.warning("%s: %s", options["profiler"], warning)
    traces, hook = options["traces"], options["finish_hook"]
    return replace(
        config,
        save_path=str(traces or config.save_path or "traces"),
        finish_hook_cmd=config.finish_hook_cmd if hook is None else hook,
    )


def _engine_options(identity: Identity, options: dict[str, Any], traces: Path) -> EngineOptions:
    if options["launch"] and (options["engine"] not in ("sglang", "vllm") or not options["command"]):
        raise ConfigError("--launch takes a server's command after `--`, and needs --engine sglang or vllm.")
    if options["command"] and not options["launch"]:
        raise ConfigError(f"unexpected {' '.join(options['command'])!r}: a server's command follows `--launch --`.")
    return EngineOptions(
        identity=identity,
        checkpoints=options["checkpoints"],
        traces=traces,
        url=options["url"],
        key_file=options["api_key_file"],
        digests=options["digests"],
        serve=options["serve"],
        seed=options["seed"],
    )


def _require_observing(context: click.Context) -> None:
    """Refuse options that are about commands."""
    for option in context.command.params:
        given = context.get_parameter_source(option.name or "")
        if not option.expose_value or option.name in OBSERVING:
            continue
        if given is not None and given is not ParameterSource.DEFAULT:
            named = option.opts[0] if isinstance(option, click.Option) else "a server's command"
            named = str(option.envvar) if given is ParameterSource.ENVIRONMENT else named
            raise ConfigError(f"--observe does not go with {named}: an observing agent changes nothing.")


def _launched(
    engine_options: EngineOptions,
    state_dir: Path,
    options: dict[str, Any],
    plan: ProfilePlan,
    bus: str,
    keys: Path | None,
) -> "LaunchedEngine":
    from workers.server.command import lacks_peer, profiled_command, server_command
    from workers.server.launch import LaunchedEngine, ServerProcess

    kind, command, identity = options["engine"], options["command"], engine_options.identity
    log = options["launch_log"] or state_dir / f"server-{identity.agent}.log"
    full = server_command(kind, command, identity, options["dist_init"])
    full = profiled_command(kind, full, identity, plan, engine_options.traces)
    first, copied = full, PeerFound()
    if lacks_peer(kind, full, identity):
        first, copied = interrupt.run(_with_peer, full, identity, bus, keys)
    server = ServerProcess(full, first=first, log=log, name=f"{kind} server of agent {identity.agent}")
    engine = make_engine(kind, replace(engine_options, copied=copied))
    return LaunchedEngine(engine, server, up_within_s=milliseconds(options["up_within"]) / 1000)


async def _with_peer(
    command: tuple[str, ...], identity: Identity, bus: str, keys: Path | None
) -> tuple[tuple[str, ...], PeerFound]:
    """The command with a running server of the fleet whose weights are copied, and that; as it was if there is none."""
    from controlplane.bus.operator import find_peer
    from workers.engines.sglang.server import SGLangReader
    from workers.server.command import with_peer

    try:
        found = await find_peer(bus, identity.replica, KeySource.find(keys))
        if not found.url:
            logger.info("agent %s: its server reads a checkpoint, since none can be copied now", identity.agent)
            return command, found
        peer = SGLangReader(found.url)  # without a key, as SGLang when it copies
        try:
            return with_peer(command, identity, found.url, await peer.info() or {}), found
        finally:
            await peer.close()
    except RolloutctlError as error:
        logger.warning("agent %s: its server reads a checkpoint: %s", identity.agent, error)
        return command, PeerFound()


def _endpoint(options: dict[str, Any], bus: str) -> str:
    """What clients elsewhere are told: not the address of this machine to itself."""
    url = options["worker_url"] or options["url"] or ""
    if not url.startswith(("http://", "https://")) or options["node_rank"]:
        return ""  # a backend of the user's own may take any URL
    from workers.engines.http import base_url

    elsewhere = is_file(bus) or not stays_here(bus)  # a bus that is found by a file may move
    host = urlsplit(base_url(url)).hostname
    here = elsewhere and (host in ("0.0.0.0", "::") or stays_here(f"tcp://{host}:0"))
    return "" if here and not options["worker_url"] else base_url(url)


def _router(options: dict[str, Any]) -> "RouterRegistration | None":
    url, worker = options["router"], options["worker_url"] or options["url"]
    if url is None:
        return None
    if worker is None:
        raise ConfigError("--router needs --url, the server that gets the requests.")
    from workers.engines.api_key import api_key
    from workers.router import KEY_VARIABLE, RouterRegistration

    return RouterRegistration(
        url, worker, key=api_key(variable=KEY_VARIABLE), worker_key=api_key(options["api_key_file"])
    )
