"""The place of an agent, from what its launcher put into the environment. Pure.

A launcher numbers its nodes. If the replica is named, all nodes of the launcher are this replica, and a node's index is
its rank. If not, each `nnodes` nodes in a row are one replica; with one node to a replica, each process is one.

The variables, and who describes them:

    torchrun          docs.pytorch.org/docs/stable/elastic/run.html; Ray Train sets RANK … NODE_RANK too
    LeaderWorkerSet   github.com/kubernetes-sigs/lws, pkg/utils/pod: in every container, init containers too
    Indexed Job       kubernetes.io/docs/concepts/workloads/controllers/job
    Slurm             slurm.schedmd.com/srun.html, "output environment variables"
    StatefulSet       kubernetes.io/docs/concepts/workloads/controllers/statefulset: label apps.kubernetes.io/pod-index,
                      passed on as POD_INDEX; else the number at the end of the pod's name
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from schemas.errors import ConfigError
from schemas.identity import NODES_MAX, REPLICAS_MAX

Environment = Mapping[str, str]


class LaunchedPlace(NamedTuple):
    """A place, and one text for each part that was not given: what it is, and which variable said so."""

    replica: int
    node_rank: int
    nnodes: int
    origins: tuple[str, ...]


class _Found(NamedTuple):
    value: int
    source: str


class _Launcher(NamedTuple):
    """Which variables a launcher sets; of several, the first that is set counts.

    Attributes:
        node: Index of the node.
        nnodes: Number of nodes. `A / B` divides two variables.
        process: Index of the process in all.
        local: Index of the process on its node.
    """

    name: str
    node: tuple[str, ...]
    nnodes: tuple[str, ...] = ()
    process: tuple[str, ...] = ()
    local: tuple[str, ...] = ()


_LWS: Final = _Launcher("LeaderWorkerSet", ("LWS_WORKER_INDEX",), ("LWS_GROUP_SIZE",))
_POD_NAMES: Final = ("POD_NAME", "HOSTNAME")
_LAUNCHERS: Final = (
    _Launcher(
        "torchrun",
        ("GROUP_RANK", "NODE_RANK"),
        ("GROUP_WORLD_SIZE", "WORLD_SIZE / LOCAL_WORLD_SIZE"),
        ("RANK",),
        ("LOCAL_RANK",),
    ),
    _LWS,
    _Launcher("Indexed Job", ("JOB_COMPLETION_INDEX",)),
    _Launcher(
        "Slurm",
        ("SLURM_NODEID",),
        ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        ("SLURM_PROCID",),
        ("SLURM_LOCALID",),
    ),
    _Launcher("StatefulSet", ("POD_INDEX", *_POD_NAMES)),
)
"""The innermost first: torchrun may run in a job of Slurm, which then numbers the same nodes."""

_RAY: Final = ("RAY_JOB_ID", "RAY_RAYLET_PID")


def find_place(
    environment: Environment, *, replica: int | None, node_rank: int | None, nnodes: int | None
) -> LaunchedPlace:
    """Return the place of this process.

    Args:
        environment: Its environment variables.
        replica: Index of the replica; None to find it.
        node_rank: Index of the node in the replica; None to find it.
        nnodes: Nodes of the replica; None to find it.

    Raises:
        ConfigError: The environment does not say it, or contradicts what is given. The text names the variables.
    """
    missing = [
        name
        for name, given in (("--replica", replica), ("--node-rank", node_rank), ("--nnodes", nnodes))
        if given is None
    ]
    launcher, node = _launcher(environment, missing)
    origins: list[str] = []
    count = _first(environment, launcher.nnodes)
    alone = nnodes is None
    if nnodes is None:
        if count is None:
            raise ConfigError(_not_found(("--nnodes",), [launcher]))
        nnodes = count.value
        origins.append(f"--nnodes {nnodes} from {count.source}")
    if replica is not None:
        place = (replica, node.value)
        sources = ("", node.source)
    elif launcher is _LWS:
        group = _group_index(environment, node.value)
        place = (group.value, node.value)
        sources = (group.source, node.source)
    elif alone:
        raise ConfigError(
            f"with --nnodes auto, all nodes of {launcher.name} are one replica ({origins[0]}): name it by --replica N, "
            "or say by --nnodes N how many nodes each replica has"
        )
    else:
        place, sources = _divided(environment, launcher, node, nnodes, count)
    if replica is not None or nnodes > 1:
        _require_one_process(environment, launcher)
    if replica is None:
        origins.insert(0, f"--replica {place[0]} from {sources[0]}")
    if node_rank is None:
        node_rank = place[1]
        origins.append(f"--node-rank {node_rank} from {sources[1]}")
    _check(place[0], node_rank, nnodes, origins)
    return LaunchedPlace(place[0], node_rank, nnodes, tuple(origins))


def _launcher(environment: Environment, missing: list[str]) -> tuple[_Launcher, _Found]:
    for launcher in _LAUNCHERS:
        for variable in launcher.node:
            if found := _index(environment, variable):
                return launcher, found
    advice = ""
    if any(name in environment for name in _RAY):
        advice = ". Ray gives its workers no rank: workers.ray_placement.place_agents starts agents on Ray's nodes"
    raise ConfigError(_not_found(missing, _LAUNCHERS) + advice)


def _not_found(options: "list[str] | tuple[str, ...]", launchers: "list[_Launcher] | tuple[_Launcher, ...]") -> str:
    counts = tuple(options) == ("--nnodes",)
    looked = "; ".join(
        f"{launcher.name}: {', '.join((launcher.nnodes if counts else launcher.node) or ('it has none',))}"
        for launcher in launchers
    )
    given = " ".join(f"{option} N" for option in options)
    return f"{', '.join(options)} auto: no launcher says it. Looked for {looked}. Give {given} instead"


def _index(environment: Environment, variable: str) -> _Found | None:
    """The number in a variable. A pod's name ends with it; a host's name is a pod's in Kubernetes only."""
    if variable in _POD_NAMES:
        inside = variable != "HOSTNAME" or "KUBERNETES_SERVICE_HOST" in environment
        # Five letters and digits are the random end of a Deployment's pod, and may be digits alone.
        ordinal = re.search(r"-(\d{1,4})$", environment.get(variable, ""))
        return _Found(int(ordinal[1]), f"{variable}={environment[variable]}") if inside and ordinal else None
    text = environment.get(variable, "")
    if not text:
        return None
    if re.fullmatch(r"[0-9]{1,9}", text) is None:
        raise ConfigError(f"{variable}={text[:80]!r} in the environment is not the whole number that a launcher sets")
    return _Found(int(text), f"{variable}={text}")


def _first(environment: Environment, variables: tuple[str, ...]) -> _Found | None:
    for variable in variables:
        whole, _, part = variable.partition(" / ")
        found, divisor = _index(environment, whole), _index(environment, part) if part else None
        if found and not part:
            return found
        if found and divisor and divisor.value:
            return _Found(found.value // divisor.value, f"{found.source} / {divisor.source}")
    return None


def _group_index(environment: Environment, worker: int) -> _Found:
    """The group of a LeaderWorkerSet: its leader's pod is NAME-GROUP, its workers' are NAME-GROUP-WORKER."""
    for variable in _POD_NAMES:
        name = environment.get(variable, "")
        if found := re.search(r"-(\d{1,7})" + (f"-{worker}$" if worker else "$"), name):
            return _Found(int(found[1]), f"{variable}={name}")
    raise ConfigError(
        f"--replica auto: no group index at the end of {' or '.join(_POD_NAMES)}. Set ROLLOUTCTL_AGENT_REPLICA by "
        "the downward API, from the label leaderworkerset.sigs.k8s.io/group-index"
    )


def _divided(
    environment: Environment, launcher: _Launcher, node: _Found, nnodes: int, count: _Found | None
) -> tuple[tuple[int, int], tuple[str, str]]:
    """The replica and the node rank, if each `nnodes` nodes are one replica."""
    if nnodes == 1:
        process = _first(environment, launcher.process) or node
        return (process.value, 0), (process.source, "--nnodes 1")
    if count is not None and count.value % nnodes:
        raise ConfigError(f"{count.source}: {count.value} nodes can't be divided into replicas of --nnodes {nnodes}")
    sources = (f"{node.source} // {nnodes}", f"{node.source} % {nnodes}")
    return (node.value // nnodes, node.value % nnodes), sources


def _require_one_process(environment: Environment, launcher: _Launcher) -> None:
    local = _first(environment, launcher.local)
    if local is not None and local.value:
        raise ConfigError(
            f"{local.source}: {launcher.name} started several processes on this node, and they would all be the same "
            "agent. Start one on each (srun --ntasks-per-node=1, torchrun --nproc-per-node=1)"
        )


def _check(replica: int, node_rank: int, nnodes: int, origins: list[str]) -> None:
    """Raise ConfigError for a place that can't be, and say what it was made of."""
    made = f" ({'; '.join(origins)})"
    if not 1 <= nnodes <= NODES_MAX:
        raise ConfigError(f"a replica has 1 to {NODES_MAX} nodes, not {nnodes}{made}")
    if replica >= REPLICAS_MAX:
        raise ConfigError(f"replica {replica} is not below {REPLICAS_MAX}{made}")
    if node_rank >= nnodes:
        raise ConfigError(
            f"node rank {node_rank} is not below --nnodes {nnodes}{made}. If the launcher has the nodes of several "
            "replicas, leave --replica to it: --replica auto"
        )
