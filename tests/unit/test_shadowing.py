"""Another project's `schemas` or `workers` on the path is refused by name; ours load nothing heavy."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from controlplane.shadowing import find_foreign, refuse_foreign
from tests.running import python

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


@pytest.mark.parametrize("name", ["schemas", "workers"])
@pytest.mark.parametrize("kind", ["module", "package"])
def test_a_foreign_package_is_refused_by_the_name_of_its_file(tmp_path: Path, name: str, kind: str) -> None:
    shout = "print('the foreign code ran')"
    if kind == "module":
        file = tmp_path / f"{name}.py"
        file.write_text(shout)
    else:
        file = package(tmp_path / name, shout)
    run = in_folder(tmp_path, "import controlplane")
    assert (run.returncode, run.stdout) == (1, "")
    for text in ("ImportError", str(file), str(HOME / name), "Rename it"):
        assert text in run.stderr


def test_a_foreign_package_that_is_loaded_already_is_refused(tmp_path: Path) -> None:
    file = package(tmp_path / "schemas")
    run = in_folder(tmp_path, "import schemas; import controlplane")
    assert "ImportError" in run.stderr
    assert str(file) in run.stderr


@pytest.mark.parametrize("kind", ["module", "package"])
def test_workers_refuse_foreign_schemas_too(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "schemas.py" if kind == "module" else package(tmp_path / "schemas")
    file.touch()
    run = in_folder(tmp_path, "import workers")
    assert "ImportError" in run.stderr
    assert str(file) in run.stderr


def test_a_directory_without_init_is_no_foreign_package(tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()
    (tmp_path / "schemas").mkdir()
    run = in_folder(tmp_path, "import controlplane, workers; print(workers.__file__)")
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(HOME / "workers" / "__init__.py")


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


@pytest.mark.parametrize("name", ["controlplane", "schemas"])
def test_every_public_name_is_there(name: str) -> None:
    package = import_module(name)
    assert [public for public in package.__all__ if not hasattr(package, public)] == []
    assert not hasattr(package, "no_such_name")


def test_our_packages_load_no_engine_and_no_tensor_library(tmp_path: Path) -> None:
    heavy = ["torch", "numpy", "safetensors", "ray", "sglang", "vllm", "aiohttp", "fastapi", "uvicorn", "pytest"]
    code = f"import sys, controlplane, schemas, workers; print([one for one in {heavy} if one in sys.modules])"
    run = in_folder(tmp_path, code)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"
