"""Options that several commands share, and the files that they name: checked before minutes of work."""

from collections import Counter
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from gac.core.errors import GacError
from gac.core.io import destination
from gac.forms import DEFAULT_FORMS

T = TypeVar("T", bound=Callable[..., Any])
FILE = click.Path(path_type=Path)
AT_LEAST_1 = click.IntRange(min=1)
LARGEST = 2**63 - 1  # the largest size that a latency table can hold


def option(names: str, help: str, kind: Any = None, metavar: str | None = None, **how: Any) -> Callable[[T], T]:
    """An option as one row: names (flags, then the argument), help, type. Shows the default, or ``show_default``."""
    shown = how.pop("show_default", how.get("default") is not None)
    if isinstance(shown, str):
        help, shown = f"{help}  [default: {shown}]", False
    return click.option(*names.split(), type=kind, metavar=metavar, show_default=shown, help=help, **how)


def several(names: str, help: str, kind: Any = None, metavar: str | None = None, **how: Any) -> Callable[[T], T]:
    return option(names, f"{help} Repeatable.", kind, metavar, multiple=True, **how)


def switch(names: str, help: str, **how: Any) -> Callable[[T], T]:
    """An option with a flag for yes, and one for no; None unless one is given."""
    return option(names, help, None, **({"default": None} | how))


def flag(names: str, help: str) -> Callable[[T], T]:
    return click.option(*names.split(), is_flag=True, help=help)


def fraction_or_size(text: str) -> float | str:
    """Read a fraction; anything else stays text, which ``gac.plan.sizes`` reads or refuses."""
    try:
        return float(text)
    except ValueError:
        return text


# --- callbacks ------------------------------------------------------------------------------------------------------


def _sizes(_ctx: click.Context, _option: click.Parameter, text: str | None) -> dict[str, int]:
    pairs = [part.partition("=") for part in text.split(",")] if text else []
    try:
        sizes = {axis.strip(): int(size) for axis, _, size in pairs}
    except ValueError as failure:
        raise click.BadParameter(f"{text!r} is not like m=1024,k=4096.") from failure
    if len(sizes) < len(pairs):
        raise click.BadParameter(f"{text!r} names an axis twice.")
    if not all(1 <= size <= LARGEST for size in sizes.values()):
        raise click.BadParameter(f"{text!r} has a size outside 1 to {LARGEST}.")
    return sizes


def _range(_ctx: click.Context, _option: click.Parameter, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        first, last = map(int, text.split(":"))
    except ValueError as failure:
        raise click.BadParameter(f"{text!r} is not like 1016:1040.") from failure
    if first > last:
        raise click.BadParameter(f"{text!r} ends before it begins.")
    return first, last


def _latency(
    _ctx: click.Context, _option: click.Parameter, texts: Sequence[str]
) -> str | float | dict[str, float] | None:
    """Parse ``any``, one fraction for every workload, or fractions by workload."""
    if list(texts) == ["any"]:
        return "any"
    pairs = [text.rpartition("=") for text in texts]
    try:
        fractions = {workload: float(fraction) for workload, _, fraction in pairs}
    except ValueError as failure:
        raise click.BadParameter(f"{' '.join(texts)!r} is not like 0.85 or prefill:1x1024=0.85.") from failure
    if len(fractions) < len(texts) or ("" in fractions and len(fractions) > 1):
        raise click.BadParameter("give one fraction for all workloads, or one for each.")
    return fractions.get("", fractions or None)


# --- options that several commands share ----------------------------------------------------------------------------


class Target(click.Path):
    """The path of a file or directory to write. ``-`` is refused; an ``error`` is raised if it cannot be written.

    ``Command`` checks it before the command runs; with ``early=False`` the command itself does, if it writes it.
    """

    def __init__(self, error: type[GacError] = GacError, directory: bool = False, early: bool = True) -> None:
        super().__init__(path_type=Path)
        self.error, self.directory, self.early = error, directory, early

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "-":
            self.fail("'-' names no file. Name one; with --json, the answer is on standard output.", param, ctx)
        return super().convert(value, param, ctx)

    def check(self, path: Path) -> None:
        folder = path
        try:
            if path.is_dir() and not self.directory:
                raise self.error(f"{path} is a directory", "the path of a file", "Name a file in it.")
            real = destination(path, self.directory)
            folder = next(parent for parent in (*real.parents, real) if parent.exists())
            if not folder.is_dir():
                raise self.error(f"{path}: {folder} is a file", "a path below a directory", "Choose another path.")
            with TemporaryFile(dir=folder):
                pass
        except OSError as failure:
            where = "" if folder == path else f" nothing can be written to {folder}:"
            problem = f"{path}:{where} {failure.strerror}"
            raise self.error(problem, "a writable path", "Choose another path.") from failure


class Figure(Target):
    def check(self, path: Path) -> None:
        from gac.reporting.page import check_figure

        check_figure(path)
        super().check(path)


shape_option = option(
    "--shape", "Sizes of the axes that stay fixed: m=1024,k=4096.", metavar="AXIS=SIZE,...", callback=_sizes
)
dtype_option = option(
    "--dtype", "Only sweeps in this dtype: bf16, fp16, fp8, or a table's name for a scheme.", metavar="NAME"
)
dims_option = option("--dims", "Show every measured dim from FIRST to LAST.", metavar="FIRST:LAST", callback=_range)
passes_option = option("--passes", "Timings of every shape.", click.IntRange(1, 10_000), default=3)
document_option = option("-o --output document", "Also write the JSON document to this file.", Target())
tokenizer_option = option("--tokenizer", "A tokenizer's directory or hub id. Default: the model's own.", metavar="NAME")
overwrite_option = flag("--overwrite", "Replace an existing compressed checkpoint.")


def profile_option(help: str, **how: Any) -> Callable[[T], T]:
    return option("--profile", help, metavar="NAME|FILE", **how)


table_option = profile_option("Latency table. Default: this GPU's, without a GPU the H100's.")


def forms_option(help: str, default: tuple[str, ...] = DEFAULT_FORMS, shown: str | bool = True) -> Callable[[T], T]:
    return several("--form forms", help, default=default, show_default=shown)


def workloads_option(
    help: str,
    default: tuple[str, ...] = ("prefill:1x1024", "decode:1@1024"),
    shown: str | bool = True,
    kinds: str = "prefill:BxS or decode:B@C",
) -> Callable[[T], T]:
    return several("--workload workloads", f"{help}: {kinds}.", None, "WORKLOAD", default=default, show_default=shown)


def latency_option(help: str) -> Callable[[T], T]:
    return option("--latency", help, metavar="F|WORKLOAD=F|any", multiple=True, callback=_latency)


# --- arguments of the command that runs -----------------------------------------------------------------------------


def reject_options(names: Container[str | None], reason: str) -> None:
    """Raise a ``click.UsageError`` with the reason for the first of these options that is on the command line."""
    ctx = click.get_current_context()
    for parameter in ctx.command.params:
        on_command_line = ctx.get_parameter_source(parameter.name or "") == ParameterSource.COMMANDLINE
        if on_command_line and parameter.name in names:
            raise click.UsageError(f"{parameter.opts[-1]} goes {reason}", ctx)


def named(files: Sequence[Path]) -> dict[str, Path]:
    """Files by their names, without folder and ending if these stay distinct; a usage error if one is given twice."""
    if twice := [str(file) for file, count in Counter(files).items() if count > 1]:
        raise click.UsageError(f"{', '.join(twice)} is given more than once. Name each file once.")
    short = len({file.stem for file in files}) == len(files)
    return {file.stem if short else str(file): file for file in files}
