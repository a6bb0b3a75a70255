"""Another project's `schemas` or `workers` on the path is refused by name; ours load nothing heavy."""

import subprocess
import sys
from pathlib import Path
from shutil import copy

import pytest

from controlplane.shadowing import find_foreign, refuse_foreign
from tests.running import PYTEST, python

HOME = Path(__file__).parents[2]


def in_folder(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter that was started in a directory which is therefore first on its import path."""
    return python("-c", code, cwd=folder)


def package(folder: Path, text: str = "") -> Path:
    """A directory that is a regular package; its file."""
    folder.mkdir(parents=True)
    file = folder / "__init__.py"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("file", "use"),
    [
        ("schemas.py", "from controlplane import ControlPlane"),
        ("schemas/__init__.py", "from workers import Agent"),
        ("workers.py", "import controlplane.cli"),
        ("workers/__init__.py", "import controlplane.cli"),
    ],
)
def test_what_needs_ours_refuses_a_foreign_one_by_the_name_of_its_file(tmp_path: Path, file: str, use: str) -> None:
    foreign = tmp_path / file
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("print('the foreign code ran')")
    run = in_folder(tmp_path, use)
    assert (run.returncode, run.stdout) == (1, "")
    for text in ("ImportError", str(foreign), str(HOME / Path(file).parts[0].removesuffix(".py")), "Rename"):
        assert text in run.stderr


def test_verl_names_the_foreign_package_when_our_trainer_is_asked_for(tmp_path: Path) -> None:
    file = package(tmp_path / "workers")
    code = (
        "import types; from controlplane.trainers.verl.register import register\n"
        "class PPOTrainer: ...\n"
        "trainers = {}\n"
        "verl = types.SimpleNamespace(PPOTrainer=PPOTrainer)\n"
        "verl.register_trainer = lambda name: lambda cls: trainers.setdefault(name, cls)\n"
        "register(verl); trainers['rolloutctl_sync'](None)"
    )
    run = in_folder(tmp_path, code)
    assert "RuntimeError" in run.stderr and str(file) in run.stderr


def test_a_foreign_package_that_is_loaded_already_is_refused(tmp_path: Path) -> None:
    file = package(tmp_path / "schemas")
    run = in_folder(tmp_path, "import schemas; from controlplane import ControlPlane")
    assert "ImportError" in run.stderr
    assert str(file) in run.stderr


def test_nothing_is_refused_before_it_is_used(tmp_path: Path) -> None:
    package(tmp_path / "schemas")
    run = in_folder(tmp_path, "import controlplane, workers")
    assert run.returncode == 0, run.stderr


def test_a_trainer_with_a_package_workers_of_its_own_uses_the_bus(tmp_path: Path) -> None:
    package(tmp_path / "workers", "MINE = 1")
    run = in_folder(tmp_path, "from controlplane import ControlPlane; import workers; print(workers.MINE)")
    assert (run.returncode, run.stdout.strip()) == (0, "1"), run.stderr


NAMES = ("controlplane", "schemas", "workers")


@pytest.mark.parametrize("first", [True, False])
def test_folders_without_init_go_on_working_beside_ours(tmp_path: Path, first: bool) -> None:
    for name in NAMES:
        (tmp_path / "repository" / name).mkdir(parents=True)
        (tmp_path / "repository" / name / "mine.py").write_text(f"VALUE = '{name}'")
    order = "insert(0, %r)" if first else "append(%r)"
    code = f"import sys; sys.path.{order % str(tmp_path / 'repository')}\n"
    code += "".join(f"from {name}.mine import VALUE as {name}_value\n" for name in NAMES)
    code += "from controlplane import ControlPlane; from workers import Agent\n"
    code += f"import controlplane.cli; print({', '.join(f'{name}_value' for name in NAMES)})"
    run = in_folder(tmp_path, code)
    assert (run.returncode, run.stdout.split()) == (0, [*NAMES]), run.stderr


@pytest.mark.parametrize(
    ("names", "regular"),
    [
        pytest.param(NAMES, True, id="all"),
        pytest.param(NAMES, False, id="folders", marks=pytest.mark.long),
        pytest.param(("workers",), True, id="one", marks=pytest.mark.long),
    ],
)
def test_a_repository_that_never_uses_us_runs_its_tests(tmp_path: Path, names: tuple[str, ...], regular: bool) -> None:
    for name in names:
        (tmp_path / name).mkdir()
        if regular:
            (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "mine.py").write_text("VALUE = 7")
        (tmp_path / f"test_{name}.py").write_text(f"from {name}.mine import VALUE\n\ndef test(): assert VALUE == 7")
    run = python(*PYTEST, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{len(names)} passed" in run.stdout and "warning" not in run.stdout and run.stderr == ""


@pytest.mark.parametrize("name", ["controlplane", "workers"])
def test_logs_are_not_replayed_by_foreign_code(tmp_path: Path, name: str) -> None:
    file = package(tmp_path / name)
    copy(HOME / "tests" / "replays" / "killed.db", tmp_path)
    run = python(*PYTEST, "--replay-log", "killed.db", cwd=tmp_path)
    assert run.returncode == 4 and "Traceback" not in run.stderr
    assert "--replay-log: " in run.stderr and str(file) in run.stderr


def test_a_namespace_package_is_foreign_where_python_would_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there" / "namespace_of_no_project").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "there"))
    place = find_foreign("namespace_of_no_project", home=str(tmp_path / "here"))
    assert place == str(tmp_path / "there" / "namespace_of_no_project")


def test_a_file_one_level_below_our_home_is_not_taken_for_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "below" / "package_of_no_project.py"
    file.parent.mkdir()
    file.touch()
    monkeypatch.syspath_prepend(str(file.parent))
    assert find_foreign("package_of_no_project", home=str(tmp_path)) == str(file)


def test_a_linked_installation_is_ours_under_both_spellings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path / "real" / "package_of_no_project")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.syspath_prepend(str(tmp_path / "link"))
    assert find_foreign("package_of_no_project", home=str(tmp_path / "real")) is None
    assert find_foreign("package_of_no_project", home=str(tmp_path / "link")) is None


def test_a_package_that_is_nowhere_is_not_shadowed() -> None:
    refuse_foreign(("package_that_is_nowhere",))


def test_a_module_made_by_hand_is_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    made = type(sys)("package_of_no_project")
    monkeypatch.setitem(sys.modules, "package_of_no_project", made)
    with pytest.raises(ImportError, match="has no file") as refused:
        refuse_foreign(("package_of_no_project",))
    assert refused.value.name == "package_of_no_project"


def test_python_m_controlplane_is_the_command_line() -> None:
    run = python("-m", "controlplane", "--version")
    assert (run.returncode, run.stdout.partition(",")[0]) == (0, "rolloutctl"), run.stderr


def test_our_packages_load_no_engine_and_no_tensor_library(tmp_path: Path) -> None:
    heavy = ["torch", "numpy", "safetensors", "ray", "sglang", "vllm", "aiohttp", "fastapi", "uvicorn", "pytest"]
    code = f"import sys, controlplane, schemas, workers; print([one for one in {heavy} if one in sys.modules])"
    run = in_folder(tmp_path, code)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"
