"""A trainer's own client, from its package and unchanged, in a process of the environment that has what it needs."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Self

from tests.environments import ROOT, python

LOOP = """
import json, sys
answers, sys.stdout = sys.stdout, sys.stderr
names = {}
for line in sys.stdin:
    text = json.loads(line)
    try:
        try:
            code = compile(text, "client", "eval")
        except SyntaxError:
            exec(text, names)
            answer = {"value": None}
        else:
            answer = {"value": eval(code, names)}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer, default=repr), file=answers, flush=True)
"""

AREAL = """
from areal.api import WeightUpdateMeta
from areal.api.cli_args import InferenceEngineConfig, NameResolveConfig
from areal.engine.sglang_remote import RemoteSGLangEngine
from areal.engine.vllm_remote import RemotevLLMEngine
from areal.utils import name_resolve, names

def begin(version, path, **fields):
    engine.set_version(version)
    engine.pause_generation()
    meta = WeightUpdateMeta(type="disk", path=path, version=version, **fields)
    return engine.update_weights_from_disk(meta)

def end(update):
    name_resolve.add(names.update_weights_from_disk("e", "t", engine.get_version()), "0", replace=True)
    update.result()
    engine.continue_generation()
"""
"""AReaL 1.0.4. `begin`, what is written meanwhile, and `end` are what its `fsdp_engine.py` does for an update."""

SKYRL = """
import asyncio, typing, typing_extensions
typing.TypedDict = typing_extensions.TypedDict  # before Python 3.12 pydantic takes no other
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.backends.skyrl_train.weight_sync.control_plane import SkyrlWeightSyncClient
run = asyncio.Runner().run

def remote(url, urls, **fields):
    return RemoteInferenceClient(proxy_url=url, server_urls=urls, model_name="base", data_parallel_size=1, **fields)
"""
"""SkyRL 0.4.0: its client of generation and control, and that of an update."""

SMG = "from smg.rl import RL"
"""smg 1.13.0, a router, whose client asks any gateway for its workers."""


class OwnClient:
    """Calls of a client, each a text of Python: the value of an expression comes back as JSON or, else, its `repr`."""

    def __init__(self, setup: str, environment: str = "clients") -> None:
        quiet = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        command = [str(python(environment)), "-c", LOOP]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, text=True, env=os.environ | quiet, **pipes)  # type: ignore[call-overload]
        self(setup)

    @classmethod
    def areal(cls, kind: str, addresses: list[str], folder: Path) -> Self:
        """Its engine for servers of that kind, as it is when it has found all of them."""
        client = cls(AREAL)
        client(f"name_resolve.reconfigure(NameResolveConfig(type='nfs', nfs_record_root={str(folder)!r}))")
        config = f"InferenceEngineConfig(experiment_name='e', trial_name='t', backend='{kind.lower()}:d2')"
        client(f"engine = Remote{kind}Engine({config})")
        client(f"engine.initialize(addr={addresses})")
        return client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # clients leave threads that wait
        self._process.communicate()

    def __call__(self, text: str) -> Any:
        """Raises RuntimeError with the type and the text of the client's own exception."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(text), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]
