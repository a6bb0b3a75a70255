"""What SGLang imports on its way up and never uses when it serves a text model on a CPU: torchvision and torchaudio.

Python imports this by itself when the folder is on PYTHONPATH. Whoever asks whether they are installed is told no.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

ABSENT = ("torchvision", "torchaudio")
_find_spec = importlib.util.find_spec


class _Nothing(types.ModuleType):
    """A module in which every name is there, and is a class that can be named and not used."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


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


sys.meta_path.append(_Finder())
importlib.util.find_spec = _honest_find_spec
