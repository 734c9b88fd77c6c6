"""Packaged texts that need no network: news and a technical reference. Loads no torch."""

import importlib.util
import re
from pathlib import Path

from gac.core.errors import TextError

SAMPLES = "samples"
"""Stands for the texts, or the tasks, that quality is reported on by default."""
SAMPLE_TEXTS = ("wiki-sample", "news-sample", "python-reference")
SAMPLE_WINDOWS = 32
"""Windows of each of these texts that are measured by default, so that it takes minutes on a CPU."""
RESERVED = 32 * 1024
"""Tokens at the head of news and of the reference that are for calibration alone."""
NEWS = "lee_background.cor"


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


def packaged_file(name: str, text: str) -> Path:
    """Find a file in the test data of the package gensim, which is not imported; TextError if there is none.

    Args:
        text: the text or task that needs it, for the error.
    """
    if (path := file_of_package("gensim", f"test/test_data/{name}")) is not None:
        return path
    raise TextError(
        f"{text} is not installed",
        f"the package gensim 4.4.0 with its {name}",
        "Run pip install --no-deps gensim==4.4.0, or name another.",
    )


def file_of_package(package: str, path: str) -> Path | None:
    """Find a file of a package, which is not imported; None if it is missing."""
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or ()
    return next((file for folder in folders if (file := Path(folder, path)).is_file()), None)
