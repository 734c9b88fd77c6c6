"""Checkpoints that the engine runs, and the refusals of others, before it starts."""

import logging
from typing import Any

import vllm

from gac.runtime.header import Header, header_of
from gac.runtime.modules import KINDS

TESTED = ("0.26", "0.32")
_RUN = ("Linear", "LowRankLinear", "Absent", "Constant")
"""Modules that the engine runs, as ``config.json`` calls them."""
_logger = logging.getLogger("gac")


def checked_header(config: Any) -> Header:
    """Return the key ``gac`` of a config; a ValueError names what the engine does not run, and what to do."""
    header = header_of(config)
    if header is None:
        raise ValueError("config.json has no key gac; expected a model that GAC compressed.")
    for name, module in header.modules.items():
        if module.module not in KINDS:
            problem = f"config.json, key gac: {name} is {module.module!r}, which this version of GAC does not know"
            remedy = "Install the version of GAC that wrote it: pip install --upgrade gpu-aligned-compression"
            raise ValueError(f"{problem}; expected one of {', '.join(KINDS)}. {remedy}.")
        if module.module not in _RUN or module.storage is not None:
            kind = module.module if module.storage is None else f"in {module.storage}"
            raise ValueError(f"{name} is {kind}; expected {', '.join(_RUN)} in 16 bits, which this engine runs.")
    if header.head is not None:
        raise ValueError("embedding and head are quantised; expected them in 16 bits, which this engine runs.")
    return header


def warn_of_version() -> None:
    """Warn where GAC's plugin was tested with other versions of vLLM."""
    if not vllm.__version__.startswith(TESTED):
        _logger.warning("vLLM %s; GAC's plugin was tested with %s", vllm.__version__, " and ".join(TESTED))
