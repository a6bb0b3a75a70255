"""SGLang's kernels, which have no build for a plain CPU: every name is there, and raises when it is called.

The two torch ops are those that SGLang calls while it starts.
"""

from typing import NoReturn

import torch

__version__ = "0.4.10"
__path__: list[str] = []

_library = torch.library.Library("sgl_kernel", "DEF")  # type: ignore[no-untyped-call]
_library.define("init_cpu_threads_env(str cpu_ids) -> str")  # type: ignore[no-untyped-call]
_library.impl("init_cpu_threads_env", lambda cpu_ids: "", "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.define("initialize(int size, int rank) -> ()")  # type: ignore[no-untyped-call]
_library.impl("initialize", lambda size, rank: None, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no build for a CPU")

    return missing
