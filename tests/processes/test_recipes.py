"""The recipes in docs/recipes: what they say to `rolloutctl` is what it takes, and the scripts in them run."""

import configparser
import json
import os
import re
import shlex
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from controlplane.cli.__main__ import cli
from tests.pages import blocks, module_of
from tests.running import ROOT, environment, python, rolloutctl

RECIPES = ROOT / "docs/recipes"
VARIABLE = re.compile(r"\$\(\w+\)|\$\{[^}]*\}|\$\w+")
ENGINE = re.compile(r"--engine sglang .* --port 30000", re.DOTALL)
NESTED = re.compile(r"""bash -c 'exec (.*?) "\$@"' \w+""")
ENDS = {"&", "&&", "|", "||", ";", ">", ")"}


def text_of(name: str) -> str:
    return (RECIPES / name).read_text("utf-8")


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text_of(name)))


def containers(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every container of the pods that a manifest makes."""
    spec = manifest.get("spec", {})
    template = spec.get("template") or spec.get("leaderWorkerTemplate", {}).get("workerTemplate")
    if template is not None:
        yield from template["spec"].get("initContainers", ())
        yield from template["spec"]["containers"]


def in_shell(text: str) -> Iterator[list[str]]:
    """The words of each `rolloutctl` in a shell's text, up to where its command ends."""
    text = NESTED.sub(r"\1", text.replace("\\\n", " "))
    for line in text.splitlines():
        lexer = shlex.shlex(line.partition(" #")[0], posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        if line.startswith("#") or not re.search(r"\brolloutctl\b", line):
            continue
        words = list(lexer)
        for start in (index for index, word in enumerate(words) if word == "rolloutctl"):
            rest = words[start + 1 :]
            yield rest[: next((index for index, word in enumerate(rest) if word in ENDS), len(rest))]


def in_manifests(name: str) -> Iterator[list[str]]:
    for container in (found for manifest in manifests(name) for found in containers(manifest)):
        words = [*container.get("command", ()), *container.get("args", ())]
        if "rolloutctl" in container["image"] and words[0] == "agent":
            yield words
        elif words[0] == "rolloutctl":
            yield words[1:]


def in_unit() -> list[str]:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text_of("rolloutctl-agent.service"))
    program, *words = shlex.split(unit["Service"]["ExecStart"])
    assert program.endswith("/rolloutctl") and words[0] == "agent"
    assert unit["Service"]["EnvironmentFile"] == "/etc/rolloutctl/agent.env"
    pairs = [line.split("=", 1) for line in text_of("agent.env").splitlines() if not line.startswith("#")]
    options = {
        name.removeprefix("ROLLOUTCTL_").removeprefix("AGENT_").removesuffix("_FILE"): text for name, text in pairs
    }
    given = [word for name, text in options.items() for word in (f"--{name.lower().replace('_', '-')}", text)]
    return ["agent", *given, *words[1:]]


def in_dockerfile() -> list[str]:
    instructions = dict(line.split(" ", 1) for line in text_of("Dockerfile").splitlines() if re.match("[A-Z]+ ", line))
    assert json.loads(instructions["ENTRYPOINT"]) == ["rolloutctl"]
    words: list[str] = json.loads(instructions["CMD"])
    return words


LINES = {
    "slurm": [*in_shell(text_of("slurm.sbatch").replace("# Made once, where you submit: ", ""))],
    "kubernetes": [*in_manifests("kubernetes.yaml")],
    "kubernetes-lws": [*in_manifests("kubernetes-lws.yaml")],
    "systemd": [in_unit()],
    "image": [in_dockerfile()],
    "page": [words for block in blocks("docs/recipes/index.md", "text") for words in in_shell(block)],
}


@pytest.mark.parametrize("words", [pytest.param(line, id=name) for name, lines in LINES.items() for line in lines])
def test_rolloutctl_takes_every_line(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUTCTL_BUS", "tcp://trainer:5555")
    monkeypatch.chdir(tmp_path)
    words = [VARIABLE.sub("1", word) for word in words]
    command: click.Command = cli
    context = cli.make_context("rolloutctl", [], resilient_parsing=True)
    while isinstance(command, click.Group):
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, name
        command = found
    try:
        with command.make_context(name, [*words]):
            pass
    except click.exceptions.Exit:
        assert words == ["--help"]


def test_manifests_are_whole() -> None:
    found = {name: manifests(name) for name in ("kubernetes.yaml", "kubernetes-lws.yaml")}
    kinds = [(manifest["apiVersion"], manifest["kind"]) for manifest in found["kubernetes.yaml"]]
    assert kinds == [("v1", "Service"), ("batch/v1", "Job"), ("v1", "Service"), ("apps/v1", "StatefulSet")]
    services = {manifest["metadata"]["name"]: manifest for manifest in found["kubernetes.yaml"][::2]}
    for manifest in [*found["kubernetes.yaml"][1::2], *found["kubernetes-lws.yaml"]]:
        spec = manifest["spec"]
        template = spec.get("template") or spec["leaderWorkerTemplate"]["workerTemplate"]
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        mounted = {mount["name"] for container in containers(manifest) for mount in container.get("volumeMounts", ())}
        assert mounted == volumes, "each volume is mounted, and each mount has its volume"
        ports = {port["name"] for container in containers(manifest) for port in container.get("ports", ())}
        if "template" in spec:
            labels = template["metadata"]["labels"]
            assert spec.get("selector", {"matchLabels": labels})["matchLabels"] == labels
            (service,) = (found for found in services.values() if found["spec"]["selector"] == labels)
            assert {port["name"] for port in service["spec"]["ports"]} == ports
        for container in containers(manifest):
            own = {port["name"] for port in container.get("ports", ())}
            assert {
                container[p]["httpGet"]["port"] for p in ("startupProbe", "readinessProbe") if p in container
            } <= own


@pytest.mark.parametrize(
    ("name", "engine", "drained"), [("kubernetes.yaml", "engine", "agent"), ("kubernetes-lws.yaml", None, "engine")]
)
def test_pods_drain_before_their_engine_ends_and_are_ready_when_the_agent_is(
    name: str, engine: str | None, drained: str
) -> None:
    """A pod ends its containers first, then its sidecars; and an agent ends the server that it launched."""
    pods = manifests(name)[-1]["spec"]
    pod = (pods.get("template") or pods["leaderWorkerTemplate"]["workerTemplate"])["spec"]
    assert [(c["name"], c["restartPolicy"]) for c in pod.get("initContainers", ())] == (
        [(engine, "Always")] if engine else []
    )
    (container,) = pod["containers"]
    words = [*container.get("command", ()), *container.get("args", ())]
    own = words[: words.index("--")] if "--" in words else words
    assert container["name"] == drained and "--rejoin" in own and ("--launch" in own) == (engine is None)
    (grace,) = (int(word.partition("=")[2]) for word in own if word.startswith("--drain="))
    assert pod["terminationGracePeriodSeconds"] >= grace + 30
    (port,) = (port for port in container["ports"] if port["name"] == container["readinessProbe"]["httpGet"]["port"])
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert f"--metrics-port=0.0.0.0:{port['containerPort']}" in own


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("shellcheck", ("slurm.sbatch",)),
        ("hadolint", ("Dockerfile",)),
        ("kubernetes-validate", ("--strict", "kubernetes.yaml")),
        ("promtool", ("check", "rules", "--lint-fatal", "../grafana/alerts.yml")),
    ],
)
def test_what_checks_such_files_finds_nothing(program: str, words: tuple[str, ...]) -> None:
    checker = shutil.which(program, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if checker is None:
        pytest.skip(f"{program} is not installed: `make test-recipes` installs what is in the extra `recipes`")
    done = subprocess.run([checker, *words], cwd=RECIPES, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_unit_is_one(tmp_path: Path) -> None:
    checker = shutil.which("systemd-analyze")
    if checker is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "rolloutctl-agent.service"
    unit.write_text(text_of(unit.name).replace("/opt/rolloutctl/bin/rolloutctl", sys.executable))
    done = subprocess.run([checker, "verify", unit], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


SRUN = """#!{python}
import os, signal, subprocess, sys
options = [word for word in sys.argv[1:] if word.startswith("--")]
first = next(index for index, word in enumerate(sys.argv) if index and not word.startswith("--"))
nodes = next(word for word in options if word.startswith("--nodes=")).partition("=")[2]
place = lambda node: {{"SLURM_NODEID": node, "SLURM_PROCID": node, "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": nodes}}
tasks = []
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
tasks += [subprocess.Popen(sys.argv[first:], env={{**os.environ, **place(str(node))}}) for node in range(int(nodes))]
sys.exit(max(task.wait() for task in tasks))
"""
TRAINER = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
from controlplane import ControlPlane
with ControlPlane("tcp://127.0.0.1:{port}", log="run.db", keys="keys") as plane:
    plane.wait_for_agents(4, timeout=100).wait()
    print(sorted(agent.agent for agent in plane.status().agents), sorted(plane.flush().wait().acted), flush=True)
    {end}
"""


@pytest.mark.parametrize(
    "end", ["sys.exit(7)", pytest.param("signal.pause()", marks=pytest.mark.long, id="ended by Slurm")]
)
def test_the_slurm_script_runs_a_trainer_and_the_agents_of_both_replicas(tmp_path: Path, end: str) -> None:
    assert rolloutctl("keys", "new", "fleet", "--fleet", cwd=tmp_path).returncode == 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    programs = tmp_path / "bin"
    programs.mkdir()
    script(programs / "srun", SRUN.format(python=sys.executable))
    script(programs / "scontrol", "#!/bin/sh\nprintf '127.0.0.1\\n%.0s' 1 2 3 4 5\n")
    script(programs / "rolloutctl", f'#!/bin/sh\nexec {sys.executable} -m controlplane.cli "$@"\n')
    script(programs / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    module_of("docs/backends.md", "echo", tmp_path)
    (tmp_path / "train.py").write_text(TRAINER.format(port=port, end=end))
    text, changed = ENGINE.subn("--engine echo:Echo", text_of("slurm.sbatch"))
    assert changed == 1
    text = re.sub(r' *--dist-init "\S+"', "", text)
    changes = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[1-5]",
        "CHECKPOINTS": str(tmp_path),
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "PORT": str(port),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "OMP_NUM_THREADS": "1",
    }
    command = ["bash", "-c", text]
    with (
        (tmp_path / "stderr").open("w") as stderr,
        subprocess.Popen(
            command, cwd=tmp_path, env=environment(changes), stdout=subprocess.PIPE, stderr=stderr, text=True
        ) as job,
    ):
        assert job.stdout is not None
        said = job.stdout.readline()
        if end == "signal.pause()":
            job.terminate()
        job.wait(100)
    errors = (tmp_path / "stderr").read_text()
    assert said == "['0.0', '0.1', '1.0', '1.1'] ['0.0', '1.0']\n", errors
    assert job.returncode == 7, errors
    assert errors.count("SIGTERM: shutting down") == 4


@pytest.mark.long
@pytest.mark.xdist_group("ray")
def test_the_ray_job_runs(tmp_path: Path) -> None:
    assert rolloutctl("keys", "new", "fleet", "--fleet", cwd=tmp_path).returncode == 0
    text = text_of("ray_job.py")
    assert text.count('{"GPU": 8}') == 1
    (tmp_path / "ray_job.py").write_text(text.replace('{"GPU": 8}', '{"CPU": 1}').replace('"/tmp/', f'"{tmp_path}/'))
    done = python(
        tmp_path / "ray_job.py",
        *("tiny", "sleep", "86400"),
        cwd=tmp_path,
        env={"XDG_STATE_HOME": str(tmp_path), "RUN_LOG": str(tmp_path / "disk/run.db")},
    )
    assert done.returncode == 0, done.stderr
    assert rolloutctl("log", "verify", tmp_path / "disk/run.db", cwd=tmp_path).returncode == 0
    assert "launch 1 at" in (tmp_path / f"{tmp_path.name}/server-0.0.log").read_text()
