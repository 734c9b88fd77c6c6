"""``python -m gac``: the command line."""

from gac.cli import main

main(prog_name="gac")
