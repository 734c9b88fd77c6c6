"""The command line: the same verbs as the Python API. Heavy modules are imported when a command runs."""

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from itertools import chain
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
  gac allocate smollm2 --budget 0.8 -o plan.json
  gac report plan.json -o report.html
  gac compress smollm2 --plan plan.json -o small
  gac eval small --against smollm2 --windows 12

Exit status: 0, 1 (an error that says what to do), 2 (usage), 130 (interrupted).
With --json, standard output is one JSON document: the answer, or {"error": {given, expected, remedy}}.
Notes and progress go to standard error (--quiet: warnings and errors alone). Progress is a bar on a terminal, elsewhere
a line a minute."""


_GROUPS = {
    "Plan": (
        (allocate, "Choose what every weight of a model becomes."),
        (frontier, "Choose for a hundred budgets at once."),
        (report, "Write one page about a plan."),
        (compare, "Compare plans for one model."),
        (plot, "Draw profiles, plans, frontiers and predictions."),
    ),
    "Apply": (
        (compress, "Apply a plan, and save the smaller model."),
        (heal, "Train a compressed model for minutes towards the dense one."),
        (export, "Convert a compressed model for tools without GAC."),
        (repair, "Pad a model that others compressed to dims that run fast."),
    ),
    "Check": (
        (evaluate, "Measure perplexity, divergence and tasks."),
        (bench, "Time models on this machine: prefill and decode."),
        (verify, "Check that a compressed model is as it was saved."),
    ),
    "GPU": (
        (profile, "Measure this machine's GPU."),
        (profiles, "List the latency tables on this machine."),
        (cliffs, "Show where a GPU is slow, and why."),
        (explain, "List the rules that a dim breaks, and the cost of each."),
    ),
    "Research": (
        (graph, "Show which dims of a model each choice moves."),
        (study, "Repeat a published experiment on this GPU."),
        (tokens, "Choose how many tokens each layer's cache keeps."),
    ),
}
"""Commands in the groups and in the order in which ``gac --help`` lists them."""


class Program(click.Group):
    """All commands. Usage errors are printed as JSON too, and interrupts and closed streams have an exit status."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in their groups, one line each."""
        width = max(map(len, self.commands))
        for title, rows in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{command.name:<{width}}", line) for command, line in rows])

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

    Every command has its own --help. docs/quickstart.md starts with them.
    """
    # Threads of PyTorch that wait for one another sleep. Otherwise they take the cores that other programs share.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")


for _command, _ in chain.from_iterable(_GROUPS.values()):
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
