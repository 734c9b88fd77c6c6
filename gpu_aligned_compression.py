"""Where the ``gac`` command starts. On the package index, ``gac`` is another tool with its own package and command.

This module has a name that no other tool has, so it can tell when ``import gac`` finds the other one.
"""

import sys

NAME = "gpu-aligned-compression"
REMEDY = f"pip uninstall gac, then pip install --force-reinstall {NAME}"


def main() -> None:
    """Run the command line, or say that another tool stands in its place; an interrupt while it loads ends it too."""
    try:
        import gac

        if getattr(gac, "__distribution__", None) != NAME:
            sys.exit(f"Error: import gac finds another tool in {gac.__file__}, not {NAME}: {REMEDY}")
        if sys.argv[1:] == ["--version"] and (other := _other_tool()):
            sys.exit(f"Error: the tool gac {other} is installed beside {NAME}, and their files mix: {REMEDY}")
        from gac.cli import main as command_line

        command_line(prog_name="gac")
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        sys.exit(130)


def _other_tool() -> str | None:
    """The version of the distribution called ``gac``, where it is installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("gac")
    except PackageNotFoundError:
        return None
