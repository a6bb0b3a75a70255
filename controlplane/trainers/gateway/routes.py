"""What a trainer's request to an engine means. One table of routes, for vLLM's, SGLang's and the trainers' own. Pure.

The routes, and who posts them, were read in the sources of prime-rl (559b44772), SkyRL (a9564572, 0.4.0), slime
(624b824a8), miles (31f1ca961, 29f1038a) and AReaL (cbff54d64, 1.0.4); docs/trainers has the order in which each posts
them. A route that is in no table is refused, and so is a request that a command can't express. A refusal is a 400:
prime-rl tries a 5xx again up to ten times, and passes over a 404 in silence (`src/prime_rl/utils/client.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import PurePosixPath
from typing import Final, Literal

from msgspec import Struct, ValidationError, convert

from schemas.identity import REPLICAS_MAX, AdapterName, InFlight
from schemas.profiler.conversion import shown

Fields = Mapping[str, object]


class PausePost(Struct, frozen=True):
    """Stop generation. The sync that follows does it, and a trainer that ends before it leaves nothing paused."""

    mode: InFlight = "abort"


class Plain(Enum):
    """A request without fields."""

    RESUME = "generate again"
    FLUSH = "drop the prefix cache"
    PART = "a part of an update that the sync's own phases do"
    HEALTH = "is the replica fit to serve?"
    VERSION = "which weights does it serve? Their label takes the place of the engine's own number in its answer"
    INFO = "what kind of server is it? Its address is the gateway's: miles compares it with the one that it was given"
    DISCOVERY = "what kind of worker is this? As Dynamo and smg answer"


class UpdatePost(Struct, frozen=True):
    """Load a checkpoint."""

    path: str
    label: str = ""


class SyncPost(Struct, frozen=True):
    """Bring the whole fleet to a checkpoint, and say what became of each worker.

    Attributes:
        limits: Arguments of `ControlPlane.sync_weights`, in place of the gateway's.
    """

    update: UpdatePost
    mode: InFlight
    limits: Mapping[str, object] = {}


class DeltaPost(Struct, frozen=True):
    """Load the local checkpoint that `TransferPost` named and a fetch has patched (SkyRL)."""

    label: str


class TransferPost(Struct, frozen=True):
    """Where each engine's host keeps the checkpoint that deltas are applied to (SkyRL). Passed on to the engine."""

    path: str


class AdapterPost(Struct, frozen=True):
    """Load a version of a LoRA adapter, or drop the adapter.

    Attributes:
        label: The trainer's own name for the version.
        path: Of its directory, below the root of checkpoints; empty to drop.
    """

    label: str
    path: str = ""


class VersionPost(Struct, frozen=True):
    """Name the weights that are served (miles)."""

    label: str


class CheckPost(Struct, frozen=True):
    """Compare the weights with those at the snapshot (slime and miles)."""

    action: Literal["snapshot", "reset_tensors", "compare"]


class RefusedPost(Struct, frozen=True):
    """Nothing is done."""

    message: str


Meaning = (
    Plain
    | PausePost
    | UpdatePost
    | SyncPost
    | DeltaPost
    | TransferPost
    | AdapterPost
    | VersionPost
    | CheckPost
    | RefusedPost
)

Reader = Callable[[Fields, Sequence[str]], Meaning]
"""Reads the fields of a request, those of its query and of its JSON body. Raises ValueError with what is wrong."""


def read_request(verb: str, path: str, fields: Fields, roots: Sequence[str]) -> Meaning:
    """Return what a request means: fields are those of its query and body, roots names of the checkpoints' folder."""
    reader = CONTROL.get((verb, path))
    if reader is None:
        return RefusedPost(f"{verb} {path} is refused: {REFUSED.get(path, UNKNOWN)}. Nothing was done")
    if isinstance(reader, Plain):
        return reader
    try:
        return reader(fields, roots)
    except ValueError as error:
        return RefusedPost(f"{verb} {path} is refused: {error}. Nothing was done")


def is_passed(verb: str, path: str) -> Literal["tokens", "other"] | None:
    """Return what the engine itself is asked for, unread; None if it is not asked. Only a fit replica gives tokens."""
    return "tokens" if (verb, path) in GENERATION else "other" if (verb, path) in PASSED else None


# --- readers ----------------------------------------------------------------------------------------------------------

_MODES: Final[Mapping[object, InFlight]] = {
    **{None: "abort", "abort": "abort", "wait": "wait", "keep": "keep"},
    **{"retract": "keep", "in_place": "keep"},  # SGLang's: both go on with the request after the resume
}


def _pause(fields: Fields, _: Sequence[str]) -> PausePost:
    mode = fields.get("mode")
    if not isinstance(mode, str | None) or mode not in _MODES:
        raise ValueError(f"mode is {shown(mode)}, and must be abort, wait, keep, retract or in_place")
    return PausePost(_MODES[mode])


def _sync(fields: Fields, roots: Sequence[str]) -> Meaning:
    quorum, absent = fields.get("quorum"), fields.get("absent")
    if quorum is not None and not (type(quorum) is int and 0 < quorum < REPLICAS_MAX):
        raise ValueError(f"quorum is {shown(quorum)}, and must be a number of replicas")
    if absent not in (None, "skip", "wait"):
        raise ValueError(f"absent is {shown(absent)}, and must be skip or wait")
    limits = {name: limit for name, limit in (("quorum", quorum), ("on_unreachable", absent)) if limit is not None}
    return SyncPost(_from_disk(fields, roots), _pause(fields, roots).mode, limits)


def _update(fields: Fields, roots: Sequence[str]) -> Meaning:
    """Read an update: prime-rl's and SkyRL's share a path, and differ in their fields."""
    info = fields.get("update_info")
    if isinstance(info, Mapping):
        target = info.get("target_version", info.get("version"))
        if not isinstance(target, int) or target.bit_length() > 256:
            raise ValueError("an update_info without target_version is a transfer over NCCL. Set SkyRL's "
                             "weight_sync_backend=delta, which names a checkpoint")  # fmt: skip
        return DeltaPost(str(target))
    if "weight_dir" in fields and fields["weight_dir"] is None:
        raise ValueError("weight_dir is null, so the weights come over NCCL or NIXL. Set prime-rl's "
                         'weight_broadcast type to "filesystem"')  # fmt: skip
    return _from_disk(fields, roots)


def _from_disk(fields: Fields, roots: Sequence[str]) -> UpdatePost:
    named = fields.get("model_path", fields.get("weight_dir"))
    if not isinstance(named, str):
        raise ValueError("no model_path or weight_dir names a checkpoint")
    if fields.get("load_format") not in (None, "auto"):
        raise ValueError(f"load_format is {shown(fields['load_format'])}, and a sync loads safetensors as they are")
    return UpdatePost(relative_path(named, roots), _label(fields, "weight_version"))


def _label(fields: Fields, name: str) -> str:
    given = fields.get(name, "")
    label = given if isinstance(given, str) else "" if given is None else shown(given)
    if len(label) > LABEL_MAX or not label.isprintable():
        raise ValueError(f"{name} is {shown(given)}, and may be one line of {LABEL_MAX} characters")
    return label


def _check(fields: Fields, _: Sequence[str]) -> Meaning:
    match fields.get("action"):
        case "snapshot" | "reset_tensors" | "compare" as action:
            return CheckPost(action)
        case other:
            raise ValueError(f"the action is {shown(other)}, and must be snapshot, reset_tensors or compare: no agent "
                             "has a checksum for each tensor")  # fmt: skip


def _transfer(fields: Fields, roots: Sequence[str]) -> Meaning:
    info = fields.get("init_info")
    named = info.get("local_checkpoint_dir") if isinstance(info, Mapping) else None
    if not isinstance(named, str):
        raise ValueError("an init_info without local_checkpoint_dir is a group for NCCL. Set SkyRL's "
                         "weight_sync_backend=delta")  # fmt: skip
    return TransferPost(f"{relative_path(named, roots)}/{LOCAL_WEIGHTS}")


def _rpc(fields: Fields, roots: Sequence[str]) -> Meaning:
    """Read a call of the workers: SkyRL's, and those of prime-rl with a Dynamo."""
    method, args = fields.get("method"), fields.get("args")
    if method == LOAD and isinstance(args, list) and len(args) == 1:
        return _update({"weight_dir": args[0]}, roots)
    if not isinstance(method, str) or method not in UPDATE_PARTS:
        raise ValueError(f"the method is {shown(method)}; only {LOAD} with a path is allowed, and what a sync does by "
                         f"itself: {', '.join(sorted(UPDATE_PARTS))}. Set SkyRL's weight_sync_backend=delta, or "
                         'prime-rl\'s weight_broadcast type to "filesystem"')  # fmt: skip
    return Plain.PART


def _load_adapter(fields: Fields, roots: Sequence[str]) -> Meaning:
    if on := next((flag for flag in ("is_3d_lora_weight", "pinned") if fields.get(flag)), None):
        raise ValueError(f"{on} is set, and a sync of an adapter can't ask for that")
    named = fields.get("lora_path")
    if not isinstance(named, str):
        raise ValueError(f"no lora_path names a directory; {_ADAPTER_IN_MEMORY}")
    return AdapterPost(_adapter_label(fields), relative_path(named, roots))


def _adapter_label(fields: Fields) -> str:
    try:
        return convert(fields.get("lora_name"), AdapterName)
    except ValidationError:
        raise ValueError(f"lora_name is {shown(fields.get('lora_name'))}, and must be up to 100 letters, digits, dots, "
                         "hyphens and underscores, the first a letter or digit") from None  # fmt: skip


def relative_path(named: str, roots: Sequence[str]) -> str:
    """Return a trainer's absolute path, relative to the root. Raises ValueError."""
    if len(named) > PATH_MAX or not named.isprintable():
        raise ValueError(f"the path {shown(named)} is longer than {PATH_MAX} characters, or can't be printed")
    path = PurePosixPath(named)
    if not path.is_absolute():
        raise ValueError(f"the path {named!r} is relative to the trainer's working directory. Give it an absolute one")
    if ".." in path.parts:
        raise ValueError(f"the path {named!r} holds `..`")
    for root in roots:
        if path.is_relative_to(root) and path != PurePosixPath(root):
            return str(path.relative_to(root))
    raise ValueError(f"the path {named!r} is not below {roots[0]}. Start the gateway and the agents with --checkpoints "
                     "set to a folder above it")  # fmt: skip


# --- tables -----------------------------------------------------------------------------------------------------------


def _routes(listed: str) -> frozenset[tuple[str, str]]:
    """Paths after their method."""
    verb, *paths = listed.split()
    return frozenset((verb, path) for path in paths)


LABEL_MAX: Final = 200
PATH_MAX: Final = 4096
"""Characters of a path, as Linux has it."""
LOCAL_WEIGHTS: Final = "weights"
"""Where SkyRL keeps the patched files, below its local_checkpoint_dir (`delta_checkpoint.py`, `_weights_dir`)."""
_ADAPTER_IN_MEMORY: Final = (
    "an adapter in memory can't be checked before an engine has it, nor given to a replica that comes later. Let the "
    "trainer write it to a disk: docs/lora.md says which can (SkyRL by its lora.sync_mode=disk, AReaL by "
    "weight_update_mode=disk)"
)
UPDATE_PARTS: Final = frozenset({"skyrl_start_weight_update", "skyrl_finish_weight_update", "liveness_probe"})
LOAD: Final = "update_weights_from_path"
"""prime-rl's method of vLLM's workers."""

CONTROL: Final[Mapping[tuple[str, str], Reader | Plain]] = {
    **dict.fromkeys(_routes("POST /pause /pause_generation /areal_pause_generation"), _pause),
    **dict.fromkeys(_routes("POST /resume /continue_generation /areal_continue_generation"), Plain.RESUME),
    **dict.fromkeys(_routes("GET /flush_cache"), Plain.FLUSH),
    **dict.fromkeys(_routes("POST /flush_cache /reset_prefix_cache"), Plain.FLUSH),
    **dict.fromkeys(_routes("POST /update_weights"), _update),
    **dict.fromkeys(_routes("POST /start_weight_update /finish_weight_update"), Plain.PART),
    **dict.fromkeys(_routes("POST /update_weights_from_disk /areal_update_weights"), _from_disk),
    **dict.fromkeys(_routes("POST /init_weight_transfer_engine"), _transfer),
    **dict.fromkeys(_routes("POST /collective_rpc"), _rpc),
    **dict.fromkeys(
        _routes("POST /update_weight_version"), lambda fields, _: VersionPost(_label(fields, "new_version"))
    ),
    **dict.fromkeys(_routes("POST /weights_checker"), _check),
    **dict.fromkeys(
        _routes("POST /load_lora_adapter /v1/load_lora_adapter /skyrl/v1/load_lora_adapter"), _load_adapter
    ),
    **dict.fromkeys(
        _routes("POST /unload_lora_adapter /v1/unload_lora_adapter"),
        lambda fields, _: AdapterPost(_adapter_label(fields)),
    ),
    **dict.fromkeys(_routes("GET /health /health_generate"), Plain.HEALTH),
    **dict.fromkeys(_routes("GET /get_weight_version /model_info /get_model_info"), Plain.VERSION),
    **dict.fromkeys(_routes("GET /server_info /get_server_info"), Plain.INFO),
    **dict.fromkeys(_routes("POST /v1/rl/syncs"), _sync),
    **dict.fromkeys(_routes("GET /v1/rl/workers"), Plain.DISCOVERY),
}
"""Answered here, by commands and by what the bus knows."""

DONE: Final = {"/pause": "paused", "/resume": "resumed", "/reset_prefix_cache": "cache_reset"}
"""What SkyRL looks for in the `status` of an answer, beside what it sent."""

GENERATION: Final = _routes(
    "POST /generate /v1/completions /v1/chat/completions /inference/v1/generate /skyrl/v1/generate"
)
PASSED: Final = (
    _routes("POST /abort_request /tokenize /detokenize /v1/chat/completions/render /finish_session")
    | _routes("POST /fetch_weights /pull_weights")  # files on the engine's host; no weights
    | _routes("GET /v1/models /get_world_size /version /metrics /get_load /v1/loads")
)
"""Passed on to the engine, with everything that streams through."""

_MEMORY: Final = "memory of an engine that shares its GPUs with a trainer is not given over the gateway"
_GROUP: Final = "weights over NCCL go past the gateway. Let the trainer write checkpoints: docs/trainers says how"
_DRAFTER: Final = "a sync loads the model, and not the drafter of its speculative decoding. Turn that off"
_PROFILE: Final = (
    "a session is opened on the bus, by `rolloutctl profile start --step N --window 0 3`, and closed by `stop`"
)
UNKNOWN: Final = (
    "the gateway does not know this route. It maps "
    + ", ".join(sorted({path for _, path in CONTROL}))
    + ", and passes on "
    + ", ".join(sorted({path for _, path in GENERATION | PASSED}))
)
REFUSED: Final[Mapping[str, str]] = {
    path: why
    for why, listed in {
        _PROFILE: "POST /start_profile /stop_profile",
        _MEMORY: "POST /sleep /wake_up /release_memory_occupation /resume_memory_occupation",
        _GROUP: "POST /init_broadcaster /init_weights_update_group /destroy_weights_update_group /begin_weight_update "
        "/end_weight_update /update_weights_from_tensor /update_weights_from_distributed /parallelism_config "
        "/get_remote_instance_transfer_engine_info /areal_init_weights_update_group /areal_set_update_weight_meta "
        "/areal_update_weights_xccl",
        _DRAFTER: "POST /start_draft_weight_update",
        _ADAPTER_IN_MEMORY: "POST /load_lora_adapter_from_tensors /load_lora_adapter_from_distributed "
        "/areal_update_weights_lora /areal_set_update_weight_meta_lora /areal_update_weights_lora_xccl",
    }.items()
    for _, path in _routes(listed)
}
"""Routes that a trainer may post to, and that no command can stand for: why, and what to set."""
