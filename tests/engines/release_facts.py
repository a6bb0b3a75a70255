"""When calls came and went in SGLang and vLLM: a table, checked against the source of every release that is read."""

from collections.abc import Callable
from typing import NamedTuple

from tests.engines import wheels
from tests.engines.routes import Body
from tests.engines.shapes import Field
from tests.engines.surfaces import LAUNCHED, Surface

Holds = Callable[[Surface], bool]


class Fact(NamedTuple):
    """`holds` is true of the releases from `since` on and before `until`; None: as far as any release is read."""

    text: str
    since: str | None
    until: str | None
    holds: Holds

    def expected(self, version: str) -> bool:
        came = self.since is None or number(self.since) <= number(version)
        return came and (self.until is None or number(version) < number(self.until))


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def parameters(surface: Surface, method: str) -> list[str]:
    """Names of a method's parameters; none if there is no such method."""
    return list(surface.methods[method].signature.parameters) if method in surface.methods else []


def query(surface: Surface, path: str) -> dict[str, object]:
    """The query parameters of what is posted to a path with their defaults, those read by hand too."""
    route = surface.route("POST", path)
    return {} if route is None else {field.name: field.default for field in (*route.query, *route.query_by_hand)}


def body(surface: Surface, path: str) -> dict[str, Field]:
    """The fields of what is posted to a path."""
    route = surface.route("POST", path)
    return {} if route is None else {field.name: field for field in surface.body_fields(route)}


def taken(surface: Surface, path: str) -> Body:
    """The body of what is posted to a path that has one."""
    route = surface.route("POST", path)
    assert route is not None and route.body is not None, f"nothing is posted to {path}"
    return route.body


# --- what can be said of a release ------------------------------------------------------------------------------------


def method(name: str) -> Holds:
    return lambda surface: name in surface.methods


def with_parameter(name: str, parameter: str) -> Holds:
    return lambda surface: parameter in parameters(surface, name)


def has(shape: str, field: str) -> Holds:
    return lambda surface: shape in surface.shapes and field in surface.shapes[shape]


def posted(path: str) -> Holds:
    return lambda surface: surface.route("POST", path) is not None


def got(path: str) -> Holds:
    return lambda surface: surface.route("GET", path) is not None


def takes(path: str, *fields: str) -> Holds:
    return lambda surface: {*fields} <= {*body(surface, path)}


def asks(path: str, *names: str) -> Holds:
    return lambda surface: {*names} <= {*query(surface, path)}


def defaults(path: str, field: str, value: object) -> Holds:
    return lambda surface: field in body(surface, path) and body(surface, path)[field].default == value


def bodiless(path: str) -> Holds:
    """A post without a body is taken."""

    def holds(surface: Surface) -> bool:
        route = surface.route("POST", path)
        return route is not None and (route.body is None or not route.body.required)

    return holds


def unlisted(path: str, *names: str) -> Holds:
    """These are taken, and openapi.json does not say so."""

    def holds(surface: Surface) -> bool:
        route = surface.route("POST", path)
        if route is None:
            return False
        fields = surface.body_fields(route) if route.body is not None and not route.body.listed else ()
        return {*names} <= {field.name for field in (*route.query_by_hand, *fields)}

    return holds


def gated(word: str, *calls: tuple[str, str]) -> Holds:
    """Served, but not by a server that was launched without `word`."""
    return lambda surface: all(
        surface.route(*call) is not None and surface.route(*call, LAUNCHED - {word}) is None for call in calls
    )


# --- the tables -------------------------------------------------------------------------------------------------------

DEV, PROFILER = "VLLM_SERVER_DEV_MODE", "profiler_config"
WORDS = ["output_dir", "start_step", "num_steps", "activities", "with_stack", "record_shapes", "profile_by_stage"]
WORDS += ["merge_profiles", "profile_prefix", "profile_stages"]
DISK, TENSOR, LABEL = "/update_weights_from_disk", "/update_weights_from_tensor", "/update_weight_version"
MODES = "Literal['abort', 'retract', 'in_place']"
CALLS = [("POST", "/sleep"), ("POST", "/wake_up"), ("POST", "/reset_prefix_cache"), ("POST", "/collective_rpc")]
CALLS += [("GET", "/is_sleeping"), ("GET", "/server_info")]
PROFILES = [("POST", "/start_profile"), ("POST", "/stop_profile")]

SGLANG = [
    Fact("start_profile takes ten words", None, "0.5.15", lambda s: parameters(s, "start_profile") == WORDS),
    Fact("start_profile takes one request", "0.5.15", None, lambda s: parameters(s, "start_profile") == ["req"]),
    Fact("stop_profile takes nothing", None, None, lambda s: parameters(s, "stop_profile") == []),
    Fact("a profile's body is ProfileReqInput", None, "0.5.15", lambda s: "ProfileReqInput" in s.shapes),
    Fact("requests are Structs", "0.5.15", None, lambda s: s.shapes["AbortReq"].form == "struct"),
    Fact("ProfileReq has `type`", None, "0.5.15", has("ProfileReq", "type")),
    Fact("ProfileReq has `req_type`", "0.5.15", None, has("ProfileReq", "req_type")),
    Fact("a profile's id can be chosen over HTTP", "0.5.15", None, takes("/start_profile", "profile_id")),
    Fact("a profile's folder, steps and prefix can be chosen", None, None, takes("/start_profile", *WORDS)),
    Fact("a profile can be annotated", "0.5.20", None, takes("/start_profile", "detailed_annotations")),
    Fact("a profile needs no body", None, None, bodiless("/start_profile")),
    Fact("GET starts a profile too", None, None, got("/start_profile")),
    Fact("GET releases memory too", None, None, got("/release_memory_occupation")),
    Fact("GET flushes too", None, None, got("/flush_cache")),
    Fact("a flush can wait, over HTTP", "0.5.10", None, lambda s: query(s, "/flush_cache") == {"timeout": 0.0}),
    Fact("a flush can wait, in process", "0.5.10", None, lambda s: parameters(s, "flush_cache") == ["timeout_s"]),
    Fact("a pause aborts unless told not to", None, None, defaults("/pause_generation", "mode", "abort")),
    Fact("a pause has three modes", None, None, lambda s: body(s, "/pause_generation")["mode"].type == MODES),
    Fact("a pause takes no empty body", None, None, lambda s: taken(s, "/pause_generation").required),
    Fact("to continue takes no empty body", None, None, lambda s: taken(s, "/continue_generation").required),
    Fact("to release takes no empty body", None, None, lambda s: taken(s, "/release_memory_occupation").required),
    Fact("to resume takes no empty body", None, None, lambda s: taken(s, "/resume_memory_occupation").required),
    Fact("to abort takes no empty body", None, None, lambda s: taken(s, "/abort_request").required),
    Fact("to continue may empty torch's cache", "0.5.12", None, takes("/continue_generation", "torch_empty_cache")),
    Fact("memory has tags", None, None, takes("/release_memory_occupation", "tags")),
    Fact("abort_request is not async", None, None, lambda s: not s.methods["abort_request"].asynchronous),
    Fact("the pause can be seen in process", None, None, lambda s: "is_pause" in s.attributes),
    Fact("the handle loop can be started", None, None, method("auto_create_handle_loop")),
    Fact("a version aborts unless told not to", None, None, defaults(LABEL, "abort_all_requests", True)),
    Fact("a version can be set in process", "0.5.19", None, method("update_weight_version")),
    Fact("weights from disk carry a manifest", "0.5.9", None, takes(DISK, "manifest")),
    Fact("weights from disk flush unless told not to", None, None, defaults(DISK, "flush_cache", True)),
    Fact("weights from disk abort only when told to", None, None, defaults(DISK, "abort_all_requests", False)),
    Fact("weights from disk carry a version", None, None, takes(DISK, "weight_version")),
    Fact("a session of updates begins", "0.5.21", None, posted("/begin_weight_update")),
    Fact("a session of updates ends", "0.5.21", None, posted("/end_weight_update")),
    Fact("a session begins in process", "0.5.21", None, method("begin_weight_update")),
    Fact("a draft model is left out by a flag", "0.5.10", "0.5.21", takes(TENSOR, "disable_draft_model")),
    Fact("models are selected", "0.5.21", None, takes(TENSOR, "selector")),
    Fact("a check is of the checksum", "0.5.14", None, defaults("/weights_checker", "action", "checksum")),
    Fact("a check needs no body", "0.5.14", None, bodiless("/weights_checker")),
    Fact("a check forgives quantization", "0.5.15", None, takes("/weights_checker", "allow_quant_error")),
    Fact("there is /ready", "0.5.20", None, got("/ready")),
    Fact("there is /ping", None, None, got("/ping")),
    Fact("there is /server_info", None, None, got("/server_info")),
    Fact("there is /model_info", None, None, got("/model_info")),
    Fact("there is /v1/loads", "0.5.9", None, got("/v1/loads")),
    Fact("there is /get_load", None, "0.5.21", got("/get_load")),
    Fact("there is /weight_version", None, "0.5.21", got("/weight_version")),
]

VLLM = [
    Fact("a pause waits by a flag, over HTTP", None, "0.32.0", asks("/pause", "wait_for_inflight_requests")),
    Fact("a pause waits by a flag", None, "0.32.0", with_parameter("pause_generation", "wait_for_inflight_requests")),
    Fact("a pause has a mode, over HTTP", "0.16.0", None, lambda s: query(s, "/pause").get("mode") == "abort"),
    Fact("a pause has a mode", "0.16.0", None, with_parameter("pause_generation", "mode")),
    Fact("a pause clears caches", None, None, lambda s: query(s, "/pause")["clear_cache"] is True),
    Fact("pause and resume need dev mode", "0.16.0", None, gated(DEV, ("POST", "/pause"), ("POST", "/resume"))),
    Fact("sleep, wake, rpc and server_info need dev mode", None, None, gated(DEV, *CALLS)),
    Fact("the version needs nothing", None, None, lambda s: s.route("GET", "/version", frozenset()) is not None),
    Fact("a profile needs a profiler", None, None, gated(PROFILER, *PROFILES)),
    Fact("a profile needs no dev mode", None, None, lambda s: not gated(DEV, *PROFILES)(s)),
    Fact("a profile needs no body", None, None, bodiless("/start_profile")),
    Fact("a profile has limits, over HTTP", "0.32.0", None, takes("/start_profile", "max_iterations")),
    Fact("a profile has a prefix, over HTTP", "0.32.0", None, takes("/start_profile", "profile_prefix")),
    Fact("a profile has limits", "0.32.0", None, with_parameter("start_profile", "max_iterations")),
    Fact("a profile has a prefix", "0.17.0", None, with_parameter("start_profile", "profile_prefix")),
    Fact("sleep has a level", None, None, asks("/sleep", "level")),
    Fact("sleep has a mode, over HTTP", "0.17.0", None, asks("/sleep", "mode")),
    Fact("sleep has a mode", "0.17.0", None, with_parameter("sleep", "mode")),
    Fact("sleep does not list what it takes", None, "0.32.0", unlisted("/sleep", "level")),
    Fact("wake_up does not list what it takes", None, None, unlisted("/wake_up", "tags")),
    Fact("collective_rpc does not list what it takes", None, None, unlisted("/collective_rpc", "method", "kwargs")),
    Fact("an rpc needs a method", None, None, lambda s: body(s, "/collective_rpc")["method"].required),
    Fact("memory of the KV cache is released alone", "0.31.0", None, posted("/release_kv_cache_memory")),
    Fact("weights are transferred", "0.16.0", None, takes("/update_weights", "update_info")),
    Fact("a transfer is set up", "0.16.0", None, takes("/init_weight_transfer_engine", "init_info")),
    Fact("a transfer is set up in process", "0.16.0", None, method("init_weight_transfer_engine")),
    Fact("a transfer does not list what it takes", "0.16.0", "0.32.0", unlisted("/update_weights", "update_info")),
    Fact("a transfer is shut down", "0.32.0", None, method("shutdown_weight_transfer_engine")),
    Fact("a session of updates starts", "0.21.0", None, posted("/start_weight_update")),
    Fact("a session needs no body", "0.24.0", None, bodiless("/start_weight_update")),
    Fact("a session asks for a format", "0.21.0", "0.24.0", takes("/start_weight_update", "is_checkpoint_format")),
    Fact("a session of updates ends, in process", "0.21.0", None, method("finish_weight_update")),
    Fact("a session ends with a version", "0.29.0", None, takes("/finish_weight_update", "weight_version")),
    Fact("a session may end without a body", "0.21.0", None, bodiless("/finish_weight_update")),
    Fact("a draft's weights have a session", "0.26.0", None, posted("/start_draft_weight_update")),
    Fact("the version of the weights is told", "0.29.0", None, got("/weight_info")),
    Fact("the version of the weights is set", "0.29.0", None, takes("/update_weight_version", "new_version")),
    Fact("requests are aborted alone", "0.26.0", None, takes("/abort_requests", "request_ids")),
    Fact("weights are checked", "0.32.0", None, takes("/weight_checker", "action", "baseline")),
    Fact("the prefix cache has a connector", None, None, with_parameter("reset_prefix_cache", "reset_connector")),
    Fact("over HTTP it is external", None, None, asks("/reset_prefix_cache", "reset_external")),
    Fact("running requests can be preempted", None, None, asks("/reset_prefix_cache", "reset_running_requests")),
    Fact("the encoder cache is reset", "0.16.0", None, posted("/reset_encoder_cache")),
    Fact("the world's size is told", "0.16.0", None, got("/get_world_size")),
]

FACTS: dict[wheels.Kind, list[Fact]] = {"sglang": SGLANG, "vllm": VLLM}
