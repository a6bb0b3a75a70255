"""Refuses to run on somebody else's `schemas`: the directory that `python -m workers` starts in is first on the path.

The trainer's side has the fuller check (`controlplane/shadowing.py`), which the arrows keep out of reach here.
"""

from importlib.util import find_spec
from os.path import abspath, dirname, join, realpath

OWN = join(dirname(dirname(abspath(__file__))), "schemas")
"""Where our `schemas` stands: beside this package."""


def refuse_foreign_schemas() -> None:
    """Raise ImportError, naming what stands in the way, if `import schemas` would take another project's package."""
    spec = find_spec("schemas")
    if spec is None or realpath(dirname(spec.origin or "")) == realpath(OWN):
        return
    place = spec.origin or str(next(iter(spec.submodule_search_locations or ()), "a module without a file"))
    raise ImportError(
        f"rolloutctl needs its own package `schemas`, at {OWN}, but `import schemas` finds {place}. "
        f"Rename that one, start from another directory, or take its directory off the path.",
        name="schemas",
        path=place,
    )
