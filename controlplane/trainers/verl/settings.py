"""The settings of a verl run: the section `rolloutctl` of its configuration, `+rolloutctl.KEY=VALUE` in a command."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import replace

from schemas.errors import ConfigError
from schemas.profiler.conversion import convert, unknown_keys

SECTION = "rolloutctl"


class VerlSettings(Struct, frozen=True, kw_only=True):
    """What a user may set. Paths are on the machine of verl's task runner, unless the text says otherwise.

    Attributes:
        log: File of the run's log; `rolloutctl/run.db` below `trainer.default_local_dir` by default. A run that resumes
            continues it.
        run: `auto` to continue the run in the log if there is one, else to begin one; `new` to begin a run and keep the
            log of an earlier one beside it; `resume` to continue the one in the log, which must exist.
        address: Where agents connect, as their nodes reach it. One that other machines can reach needs `keys`.
        keys: Folder with the keys of the bus, made by `rolloutctl keys`.
        agent_keys: Key file on the servers' nodes; `{agent}` in it stands for the agent's name, e.g. 0.1.
        insecure: Allow an address that other machines can reach without keys.
        state: Directory of the agents' journals on the servers' nodes, on a disk of theirs; by default the user's state
            folder there.
        traces: Root of the session directories on the servers' nodes; `global_profiler.save_path` by default.
        timeout: Seconds for each phase of a sync. verl's own transfer is part of one.
        join_timeout: Seconds for all agents to join at the start.
        quorum: Replicas that must hold new weights for a commit. The others of the fleet are quarantined or unproven.
        metrics_port: `[HOST:]PORT` where the task runner serves the metrics of the bus to Prometheus; without HOST, to
            its own machine. None for no metrics.
        log_copy: Folder of a live copy of the log, for a task runner that may start again on another machine; empty for
            none. `log` must be on a disk of the machine then.
    """

    log: str = ""
    run: str = "auto"
    address: str = "tcp://127.0.0.1:0"
    keys: str = ""
    agent_keys: str = ""
    insecure: bool = False
    state: str = ""
    traces: str = ""
    timeout: Annotated[float, Meta(ge=1, le=86_400)] = 600.0
    join_timeout: Annotated[float, Meta(ge=1, le=86_400)] = 120.0
    quorum: Annotated[int, Meta(ge=1, le=65_536)] = 1
    metrics_port: int | str | None = None
    log_copy: str = ""


def read_settings(section: Mapping[str, Any], folder: Path, traces: Path, path: str = SECTION) -> VerlSettings:
    """Return the settings, complete and with absolute paths.

    Raises:
        ConfigError: A key is unknown or a value is wrong. The text names the key, the value and what is allowed.
    """
    unknown = unknown_keys(section, VerlSettings, path)
    if unknown:
        lines = (f"{key.path} is unknown{key.suggestion}" for key in unknown)
        raise ConfigError(f"{', '.join(lines)}; allowed are {', '.join(VerlSettings.__struct_fields__)}")
    settings = convert(dict(section), VerlSettings, path)
    log = Path(settings.log or folder / "rolloutctl" / "run.db").expanduser().absolute()
    return replace(
        settings,
        log=str(log),
        log_copy=str(Path(settings.log_copy).expanduser().absolute()) if settings.log_copy else "",
        state=str(Path(settings.state).expanduser().absolute()) if settings.state else "",
        traces=str(Path(settings.traces or traces).expanduser().absolute()),
    )
