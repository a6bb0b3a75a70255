"""verl's V1 trainers on the bus: what is mixed into each of them, when one is asked for.

This module is imported in the task runner alone, after verl's own trainers. It is written against verl 0.9.1, whose
methods it extends; a door that verl does not have is named at the start.
"""

from pathlib import Path
from typing import Any, ClassVar, Final

from msgspec.structs import replace

from controlplane.trainers.verl.run import VerlRun
from controlplane.trainers.verl.settings import SECTION, VerlSettings, read_settings
from schemas.commands import Finish
from schemas.errors import ConfigError
from schemas.logs import logger_of
from schemas.profiler.config import ProfilerConfig, read_verl_config

logger = logger_of("verl")
TESTED_VERSIONS: Final = ("0.9.1",)
"""Versions of verl that this was run with."""
_DOORS: Final = (
    *("_setup", "_rollout_server_managers", "_start_profiling", "_start_rollout_profiling"),
    *("_stop_rollout_profiling", "on_sample_end", "on_step_end", "fit"),
)
"""Methods of verl's trainers that are extended here."""
_DISCRETE: Final = ("torch", "npu")
"""Tools that verl's servers run, in discrete mode only."""


class RolloutctlTrainer:
    """Comes before one of verl's V1 trainers among the bases of a class.

    Args:
        config: verl's whole configuration, with its section `rolloutctl`.

    Raises:
        ConfigError: A setting is wrong, or verl lacks what this needs. Nothing was started.
    """

    mode: ClassVar[str]
    global_steps: int
    checkpoint_manager: Any
    standalone_checkpoint_manager: Any
    _rollout_server_managers: Any
    _rolloutctl: VerlRun | None = None

    def __init__(self, config: Any) -> None:
        self._require_doors()
        if self.mode == "separate_async":
            _refuse_adapter(config)
        self._settings = _settings(config)
        self._profiler = _profiler(config)
        config.trainer.v1.trainer_mode = self.mode  # verl looks up the options of a mode, and compares it, by its name
        super().__init__(config)  # type: ignore[call-arg]

    def _require_doors(self) -> None:
        import verl

        base = super()
        missing = [name for name in _DOORS if not hasattr(base, name)]
        if missing:
            raise ConfigError(
                f"verl {verl.__version__} has no {', '.join(missing)}, which rolloutctl extends (as of verl "
                f"{', '.join(TESTED_VERSIONS)}). trainer.v1.trainer_mode={self.mode} is verl without rolloutctl"
            )
        if verl.__version__ not in TESTED_VERSIONS:
            logger.warning(
                "rolloutctl was run with verl %s, and not with %s", ", ".join(TESTED_VERSIONS), verl.__version__
            )

    def _setup(self) -> None:
        super()._setup()  # type: ignore[misc]
        managers = self._rollout_server_managers()
        replicas = [replica for manager in managers for replica in manager.get_replicas()]
        self._rolloutctl = VerlRun.start(self._settings, replicas, self._profiler)
        self.checkpoint_manager = self._on_the_bus(self.checkpoint_manager, managers[0])
        if self.mode == "separate_async":
            self.standalone_checkpoint_manager = self._on_the_bus(self.standalone_checkpoint_manager, managers[-1])

    def _on_the_bus(self, manager: Any, servers: Any) -> Any:
        from controlplane.trainers.verl.checkpoints import BusCheckpointManager

        return BusCheckpointManager(manager.config, manager.actor_wg, manager.replicas, self._rolloutctl, servers)

    def fit(self, agent_loop_manager: Any) -> None:
        try:
            super().fit(agent_loop_manager)  # type: ignore[misc]
        finally:
            if self._rolloutctl is not None:
                self._rolloutctl.close()

    # --- profiles -----------------------------------------------------------------------------------------------------

    def _start_profiling(self) -> None:
        super()._start_profiling()  # type: ignore[misc]  # training ranks
        if self._rolloutctl is not None:
            self._rolloutctl.begin_step(self.global_steps)

    def _start_rollout_profiling(self) -> None:
        """Do nothing: the bus opens the sessions of the rollouts, step by step."""

    def _stop_rollout_profiling(self) -> None:
        """Do nothing: they are closed before the engines sleep or get new weights."""

    def on_sample_end(self) -> None:
        if self.mode != "separate_async":
            self._end_step()
        super().on_sample_end()  # type: ignore[misc]

    def on_step_end(self) -> None:
        self._end_step()
        super().on_step_end()  # type: ignore[misc]

    def _end_step(self) -> None:
        if self._rolloutctl is not None:
            self._rolloutctl.end_step()


def _refuse_adapter(config: Any) -> None:
    """Raise ConfigError if verl would leave separate replicas without the adapter that it trains."""
    model = config.actor_rollout_ref.get("model") or {}
    lora = model.get("lora") or {}
    trained = model.get("lora_rank") or lora.get("rank") or model.get("lora_adapter_path")
    if trained and not lora.get("merge"):
        raise ConfigError(
            "a LoRA adapter is trained, and model.lora.merge is off: verl then sends separate replicas the frozen base "
            "weights at each update and never the adapter, so they would sample from the first policy for ever. Set "
            "actor_rollout_ref.model.lora.merge=True, or trainer.v1.trainer_mode=rolloutctl_sync"
        )


def _settings(config: Any) -> VerlSettings:
    from omegaconf import OmegaConf

    section: Any = OmegaConf.to_container(OmegaConf.create(config.get(SECTION) or {}), resolve=True)
    if not isinstance(section, dict):
        raise ConfigError(f"{SECTION} is {section!r}: allowed is a section, +{SECTION}.KEY=VALUE")
    traces = Path(config.global_profiler.save_path or "outputs/profile")
    return read_settings(section, Path(config.trainer.default_local_dir), traces)


def _profiler(config: Any) -> ProfilerConfig:
    """Return which steps of the rollouts are profiled, and how; verl keeps its training ranks, and its finish hook.

    Each step has a session of its own: engines sleep and get new weights between two steps, consecutive or not. The
    gate that verl's servers have (`discrete`) is opened before they are launched.
    """
    rollout = config.actor_rollout_ref.rollout.get("profiler")
    if not config.global_profiler.steps or rollout is None or not rollout.enable:
        return ProfilerConfig()
    tool = (rollout.tool_config or {}).get(rollout.tool) if rollout.tool in _DISCRETE else None
    if tool is not None and not tool.discrete:
        logger.info(
            "rollout.profiler.tool_config.%s.discrete is turned on: verl's servers do nothing else", rollout.tool
        )
        tool.discrete = True
    profiler, warnings = read_verl_config(config)
    for warning in warnings:
        logger.warning("%s", warning)
    return replace(profiler, continuous=False, roles={}, plan=replace(profiler.plan, finish=Finish()))
