"""Refuses to run with a foreign `schemas` or `workers`.

A trainer's repository may well have a `workers/` in the directory that Python is started from, which comes first on the
import path. What needs ours would then run foreign code, and the error would come late and name neither. So whatever is
about to import ours asks first where they would come from, without importing them. Ours are the packages beside this
one. A repository that uses nothing of ours is never refused.
"""

from importlib.util import find_spec
from os.path import abspath, dirname, join, realpath

HOME = dirname(dirname(abspath(__file__)))
"""The directory that holds our three packages: site-packages, or a checkout."""

OTHERS = ("schemas", "workers")
"""Our packages other than this one: the command line and the doors of trainers need both, a trainer only `schemas`."""


def find_foreign(name: str, home: str = HOME) -> str | None:
    """Return the file or directory that `import name` takes instead of `home/name`; None if ours, or missing."""
    try:
        spec = find_spec(name)
    except ValueError:  # already in sys.modules, and created by hand: a module without a spec
        return f"<a module named {name} that has no file, put into sys.modules>"
    if spec is None:
        return None
    own = join(home, name)
    if spec.has_location and spec.origin is not None:
        directory = dirname(spec.origin)
        # Installers link single files or whole trees from a cache: either spelling of the path is ours.
        if abspath(directory) == own or realpath(directory) == realpath(own):
            return None
        return spec.origin
    return next(iter(spec.submodule_search_locations or ()), spec.origin or "<a module without a file>")


def refuse_foreign(names: tuple[str, ...] = OTHERS, home: str = HOME) -> None:
    """Raise ImportError, naming the file in the way, unless every one of `names` is ours."""
    for name in names:
        place = find_foreign(name, home)
        if place is not None:
            raise ImportError(
                f"rolloutctl needs its own package `{name}`, at {join(home, name)}, but `import {name}` finds {place}, "
                f"which was not executed. It comes earlier on the import path (sys.path: the directory that Python was "
                f"started from, then PYTHONPATH, then installed packages). Rename it, start from another directory, or "
                f"remove its directory from the path.",
                name=name,
                path=place,
            )
