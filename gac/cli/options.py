"""Options that several commands read the same way, and the files that they name: checked before minutes of work."""

import json
from collections import Counter
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

import gac
from gac.core.errors import GacError
from gac.core.io import destination
from gac.forms import DEFAULT_FORMS

if TYPE_CHECKING:
    from gac.plan.plan import Plan
    from gac.plan.token_plan import TokenPlan


T = TypeVar("T", bound=Callable[..., Any])
FILE = click.Path(path_type=Path)
LARGEST = 2**63 - 1
"""The largest size that a latency table can hold."""


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


shape_option = click.option(
    "--shape", callback=_sizes, metavar="AXIS=SIZE,...", help="Sizes of the axes that stay fixed: m=1024,k=4096."
)
dtype_option = click.option(
    "--dtype", metavar="NAME", help="Only sweeps in this dtype: bf16, fp16, fp8, or what tables call a scheme."
)
dims_option = click.option(
    "--dims", callback=_range, metavar="FIRST:LAST", help="Show every measured dim from FIRST to LAST."
)
passes_option = click.option(
    "--passes",
    type=click.IntRange(min=1, max=10_000),
    default=3,
    show_default=True,
    help="How often every shape is timed.",
)


def output_option(kind: click.Path, what: str, **how: Any) -> Callable[[T], T]:
    """``-o``; ``what`` says in the help what is written."""
    return click.option("-o", "--output", type=kind, show_default=True, help=what, **how)


def plot_option(what: str) -> Callable[[T], T]:
    """``--plot``; ``what`` says in the help what is drawn."""
    return click.option("--plot", type=Figure(), metavar="FILE", help=f"{what} (.png, .pdf or .svg).")


def profile_option(what: str, **how: Any) -> Callable[[T], T]:
    """``--profile``; ``what`` says in the help what the latency table is there for."""
    return click.option("--profile", metavar="NAME|FILE", help=what, **how)


table_option = profile_option("Latency table; by default this GPU's, without a GPU the H100's.")


def forms_option(what: str, default: tuple[str, ...] = DEFAULT_FORMS, shown: str | bool = True) -> Callable[[T], T]:
    """``--form``, repeatable; ``what`` says in the help what forms are there for, ``shown`` what the default is."""
    return click.option("--form", "forms", multiple=True, default=default, show_default=shown, help=what)


def workloads_option(
    what: str,
    default: tuple[str, ...] = ("prefill:1x1024", "decode:1@1024"),
    shown: str | bool = True,
    kinds: str = "prefill:BxS or decode:B@C",
) -> Callable[[T], T]:
    """``--workload``, repeatable; ``what`` says in the help what workloads are there for, ``kinds`` which there are."""
    return click.option(
        "--workload",
        "workloads",
        multiple=True,
        metavar="WORKLOAD",
        default=default,
        show_default=shown,
        help=f"{what}: {kinds}. Repeatable.",
    )


def _latency(
    _ctx: click.Context, _option: click.Parameter, texts: Sequence[str]
) -> str | float | dict[str, float] | None:
    """``any``, one fraction for every workload, or fractions by workload."""
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


def latency_option(what: str) -> Callable[[T], T]:
    """``--latency``, repeatable; ``what`` says in the help what it limits, and what limits it where it is not given."""
    return click.option("--latency", multiple=True, callback=_latency, metavar="F|WORKLOAD=F|any", help=what)


def tensor_parallel_option(what: str) -> Callable[[T], T]:
    """``--tensor-parallel``; ``what`` says in the help what it does."""
    number = click.IntRange(min=1)
    return click.option("--tensor-parallel", type=number, default=1, show_default=True, metavar="N", help=f"{what}.")


def bos_option(what: str) -> Callable[[T], T]:
    """``--bos`` and ``--no-bos``; ``what`` says in the help which windows begin with it."""
    return click.option("--bos/--no-bos", default=None, help=what)


def refuse_given(names: Container[str | None], why: str) -> None:
    """Refuse options of the command that runs, where they are on the command line.

    Raises:
        click.UsageError: names the first one, and says ``why``.
    """
    ctx = click.get_current_context()
    for parameter in ctx.command.params:
        given = ctx.get_parameter_source(parameter.name or "") == ParameterSource.COMMANDLINE
        if given and parameter.name in names:
            raise click.UsageError(f"{parameter.opts[-1]} goes {why}", ctx)


class Target(click.Path):
    """A path that the command writes to; ``Verb`` checks it before the command runs. ``-`` is none.

    Args:
        error: what is raised where it cannot be written.
        directory: whether a directory is written, or a file.
        early: False where the command checks it by itself, for it does not always write it.
    """

    def __init__(self, error: type[GacError] = GacError, directory: bool = False, early: bool = True) -> None:
        super().__init__(path_type=Path)
        self.error, self.directory, self.early = error, directory, early

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "-":
            self.fail("'-' names no file. Name one; with --json, the answer is on standard output.", param, ctx)
        return super().convert(value, param, ctx)

    def check(self, path: Path) -> None:
        """Refuse a path that cannot be written.

        Raises:
            GacError: of the class ``error``.
        """
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
    from gac.core.io import to_json

    document: dict[str, Any] = json.loads(to_json(plan))
    del document["sites"]
    document |= {"kept": plan.budget.kept, "kept_of_model": plan.kept_of_model}
    for name, (used, total) in {"bytes": plan.bytes, "model_bytes": plan.model_bytes}.items():
        document[name] = {"used": used, "total": total}
    document |= dict(zip(("bits", "model_bits"), plan.bits, strict=True))
    return document | {"alignment": plan.alignment, "aligned_fraction": plan.aligned_fraction}


def tokens_document(plan: "TokenPlan") -> dict[str, Any]:
    """A plan of tokens, with the sums that follow from it."""
    from gac.core.io import to_json

    document: dict[str, Any] = json.loads(to_json(plan)) | {"used": plan.used, "total": plan.total, "loss": plan.loss}
    sizes = {str(length): plan.cache_bytes(length) for length in plan.contexts}
    return document | {"cache_bytes": {length: {"used": one, "total": all_} for length, (one, all_) in sizes.items()}}


def named_plans(files: Sequence[Path]) -> list[tuple[str, "Plan"]]:
    """Plans by their files' names, without folder and ending where that tells them apart."""
    return [(name, gac.Plan.load(file)) for name, file in named(files).items()]


def named(files: Sequence[Path]) -> dict[str, Path]:
    """Files by their names, without folder and ending where that tells them apart.

    Raises:
        click.UsageError: one of them is given twice.
    """
    if twice := [str(file) for file, count in Counter(files).items() if count > 1]:
        raise click.UsageError(f"{', '.join(twice)} is given more than once. Name each file once.")
    short = len({file.stem for file in files}) == len(files)
    return {file.stem if short else str(file): file for file in files}
