"""Makes the engine that a command line names: one of ours, an installed adapter, or `module:Class`."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from schemas.errors import ConfigError
from schemas.identity import Identity
from workers.engine import Engine, EngineView
from workers.engines.api_key import api_key

OURS: Final = ("tiny", "sglang", "vllm")
"""Engines that an agent can command from another process, or that it brings along."""
GROUP: Final = "rolloutctl.engines"
"""Entry points of installed adapters."""
METHODS: Final[Mapping[str, tuple[str, ...]]] = {
    "open": (),
    "observe": (),
    "perform": ("call", "timeout_s"),
    "close": (),
}
"""What an adapter must have (`workers.engine.Engine`), with the parameters of each method."""


class EngineOptions(Struct, frozen=True, kw_only=True):
    """What a command line knows about the engine. An adapter's constructor gets those that it names as parameters.

    Attributes:
        identity: The node.
        checkpoints: Root of the paths in weight syncs.
        traces: Root of the directories of profiling sessions.
        url: Address of the engine's server.
        key_file: File with the server's API key; None for the one in the environment, if any.
        serve: tiny: address for its clients.
        seed: tiny: seed of its initial weights.
    """

    identity: Identity
    checkpoints: Path
    traces: Path
    url: str | None = None
    key_file: Path | None = None
    serve: str | None = None
    seed: int = 0


OFFERED: Final = ("identity", "checkpoints", "traces", "url", "key")
"""Parameters that the constructor of an adapter may have. `key` is the API key of the server."""
_REMEDIES: Final = {"url": "give --url", "key": "give --api-key-file"}


def make_engine(name: str, options: EngineOptions) -> Engine:
    """Return the engine of that name, not opened yet.

    Raises:
        ConfigError: There is none of that name, it does not fulfil the protocol, or it can't be made of these options.
    """
    if name == "tiny":
        from workers.engines.tiny.engine import TinyEngine

        return TinyEngine(
            options.identity,
            checkpoints=options.checkpoints,
            traces=options.traces,
            serve=options.serve,
            seed=options.seed,
        )
    if name in OURS:
        return _served_engine(name, options)
    engine = _construct(name, _factory(name), options)
    if faults := list(protocol_faults(engine)):
        raise ConfigError(
            f"--engine {name}: {type(engine).__name__} is no engine adapter: {'; '.join(faults)}. See docs/adapters.md."
        )
    adapter: Engine = engine
    return adapter


def view_engine(name: str, options: EngineOptions) -> EngineView:
    """Return the engine of that name for an agent that only observes.

    Ours come without the calls that change an engine. Of an adapter of somebody else's such an agent calls `open`,
    `observe` and `close` alone.

    Raises:
        ConfigError: As `make_engine` does, or it needs an address.
    """
    if name not in OURS:
        return make_engine(name, options)
    from workers.engines.observed import ObservedEngine
    from workers.engines.sglang.launch import SGLANG
    from workers.engines.sglang.server import SGLangReader
    from workers.engines.tiny.observed import ObservedTiny
    from workers.engines.vllm.launch import VLLM
    from workers.engines.vllm.server import VLLMReader

    identity, url, key = options.identity, options.url, api_key(options.key_file)
    if url is None and identity.node_rank == 0:
        raise ConfigError(f"--observe --engine {name} on node rank 0 needs --url of its server.")
    if name == "vllm":
        return ObservedEngine(VLLM, identity, VLLMReader(url, key) if url else None)
    if name == "sglang":
        return ObservedEngine(SGLANG, identity, SGLangReader(url, key) if url else None)
    return ObservedTiny(url)


def protocol_faults(engine: object) -> Iterator[str]:
    """Yield what an adapter lacks of `workers.engine.Engine`, one clause for each method."""
    for name, parameters in METHODS.items():
        wanted = f"async def {name}({', '.join(('self', *parameters))})"
        method = getattr(engine, name, None)
        if method is None:
            yield f"it has no `{wanted}`"
        elif not callable(method) or not inspect.iscoroutinefunction(method):
            yield f"its `{name}` is not `{wanted}`"
        else:
            try:
                inspect.signature(method).bind(*parameters)
            except TypeError as error:
                yield f"its `{name}` does not take what `{wanted}` does ({error})"


def _served_engine(name: str, options: EngineOptions) -> Engine:
    from workers.engines.sglang.engine import SGLangEngine
    from workers.engines.sglang.server import SGLangServer
    from workers.engines.vllm.engine import VLLMEngine
    from workers.engines.vllm.server import VLLMServer

    identity, url, key = options.identity, options.url, api_key(options.key_file)
    if url is None and identity.node_rank == 0:
        raise ConfigError(f"--engine {name} on node rank 0 needs --url http://HOST:PORT of its server.")
    roots = {"checkpoints": options.checkpoints, "traces": options.traces}
    if name == "vllm":
        return VLLMEngine(identity, VLLMServer(url, key) if url else None, **roots)
    return SGLangEngine(identity, SGLangServer(url, key) if url else None, **roots)


def _factory(name: str) -> Callable[..., Any]:
    """Find what makes the engine: a class, or a function that returns one."""
    module, colon, attribute = name.partition(":")
    if colon:
        return _attribute(name, module, attribute)
    from importlib.metadata import entry_points  # 1.6 MB that an agent with one of our engines does not need

    installed = {point.name: point for point in entry_points(group=GROUP)}
    if name in installed:
        return _attribute(f"{name} ({installed[name].value})", installed[name].module, installed[name].attr)
    near = get_close_matches(name, [*OURS, *installed], 1)
    hint = f" Did you mean {near[0]}?" if near else ""
    others = f"an installed adapter ({', '.join(sorted(installed)) or 'none is installed'})"
    raise ConfigError(
        f"--engine {name}: there is no such engine. Give {', '.join(OURS)}, {others} or module:Class.{hint}"
    )


def _attribute(name: str, module: str, attribute: str) -> Callable[..., Any]:
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"--engine {name}: there is no module {error.name}. Install it, or name its folder in PYTHONPATH."
            ) from None
        raise ConfigError(f"--engine {name}: importing {module} failed: {error}.") from error
    except Exception as error:  # of anybody's module
        raise ConfigError(f"--engine {name}: importing {module} failed: {type(error).__name__}: {error}.") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, [each for each in vars(found) if not each.startswith("_")], 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"--engine {name}: {module} has no {part or 'class (nothing follows the colon)'}.{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"--engine {name}: {attribute} is a {type(found).__name__}, not a class or function.")
    made: Callable[..., Any] = found
    return made


def _construct(name: str, factory: Callable[..., Any], options: EngineOptions) -> Any:
    parameters = inspect.signature(factory).parameters.values()
    named = {each.name: each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    offered = {each: value for each, value in _offered(options, "key" in named).items() if value is not None}
    for parameter in named.values():
        if parameter.default is parameter.empty and parameter.name not in offered:
            remedy = _REMEDIES.get(parameter.name, f"it can have {', '.join(OFFERED)}; bind others in a function")
            raise ConfigError(f"--engine {name}: its constructor needs `{parameter.name}`: {remedy}.")
    if "url" in offered and "url" not in named:
        raise ConfigError(f"--engine {name}: --url was given, and its constructor has no parameter `url`.")
    try:
        return factory(**{each: value for each, value in offered.items() if each in named})
    except Exception as error:  # of anybody's constructor
        raise ConfigError(f"--engine {name}: its constructor raised {type(error).__name__}: {error}") from error


def _offered(options: EngineOptions, with_key: bool) -> dict[str, object]:
    """The options by the names in `OFFERED`."""
    roots = {"identity": options.identity, "checkpoints": options.checkpoints, "traces": options.traces}
    return {**roots, "url": options.url, "key": api_key(options.key_file) if with_key else None}
