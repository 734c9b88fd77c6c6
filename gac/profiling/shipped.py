"""The shipped tables, for a table that lacks what is asked for."""

from collections.abc import Iterator
from functools import cache

from gac.profiling.folders import default_path, shipped_profiles
from gac.profiling.table import Profile


def other_tables(profile: Profile) -> Iterator[Profile]:
    """Load the shipped tables other than this one, one after another: those of its GPU first.

    Each is read once in a process.
    """
    gpu = default_path(profile.header.gpu).stem
    for path in sorted(shipped_profiles(), key=lambda path: not path.stem.startswith(gpu)):
        table = _loaded(path)
        if table.digest != profile.digest:
            yield table


_loaded = cache(Profile.load)
