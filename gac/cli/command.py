"""The parts that all commands share: ``--json``, the answer, errors in words or in JSON, the exit status."""

import errno
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from gac.cli.options import Target
from gac.core.distributed.launch import leads
from gac.core.errors import GacError, escaped
from gac.core.io import complete_file

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    from gac.allocation.frontier import Frontier
    from gac.plan.plan import Plan

FAILED = 1
INTERRUPTED = 130
ERROR_GRACE_S = 5.0  # under torchrun, that other ranks wait for rank 0 to print an error that all ranks meet
_WIDTH = 100  # of tables in files and pipes
_ALL_OPTIONS = "gac.cli.all_options"


@dataclass(frozen=True)
class Answer:
    """The result of a command: a JSON document, and a function that makes the tables to print."""

    document: Mapping[str, Any]
    tables: Callable[[], Iterable["RenderableType"]]


class Command(click.Command):
    """A command whose callback returns an ``Answer``.

    Args:
        resume: what remains after an interrupt.
        first: names of the options that ``--help`` lists; ``--help-all`` lists the others too, under "Research". None:
            ``--help`` lists all.
    """

    def __init__(
        self,
        *args: Any,
        resume: str = "Nothing was written; run it again.",
        first: Container[str | None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.resume = resume
        options_of = [row for row in self.params if isinstance(row, click.Option)]
        self.research = [] if first is None else [row for row in options_of if row.name not in first]
        self.params.append(click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON document."))
        quiet = "Print warnings and errors only."
        self.params.append(click.Option(["--quiet", "-q"], is_flag=True, help=quiet))
        if self.research:
            more = f"Also show {len(self.research)} options for research, and exit."
            shown: Any = {"is_flag": True, "is_eager": True, "expose_value": False, "callback": _show_all_options}
            self.params.append(click.Option(["--help-all"], help=more, **shown))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the most used options, and those for research where all are asked for."""
        options_of = [row for row in self.get_params(ctx) if isinstance(row, click.Option)]
        most_used = [row for row in options_of if row not in self.research]
        for title, rows in (("Options", most_used), ("Research", self.research if _ALL_OPTIONS in ctx.meta else [])):
            if records := [record for row in rows if (record := row.get_help_record(ctx)) is not None]:
                with formatter.section(title):
                    formatter.write_dl(records)

    def invoke(self, ctx: click.Context) -> None:
        """Check the output paths, run the command, and print its answer or its error."""
        as_json, quiet = ctx.params.pop("as_json"), ctx.params.pop("quiet")
        copy: Path | None = ctx.params.pop("document", None)
        try:
            with _notes(quiet):
                for parameter in self.params:
                    path = copy if parameter.name == "document" else ctx.params.get(parameter.name or "")
                    if isinstance(parameter.type, Target) and parameter.type.early and path is not None:
                        parameter.type.check(path)
                answer: Answer = super().invoke(ctx)
                if copy is not None:
                    with complete_file(copy, "document") as temporary:
                        temporary.write_text(_as_json(answer.document) + "\n", encoding="utf-8")
                    note(f"saved as {copy}")
        except GacError as failure:
            _fail(ctx, failure, as_json, FAILED)
        except KeyboardInterrupt:
            stop = GacError("interrupted", "the command to come to its end", self.resume)
            _fail(ctx, stop, as_json, INTERRUPTED)
        if not leads():
            return
        try:
            if as_json:
                click.echo(_as_json(answer.document))
            else:
                _show(answer.tables())
            sys.stdout.flush()
        except OSError as failure:
            fail_unwritten(failure)


def _show_all_options(ctx: click.Context, _option: click.Parameter, asked: bool) -> None:
    if asked:
        ctx.meta[_ALL_OPTIONS] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def fail_unwritten(failure: OSError) -> NoReturn:
    """End the process where standard output cannot be written."""
    if failure.errno != errno.EPIPE:  # a pipe whose reader has stopped is no error
        click.echo(f"Error: the answer cannot be written: {failure.strerror}", err=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
    sys.exit(FAILED)


def note(text: str) -> None:
    """Print a line on standard error, unless ``--quiet`` is given."""
    logging.getLogger("gac").info("%s", text)


def _fail(ctx: click.Context, failure: GacError, as_json: bool, status: int) -> NoReturn:
    let_rank_0_speak(status)
    if as_json:
        click.echo(error_json(failure))
    else:
        click.echo(f"\nInterrupted. {failure.remedy}" if status == INTERRUPTED else f"Error: {failure}", err=True)
    ctx.exit(status)


def let_rank_0_speak(status: int) -> None:
    """End the other processes of a run, after rank 0 had the time to print an error that all of them meet."""
    if not leads():  # torchrun ends all ranks when the first one ends
        time.sleep(ERROR_GRACE_S)
        sys.exit(status)


def error_json(failure: GacError) -> str:
    return _as_json({"error": {"given": failure.given, "expected": failure.expected, "remedy": failure.remedy}})


def _as_json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, allow_nan=False)


def _show(tables: Iterable["RenderableType"]) -> None:
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDTH
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    for number, table in enumerate(tables):
        console.print(*([""] if number else []), _Escaped(table), sep="\n")


@dataclass(frozen=True)
class _Escaped:
    """A table without control characters, since anyone chooses the names of files and models."""

    table: "RenderableType"

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> Iterator["Segment"]:
        from rich.segment import Segment

        for text, style, control in console.render(self.table, options):
            yield Segment(escaped(text), style, control)


class _NoteHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        click.echo(escaped(record.getMessage()), err=True)


@contextmanager
def _notes(quiet: bool) -> Iterator[None]:
    """Show the library's log and progress while a command runs; warnings only if quiet."""
    from gac.core.progress import no_progress

    logger, handler = logging.getLogger("gac"), _NoteHandler()
    level, quiet = logger.level, quiet or not leads()
    logger.addHandler(handler)
    logger.setLevel(logging.CRITICAL if not leads() else logging.WARNING if quiet else logging.INFO)
    try:
        with no_progress() if quiet else nullcontext():
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


# --- documents of plans and frontiers, without their sites and with the numbers that follow ---------------------------


def plan_document(plan: "Plan") -> dict[str, Any]:
    document = plain_document(plan)
    del document["sites"]
    document |= {"kept": plan.budget.kept, "kept_of_model": plan.kept_of_model}
    for name, (used, total) in {"bytes": plan.bytes, "model_bytes": plan.model_bytes}.items():
        document[name] = {"used": used, "total": total}
    document |= dict(zip(("bits", "model_bits"), plan.bits, strict=True))
    return document | {"alignment": plan.alignment, "aligned_fraction": plan.aligned_fraction}


def frontier_document(frontier: "Frontier") -> dict[str, Any]:
    from gac.plan.costs import COSTS

    document = plain_document(frontier)
    del document["sites"]
    for entry, point in zip(document["points"], frontier.points, strict=True):
        del entry["choice"]
        entry["kept"] = entry["params"] / frontier.dense_params
        entry |= {"bits": frontier.bits(point)} | {name: frontier.amount(point, name) for name in COSTS}
    sizes = {name: frontier.dense_amount(name) for name in COSTS}
    dense = sizes | {"perplexity": frontier.dense_perplexity, "latency_ns": frontier.dense_ns}
    return document | {"dense": dense}


def plain_document(record: Any) -> dict[str, Any]:
    from gac.core.io import to_json

    document: dict[str, Any] = json.loads(to_json(record))
    return document
