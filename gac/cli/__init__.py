"""The command line: the same verbs as the Python API. Heavy modules are imported when a command runs."""

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import click

from gac.cli.bench import bench
from gac.cli.check import evaluate
from gac.cli.command import FAILED, INTERRUPTED, error_json, fail_unwritten, let_rank_0_speak
from gac.cli.model import allocate, compress, export, frontier, heal, verify
from gac.cli.plot import plot
from gac.cli.profile import profile, profiles
from gac.cli.show import compare, report
from gac.core.errors import GacError
from gac.core.version import __distribution__, __version__
from gac_extensions.lab.cliffs_command import cliffs
from gac_extensions.lab.commands import explain, graph, study
from gac_extensions.repairs.commands import repair
from gac_extensions.tokens.commands import tokens

_EPILOG = """\b
A first plan needs no network and no GPU (docs/quickstart.md names the packages):
  gac allocate smollm2 --budget 0.8 --calibration wiki-sample:32x1024 -o plan.json
  gac compress smollm2 --plan plan.json -o small
  gac eval small --against smollm2 --windows 32

Exit status: 0, 1 (an error that says what to do), 2 (usage), 130 (interrupted).
With --json, standard output is one JSON document: the answer, or {"error": {given, expected, remedy}}.
Notes and progress go to standard error (--quiet: warnings and errors alone). Progress is a bar on a terminal, elsewhere
a line a minute."""


class Program(click.Group):
    """All commands. Usage errors are printed as JSON too, and interrupts and closed streams have an exit status."""

    def main(self, args: Sequence[str] | None = None, standalone_mode: bool = True, **extra: Any) -> Any:  # type: ignore[override]  # the rest by keyword
        if not standalone_mode:
            return super().main(args, standalone_mode=False, **extra)
        _check_streams()
        try:
            status = super().main(args, standalone_mode=False, **extra)
            sys.stdout.flush()
            sys.exit(status)
        except OSError as failure:
            if failure.filename is not None:
                raise  # of a file, not of standard output
            fail_unwritten(failure)
        except click.ClickException as failure:
            let_rank_0_speak(failure.exit_code)
            if "--json" in (sys.argv[1:] if args is None else args):
                click.echo(error_json(_wrong_usage(failure)))
            else:
                failure.show()
            sys.exit(failure.exit_code)
        except click.Abort:
            click.echo("\nInterrupted.", err=True)
            sys.exit(INTERRUPTED)


@click.group(
    "gac",
    cls=Program,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="gac", message=f"%(prog)s, version %(version)s ({__distribution__})")
def main() -> None:
    """GPU-aligned compression: smaller language models whose dimensions run fast on your GPU.

    Measure the GPU, and learn where and why it is slow (profile, cliffs, explain, study). List the choices for a model
    (graph). Choose the form and dim of every weight within a budget (allocate), or within every budget (frontier), and
    the number of tokens that every layer caches (tokens). Compare plans (compare) and look at them (plot, report).
    Apply one (compress), train the model after that (heal), check its files (verify) and its quality (eval), time it
    (bench), and convert it for tools without GAC (export). Align models that others have compressed (repair).
    """
    # Threads of PyTorch that wait for one another sleep. Otherwise they take the cores that other programs share.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")


_MEASURE = (profile, profiles, cliffs, explain, study)
_CHOOSE = (graph, allocate, frontier, tokens, compare, plot, report)
_APPLY = (compress, heal, verify, repair, evaluate, bench, export)
for _command in (*_MEASURE, *_CHOOSE, *_APPLY):
    main.add_command(_command)


def _check_streams() -> None:
    # The number of a closed stream would be given to the next file that is opened.
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        remedy = "Send it to a file or a pipe."
        click.echo(f"Error: {GacError('standard output is closed', 'an open one, for the answer', remedy)}", err=True)
        sys.exit(FAILED)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _wrong_usage(failure: click.ClickException) -> GacError:
    ctx = getattr(failure, "ctx", None) or click.Context(click.Command("gac"), info_name="gac")
    usage = " ".join(ctx.get_usage().removeprefix("Usage: ").split())
    return GacError(failure.format_message().rstrip("."), usage, f"See {ctx.command_path} --help.")
