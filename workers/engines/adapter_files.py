"""The files of a LoRA adapter: what an engine could not serve, or would die of, is refused before the engine sees it.

Engines check little. SGLang answers 200 to an adapter that does not fit its model, and its scheduler dies at the first
request for it; vLLM serves it as it is. Both read the files again later: vLLM after an eviction, SGLang when a request
names what was unloaded. So the files must fit the model, and be where no link can lead elsewhere by then.

Nothing here imports torch, and only `checked_adapter` reads files.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from schemas.commands import AdapterVersion
from schemas.errors import CheckpointError
from schemas.safetensors.format import UNTOUCHED, TensorSpec, find_tensors, safetensors_files
from schemas.safetensors.manifest import ADAPTER_CONFIG, check_tensors, config_digest, read_config
from schemas.safetensors.paths import resolve_below
from schemas.wire import DECODE_ERRORS
from workers.engines.checkpoint import FLOATS, FUSED
from workers.engines.client import integer_at
from workers.engines.observed import LoRALimits

WEIGHTS: Final = "adapter_model.safetensors"
NOT_SERVED: Final = (
    *("use_dora", "bias", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern", "layer_replication"),
    *("alora_invocation_tokens", "use_qalora", "use_bdlora", "target_parameters", "trainable_token_indices"),
)
"""Settings of PEFT that an engine refuses, or ignores and then serves something else. They must be off."""
_PLAIN_INITS: Final = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Ways to initialize that leave the base as it is. pissa, olora, corda and loftq change the base."""
_EVERY_MODULE: Final = ("all", "all-linear")
_COMPARABLE: Final = FLOATS | {"F8_E4M3", "F8_E5M2"}
"""Dtypes of a weight that has the shape of its module. Quantized ones are packed."""
_TENSOR: Final = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight", re.ASCII)


class _Module(Struct):
    """The two tensors of one module of an adapter."""

    down: TensorSpec | None = None
    up: TensorSpec | None = None


def adapter_path(root: Path, path: str) -> Path:
    """Return where an engine gets the adapter of a command. Raises CheckpointError.

    An engine is given the path as the command has it, below the resolved root, since that is what it will list.
    """
    base = root.resolve()
    place = resolve_below(base, path)
    if str(place) != f"{base}/{path}":
        raise _refused(
            base / path,
            f"leads to {place}",
            "An engine reads an adapter again later, and names it by its path: give the path without links, `.` and "
            "double slashes.",
        )
    return place


def checked_adapter(
    root: Path,
    adapter: AdapterVersion,
    layout: Mapping[str, TensorSpec] | None,
    limits: LoRALimits,
) -> Path:
    """Return the directory of a version, after checking all of it. Raises CheckpointError."""
    directory = adapter_path(root, adapter.path)
    files = [file.name for file in safetensors_files(directory)]
    if files != [WEIGHTS]:
        raise _refused(directory, f"holds {', '.join(files[:3])}", f"{WEIGHTS} must be its only safetensors file.")
    rank = _check_config(directory, _read_config(directory, adapter.config), limits)
    places = find_tensors(directory)
    modules = _modules(directory, {name: place.spec for name, place in places.items()})
    _check_modules(directory, modules, rank, limits)
    unknown = _compare(directory, modules, layout) if layout is not None else ["the base model"]
    if adapter.manifest is not None:
        check_tensors(directory, places, adapter.manifest)
    elif unknown:
        raise _refused(
            directory,
            f"can't be compared with the model: the shape of {unknown[0]} can't be read here, and the command carries "
            "no manifest",
            "An engine that loads an adapter of other shapes can die of it: sync with a manifest.",
        )
    return directory


def _check_config(directory: Path, config: Mapping[str, object], limits: LoRALimits) -> int:
    """Check the settings of an adapter; return its rank."""
    kind, rank, alpha, targets = (config.get(key) for key in ("peft_type", "r", "lora_alpha", "target_modules"))
    if kind != "LORA":
        raise _refused(directory, f"has peft_type {kind!r}", "LORA is the only one that engines serve.")
    off = [*NOT_SERVED, *limits.refuses - {"target_modules"}]
    if on := next((key for key in off if config.get(key) and config[key] != "none"), None):
        raise _refused(directory, f"has {on} {str(config[on])[:100]}", "This engine does not serve that.")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        raise _refused(
            directory,
            f"was initialized by {init[:40]}, which changes the base model",
            "Convert it (`path_initial_model_for_weight_conversion` of PEFT), or train with another initialization.",
        )
    if (rank := integer_at(config, "r")) is None or rank < 1:
        raise _refused(directory, f"has rank {config.get('r')!r}", "`r` must be a positive number.")
    if limits.rank is not None and rank > limits.rank:
        raise _refused(directory, f"has rank {rank}", f"The engine was launched for {limits.rank} (--max-lora-rank).")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise _refused(directory, f"has lora_alpha {alpha!r}", "It must be a number.")
    if isinstance(targets, str) and targets not in _EVERY_MODULE and "target_modules" in limits.refuses:
        raise _refused(directory, f"has target_modules {targets[:100]!r}", "This engine needs a list of names.")
    return rank


def _read_config(directory: Path, digest: str) -> dict[str, object]:
    """Return the settings of an adapter. They must be those whose digest the command has, if it has one."""
    content = read_config(directory)
    if digest and config_digest(content) != digest:
        advice = "Write it once, before the sync, or this node sees an older state of the disk."
        raise _refused(directory, f"has another {ADAPTER_CONFIG} than the trainer's sync", advice)
    try:
        return msgspec.json.decode(content, type=dict[str, object])
    except DECODE_ERRORS as error:
        raise _refused(
            directory, f"has an unreadable {ADAPTER_CONFIG} ({error})", "Save the adapter whole, then sync again."
        ) from None


def _modules(directory: Path, layout: Mapping[str, TensorSpec]) -> dict[str, _Module]:
    """Return the tensors of an adapter by the names of their modules in the base model."""
    modules: dict[str, _Module] = {}
    for name, spec in layout.items():
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise _refused(
                directory,
                f"holds the tensor {name[:200]!r}",
                "Names must be those of PEFT, `base_model.model.MODULE.lora_A.weight` and `lora_B`, or without "
                "`base_model.model.`, as prime-rl's.",
            )
        if spec.dtype not in FLOATS or len(spec.shape) != 2:
            allowed = f"Two dimensions of {_names(FLOATS)} are served."
            raise _refused(directory, f"holds {name[:200]} as {spec}", allowed)
        module = modules.setdefault(found[1], _Module())
        if (module.down if found[2] == "A" else module.up) is not None:
            raise _refused(directory, f"holds {found[1]} twice", "Write names with `base_model.model.`, or without it.")
        if found[2] == "A":
            module.down = spec
        else:
            module.up = spec
    return modules


def _check_modules(directory: Path, modules: Mapping[str, _Module], rank: int, limits: LoRALimits) -> None:
    allowed = None if limits.modules is None else {_fused(name) for name in limits.modules}
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if module.down is None or module.up is None:
            side = "lora_B" if module.up is None else "lora_A"
            raise _refused(directory, f"lacks {side} of {name}", "Each module needs both: save the adapter again.")
        if (module.down.shape[0], module.up.shape[1]) != (rank, rank):
            raise _refused(
                directory,
                f"says r {rank}, and {name} has lora_A {module.down} and lora_B {module.up}",
                f"lora_A must have {rank} rows, and lora_B as many columns.",
            )
        if allowed is not None and _fused(last) not in allowed:
            raise _refused(directory, f"changes {name}", f"The engine was launched for {_names(limits.modules or ())}.")
        for other in limits.needs.get(last, ()):
            if f"{parent}.{other}" not in modules:
                raise _refused(directory, f"changes {name} without {other}", "This engine serves only both together.")


def _compare(directory: Path, modules: Mapping[str, _Module], layout: Mapping[str, TensorSpec]) -> list[str]:
    """Compare an adapter with the base model. Returns modules whose shape the model's files don't show."""
    known = {name.rpartition(".")[0] for name in layout}
    unknown = []
    for name, module in modules.items():
        weight = layout.get(f"{name}.weight")
        if weight is None and name not in known:
            raise _refused(directory, f"changes {name}", "The engine's model has no such module.")
        if weight is None or len(weight.shape) != 2 or weight.dtype not in _COMPARABLE:
            unknown.append(name)
            continue
        assert module.down is not None and module.up is not None
        rows, columns = weight.shape
        if (module.up.shape[0], module.down.shape[1]) != (rows, columns):
            raise _refused(
                directory,
                f"has {name} with lora_A {module.down} and lora_B {module.up}",
                f"The model's own weight is {weight}: lora_A must have {columns} columns, lora_B {rows} rows.",
            )
    return unknown


def _fused(last: str) -> str:
    return FUSED.get(last, last)  # a launch may name either


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _refused(path: Path, what: str, allowed: str) -> CheckpointError:
    return CheckpointError(f"adapter refused: {path} {what}. {UNTOUCHED} {allowed}")
