"""What `--engine` may name, and one clear line for whatever it may not."""

from pathlib import Path

import pytest

from schemas.errors import ConfigError
from schemas.events import EngineCall, Observation, Returned
from schemas.identity import Identity
from tests.running import rolloutctl
from workers.engines import factory
from workers.engines.factory import EngineOptions, make_engine

OPTIONS = EngineOptions(identity=Identity(replica=0, node_rank=0), checkpoints=Path("ckpt"), traces=Path("traces"))
WITH_URL = EngineOptions(
    identity=Identity(replica=0, node_rank=0), checkpoints=Path("ckpt"), traces=Path("traces"), url="http://here:1"
)


class Whole:
    """A backend that does nothing, of the right shape."""

    def __init__(self, identity: Identity, checkpoints: Path) -> None:
        self.identity, self.checkpoints = identity, checkpoints

    async def open(self) -> None: ...

    async def observe(self) -> Observation:
        return Observation(engine="whole 1", tokenizer="unknown")

    async def perform(self, call: EngineCall, timeout_s: float) -> Returned:
        return Returned()

    async def close(self) -> None: ...


class Served(Whole):
    def __init__(self, url: str, key: str | None = None) -> None:
        self.url, self.key = url, key


class Needy(Whole):
    def __init__(self, model: str) -> None: ...


class Raising(Whole):
    def __init__(self) -> None:
        raise RuntimeError("no such handle")


class Halved:
    async def open(self) -> None: ...

    def observe(self) -> Observation:
        return Observation(engine="halved", tokenizer="unknown")

    async def perform(self, call: EngineCall) -> Returned:
        return Returned()


def test_a_class_gets_the_options_that_it_names() -> None:
    made = make_engine(f"{__name__}:Whole", OPTIONS)
    assert isinstance(made, Whole) and made.identity == OPTIONS.identity and made.checkpoints == Path("ckpt")


def test_a_class_gets_the_url_and_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUTCTL_ENGINE_API_KEY", "secret")
    made = make_engine(f"{__name__}:Served", WITH_URL)
    assert isinstance(made, Served) and (made.url, made.key) == ("http://here:1", "secret")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that declares a backend, as an installer leaves it."""
    metadata = tmp_path / "whole_backend-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: whole-backend\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{factory.GROUP}]\nwhole = {__name__}:Whole\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_an_installed_backend_is_found_by_its_entry_point() -> None:
    assert isinstance(make_engine("whole", OPTIONS), Whole)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vlm", r"no such engine\. Give tiny, sglang, vllm, an installed backend \(whole\) or .*; did you mean vllm\?"),
        ("whol", "did you mean whole?"),
        ("no_such_module:Engine", "No module named 'no_such_module'"),
        ("tests.no_such:Engine", "No module named 'tests.no_such'"),
        (f"{__name__}:Hole", "has no class or function Hole"),
        (f"{__name__}:", "has no class or function after the colon"),
        (f"{__name__}:OPTIONS", "has no class or function OPTIONS"),
        (f"{__name__}:Raising", "its constructor raised RuntimeError: no such handle"),
        (f"{__name__}:Needy", "its constructor raised TypeError: .* missing 1 required positional argument: 'model'"),
        (f"{__name__}:Served", "its constructor raised TypeError: .* missing 1 required positional argument: 'url'"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_a_wrong_name_is_one_clear_line(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as raised:
        make_engine(name, OPTIONS)
    assert "\n" not in str(raised.value) and str(raised.value).startswith(f"--engine {name}")


def test_a_url_that_no_backend_takes_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--url was given, and its constructor has no parameter `url`"):
        make_engine(f"{__name__}:Whole", WITH_URL)


def test_each_method_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError) as raised:
        make_engine(f"{__name__}:Halved", OPTIONS)
    text = str(raised.value)
    assert "it has no `async def observe`; it has no `async def close`. See docs/backends.md" in text


def test_the_agent_says_it_before_it_dials_the_bus(tmp_path: Path) -> None:
    done = rolloutctl(
        *("agent", "--bus", "tcp://127.0.0.1:1", "--replica", 0, "--engine", "vlm", "--state-dir", tmp_path)
    )
    assert done.returncode == 2 and "did you mean vllm?" in done.stderr and done.stderr.count("\n") == 1
