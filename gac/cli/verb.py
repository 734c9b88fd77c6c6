"""What every command shares: ``--json``, one answer, errors in words or in JSON, the exit status, what it may write."""

import errno
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from gac.cli.options import Target
from gac.errors import GacError
from gac.io import whole_file

if TYPE_CHECKING:
    from rich.console import RenderableType

FAILED = 1
INTERRUPTED = 130
_WIDTH = 100  # of tables in files and pipes


@dataclass(frozen=True)
class Answer:
    """What a command found out: a JSON document for machines, and tables for people, made only when shown."""

    document: Mapping[str, Any]
    tables: Callable[[], Iterable["RenderableType"]]


class Verb(click.Command):
    """A command whose callback returns an ``Answer``.

    Args:
        resume: what an interrupt leaves behind, and how to go on.
    """

    def __init__(self, *args: Any, resume: str = "Nothing was written; run it again.", **options: Any) -> None:
        super().__init__(*args, **options)
        self.resume = resume
        self.params.append(click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON document."))

    def invoke(self, ctx: click.Context) -> None:
        as_json = ctx.params.pop("as_json")
        try:
            with _notes():
                answer = self._answer(ctx)
        except GacError as failure:
            _fail(ctx, failure, as_json, FAILED)
        except KeyboardInterrupt:
            stop = GacError("interrupted", "the command to come to its end", self.resume)
            _fail(ctx, stop, as_json, INTERRUPTED)
        try:
            if as_json:
                click.echo(_as_json(answer.document))
            else:
                _show(answer.tables())
            sys.stdout.flush()
        except OSError as failure:
            if failure.errno == errno.EPIPE:
                raise  # the reader has seen enough; click ends quietly
            note(f"Error: the answer cannot be written: {failure.strerror}")
            ctx.exit(FAILED)

    def _answer(self, ctx: click.Context) -> Answer:
        """Check where the command will write, run it, and write its document where ``document_option`` says."""
        for parameter in self.params:
            path = ctx.params.get(parameter.name or "")
            if isinstance(parameter.type, Target) and parameter.type.early and path is not None:
                parameter.type.check(path)
        copy: Path | None = ctx.params.pop("document", None)
        answer: Answer = super().invoke(ctx)
        if copy is not None:
            with whole_file(copy, "document") as temporary:
                temporary.write_text(_as_json(answer.document) + "\n", encoding="utf-8")
            note(f"saved as {copy}")
        return answer


document_option = click.option(
    "-o", "--output", "document", type=Target(), help="Also write the JSON document to this file."
)


def note(text: str) -> None:
    """Say something beside the answer: on standard error."""
    click.echo(text, err=True)


def _fail(ctx: click.Context, failure: GacError, as_json: bool, status: int) -> NoReturn:
    if as_json:
        parts = {"given": failure.given, "expected": failure.expected, "remedy": failure.remedy}
        click.echo(_as_json({"error": parts}))
    elif status == INTERRUPTED:
        note(f"\nInterrupted. {failure.remedy}")
    else:
        note(f"Error: {failure}")
    ctx.exit(status)


def _as_json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, allow_nan=False)


def _show(tables: Iterable["RenderableType"]) -> None:
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDTH
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    for number, table in enumerate(tables):
        console.print(*([""] if number else []), table, sep="\n")


class _NoteHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


@contextmanager
def _notes() -> Iterator[None]:
    """Show what the library logs, while a command runs."""
    logger, handler = logging.getLogger("gac"), _NoteHandler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
