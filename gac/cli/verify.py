"""The command that checks a compressed checkpoint against its digests."""

from dataclasses import asdict
from pathlib import Path

import click

import gac
from gac.cli.options import FILE
from gac.cli.verb import Answer, Verb


@click.command(cls=Verb, resume="Nothing was changed; run it again.")
@click.argument("directory", type=FILE)
def verify(directory: Path) -> Answer:
    """Check that a compressed model is as it was saved, to the last bit.

    DIRECTORY was written by gac compress or gac.save, with digests of every tensor, of the config and of all other
    files. What differs is named. The digest that is printed stands for all of it: whoever has it from the author needs
    nothing else.
    """
    found = gac.verify(directory)
    document = {"directory": str(directory)} | asdict(found)
    lines = [
        f"{directory} is as it was saved",
        f"tensors      {found.tensors:,}, {found.bytes / 1e6:,.1f} MB",
        f"config       {found.keys} keys",
        f"files        {found.files}",
        f"digest       {found.digest}",
    ]
    if found.not_checked:
        lines.append(f"not checked  {', '.join(found.not_checked)} (not there when it was saved)")
    return Answer(document, lambda: ["\n".join(lines)])
