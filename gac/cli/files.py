"""Files of commands: where they may write, which is checked before minutes of work, and plans by their names."""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import click

import gac
from gac.errors import GacError

if TYPE_CHECKING:
    from gac.plan import Plan

FILE = click.Path(path_type=Path)


class Target(click.Path):
    """A path that the command writes to; ``Verb`` checks it before the command runs.

    Args:
        error: what is raised where it cannot be written.
        directory: whether it may be a directory.
    """

    def __init__(self, error: type[GacError] = GacError, directory: bool = False) -> None:
        super().__init__(path_type=Path)
        self.error, self.directory = error, directory

    def check(self, path: Path) -> None:
        """Refuse a path that cannot be written.

        Raises:
            GacError: of the class ``error``.
        """
        folder = path
        try:
            if path.is_dir() and not self.directory:
                raise self.error(f"{path} is a directory", "the path of a file", "Name a file in it.")
            folder = next(parent for parent in path.absolute().parents if parent.exists())
            if not folder.is_dir():
                raise self.error(f"{path}: {folder} is a file", "a path below a directory", "Choose another path.")
            with TemporaryFile(dir=folder):
                pass
        except OSError as failure:
            where = "" if folder == path else f" nothing can be written to {folder}:"
            given = f"{path}:{where} {failure.strerror}"
            raise self.error(given, "a writable path", "Choose another path.") from failure


class Figure(Target):
    """A figure to draw."""

    def check(self, path: Path) -> None:
        """Refuse a figure that cannot be made, as well.

        Raises:
            GacError: matplotlib is missing, the ending is unknown, or the path cannot be written.
        """
        from gac.reporting.page import check_figure

        check_figure(path)
        super().check(path)


def plan_document(plan: "Plan") -> dict[str, Any]:
    """A plan without its sites, and with the fractions and counts that follow from them."""
    from gac.io import to_json

    document: dict[str, Any] = json.loads(to_json(plan))
    del document["sites"]
    document |= {"kept": plan.budget.kept, "kept_of_model": plan.kept_of_model}
    return document | {"alignment": plan.alignment, "aligned_fraction": plan.aligned_fraction}


def named_plans(files: Sequence[Path]) -> list[tuple[str, "Plan"]]:
    """Plans by their files' names, without folder and ending where that tells them apart."""
    short = len({file.stem for file in files}) == len(files)
    return [(file.stem if short else str(file), gac.Plan.load(file)) for file in files]
