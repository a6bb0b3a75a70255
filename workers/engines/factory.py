"""Makes the engine that a command line names: one of ours, an installed backend, or `module:Class`."""

import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from schemas.errors import ConfigError
from schemas.identity import Digests, Identity
from schemas.profiler.conversion import did_you_mean
from schemas.wire import PeerFound
from workers.engine import Engine, EngineView
from workers.engines.api_key import api_key

OURS: Final = ("tiny", "sglang", "vllm")
"""Engines that an agent can command from another process, or that it brings along."""
GROUP: Final = "rolloutctl.engines"
"""Entry points of installed backends."""
METHODS: Final = ("open", "observe", "perform", "close")
"""What a backend must have (`workers.engine.Engine`)."""


class EngineOptions(Struct, frozen=True, kw_only=True):
    """What a command line knows about the engine. A backend's constructor gets those that it names as parameters.

    Attributes:
        identity: The node.
        checkpoints: Root of the paths in weight syncs.
        traces: Root of the directories of profiling sessions.
        url: Address of the engine's server.
        key_file: File with the server's API key; None for the one in the environment, if any.
        digests: sglang, vllm, tiny: after which loads the engine is asked for a digest of its weights.
        serve: tiny: address for its clients.
        seed: tiny: seed of its initial weights.
        copied: sglang: the server whose weights its launch copies.
    """

    identity: Identity
    checkpoints: Path
    traces: Path
    url: str | None = None
    key_file: Path | None = None
    digests: Digests = "announced"
    serve: str | None = None
    seed: int = 0
    copied: PeerFound = PeerFound()


CONSTRUCTOR_PARAMETERS: Final = ("identity", "checkpoints", "traces", "url", "key")
"""Parameters that the constructor of a backend may have. `key` is the API key of the server."""


def make_engine(name: str, options: EngineOptions) -> Engine:
    """Return the engine of that name, not opened yet.

    Args:
        name: `tiny`, `sglang`, `vllm`, an entry point, or `module:Class`.
        options: Values for its constructor, which is given those that it names.

    Raises:
        ConfigError: There is none of that name, it does not fulfil the protocol, or it can't be made of these options.
    """
    if name == "tiny":
        from workers.engines.tiny.engine import TinyEngine

        return TinyEngine(
            options.identity,
            checkpoints=options.checkpoints,
            traces=options.traces,
            digests=options.digests,
            serve=options.serve,
            seed=options.seed,
        )
    if name in OURS:
        return _served_engine(name, options)
    engine: Engine = _construct(name, _factory(name), options)
    lacking = (method for method in METHODS if not inspect.iscoroutinefunction(getattr(engine, method, None)))
    if faults := [f"it has no `async def {method}`" for method in lacking]:
        raise ConfigError(
            f"--engine {name}: {type(engine).__name__} is no engine backend: {'; '.join(faults)}. See docs/backends.md."
        )
    return engine


def make_observer(name: str, options: EngineOptions) -> EngineView:
    """Return the engine of that name for an agent that only observes.

    Those of servers come without the calls that change an engine. Of any other backend such an agent calls `open`,
    `observe` and `close` alone. Raises ConfigError.
    """
    if name not in ("sglang", "vllm"):
        return make_engine(name, options)
    from workers.engines.observed import ObservedEngine
    from workers.engines.sglang.launch import SGLANG
    from workers.engines.sglang.server import SGLangReader
    from workers.engines.vllm.launch import VLLM
    from workers.engines.vllm.server import VLLMReader

    identity, url, key, root = options.identity, _url(name, options), api_key(options.key_file), options.checkpoints
    if name == "vllm":
        return ObservedEngine(VLLM, identity, VLLMReader(url, key) if url else None, checkpoints=root)
    return ObservedEngine(SGLANG, identity, SGLangReader(url, key) if url else None, checkpoints=root)


def _url(name: str, options: EngineOptions) -> str | None:
    if options.url is None and options.identity.node_rank == 0:
        raise ConfigError(f"--engine {name} on node rank 0 needs --url of its server, http://HOST:PORT.")
    return options.url


def _served_engine(name: str, options: EngineOptions) -> Engine:
    from workers.engines.sglang.engine import SGLangEngine
    from workers.engines.sglang.server import SGLangServer
    from workers.engines.vllm.engine import VLLMEngine
    from workers.engines.vllm.server import VLLMServer

    identity, url, key = options.identity, _url(name, options), api_key(options.key_file)
    roots = {"checkpoints": options.checkpoints, "traces": options.traces}
    digests, copied = options.digests, options.copied
    if name == "vllm":
        return VLLMEngine(identity, VLLMServer(url, key) if url else None, **roots, digests=digests, copied=copied)
    return SGLangEngine(identity, SGLangServer(url, key) if url else None, **roots, digests=digests, copied=copied)


def _factory(name: str) -> Callable[..., Any]:
    """Find what makes the engine: a class, or a function that returns one."""
    module, colon, attribute = name.partition(":")
    if colon:
        return _attribute(name, module, attribute)
    from importlib.metadata import entry_points  # 1.6 MB that an agent with one of our engines does not need

    installed = {point.name: point for point in entry_points(group=GROUP)}
    if name in installed:
        return _attribute(f"{name} ({installed[name].value})", installed[name].module, installed[name].attr)
    hint = did_you_mean(name, [*OURS, *installed])
    others = f"an installed backend ({', '.join(sorted(installed)) or 'none is installed'})"
    raise ConfigError(
        f"--engine {name}: there is no such engine. Give {', '.join(OURS)}, {others} or module:Class{hint}"
    )


def _attribute(name: str, module: str, attribute: str) -> Callable[..., Any]:
    try:
        found: Any = import_module(module)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(f"--engine {name}: importing {module} failed: {type(error).__name__}: {error}.") from error
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigError(f"--engine {name}: {module} has no class or function {attribute or 'after the colon'}.")
    made: Callable[..., Any] = found
    return made


def _construct(name: str, factory: Callable[..., Any], options: EngineOptions) -> Any:
    parameters = inspect.signature(factory).parameters.values()
    named = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    key = api_key(options.key_file) if "key" in named else None
    values = (options.identity, options.checkpoints, options.traces, options.url, key)
    given = zip(CONSTRUCTOR_PARAMETERS, values, strict=True)
    offered = {each: value for each, value in given if value is not None}
    if "url" in offered and "url" not in named:
        raise ConfigError(f"--engine {name}: --url was given, and its constructor has no parameter `url`.")
    try:
        return factory(**{each: value for each, value in offered.items() if each in named})
    except Exception as error:  # a user's constructor may raise anything
        raise ConfigError(f"--engine {name}: its constructor raised {type(error).__name__}: {error}") from error
