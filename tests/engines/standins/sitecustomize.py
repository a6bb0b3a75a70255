"""What SGLang imports while it starts and never uses when it serves a text model on a CPU: torchvision and torchaudio.

Python imports this by itself when the folder is on PYTHONPATH. A check whether they are installed still says no.

SGLang's scheduler puts a span around each batch while a profiler records, and ends one profile and begins the next
within it. With the torch that it is released with (2.14.1) that is fine; torch 2.13, the newest with a build for plain
CPUs, writes into memory that the first one has freed, and kills the scheduler about half of the time. So there are no
such spans here.

Its LoRA adapters ask for pinned memory, which torch has only for a GPU. Here it is ordinary memory.

A server that copies the weights of another one does so by NCCL, between GPUs. Here the same code uses gloo.
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable

ABSENT = ("torchvision", "torchaudio")
_find_spec = importlib.util.find_spec


class _Nothing(types.ModuleType):
    """A module in which every name is there, and is a class that can be named and not used."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Changed(importlib.abc.Loader):
    """Loads a module of SGLang, and then changes something."""

    def __init__(self, loader: importlib.abc.Loader, change: Callable[[types.ModuleType], None]) -> None:
        self._loader, self._change = loader, change

    def create_module(self, spec):  # type: ignore[no-untyped-def]
        return self._loader.create_module(spec)

    def exec_module(self, module):  # type: ignore[no-untyped-def]
        self._loader.exec_module(module)
        self._change(module)


def _without_spans(module: types.ModuleType) -> None:
    """Have the module of spans make none for the scheduler."""
    every = module.profile_range

    def profile_range(name: str, **options: object) -> object:
        return contextlib.nullcontext() if name.startswith("scheduler.") else every(name, **options)

    module.profile_range = profile_range  # type: ignore[attr-defined]


def _unpinned(module: types.ModuleType) -> None:
    """Have torch, which the module has imported, make ordinary tensors where pinned ones are asked for."""
    import torch

    def ordinary(make: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(make)
        def made(*values: object, pin_memory: bool = False, **options: object) -> object:
            return make(*values, **options)

        return made

    for name in ("tensor", "empty", "zeros", "ones", "arange", "full"):
        setattr(torch, name, ordinary(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]


def _over_gloo(module: types.ModuleType) -> None:
    """Have a module make its groups over gloo, whatever device it names for them."""
    make = module.init_custom_process_group

    def group(backend: str, device_id: object, **options: object) -> object:
        return make(backend="gloo", **options)

    module.init_custom_process_group = group  # type: ignore[attr-defined]


def _receives_over_gloo(module: types.ModuleType) -> None:
    """The same where weights are received, which refuses to be made for a CPU."""
    import torch

    _over_gloo(module)
    made = module.RemoteInstanceConnector.__init__

    def init(self, url, device):  # type: ignore[no-untyped-def]
        made(self, url, torch.device("cuda"))  # only named: nothing is put there

    module.RemoteInstanceConnector.__init__ = init


_CHANGES = {
    "sglang.srt.utils.nvtx_utils": _without_spans,
    "sglang.srt.lora.lora_manager": _unpinned,
    "sglang.srt.connector.remote_instance": _receives_over_gloo,
    "sglang.srt.model_executor.model_runner_components.weight_exporter": _over_gloo,
}


class _Changes(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name not in _CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changed(spec.loader, _CHANGES[name])
        return spec


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):  # type: ignore[no-untyped-def]
        return _Nothing(spec.name)

    def exec_module(self, module):  # type: ignore[no-untyped-def]
        pass


def _honest_find_spec(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
    return None if name.split(".")[0] in ABSENT else _find_spec(name, package)


sys.meta_path.insert(0, _Changes())
sys.meta_path.append(_Finder())
importlib.util.find_spec = _honest_find_spec
