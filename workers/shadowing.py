"""Refuses to run with another project's package `schemas`: the directory of `python -m workers` is first on the path.

The trainer's side has a fuller check (`controlplane/shadowing.py`), which this package must not import.
"""

from importlib.util import find_spec
from os.path import abspath, dirname, join, realpath

OWN = join(dirname(dirname(abspath(__file__))), "schemas")
"""Our `schemas`: beside this package."""


def refuse_foreign_schemas() -> None:
    """Raise ImportError, naming the other package, if `import schemas` would find one of another project."""
    spec = find_spec("schemas")
    if spec is None or realpath(dirname(spec.origin or "")) == realpath(OWN):
        return
    place = spec.origin or str(next(iter(spec.submodule_search_locations or ()), "a module without a file"))
    raise ImportError(
        f"rolloutctl needs its own package `schemas`, at {OWN}, but `import schemas` finds {place}. "
        "Rename that one, start from another directory, or remove its directory from the path.",
        name="schemas",
        path=place,
    )
