"""The package ``gguf``, which is no dependency of GAC's own."""

import importlib
from typing import Any

from gac.core.errors import CheckpointError

ELSEWHERE = "Export the model without --gguf (gac.export), and convert the directory with llama.cpp's own script."
"""The remedy where GAC does not write what llama.cpp may have."""


def gguf_package() -> Any:
    """The package.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        return importlib.import_module("gguf")
    except ImportError as failure:
        remedy = "Run pip install gguf, or in GAC's checkout pip install '.[gguf]'."
        raise CheckpointError("gguf is not installed", "the package that writes GGUF files", remedy) from failure
