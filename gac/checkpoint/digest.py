"""The seal of a checkpoint: its header is what its plan makes of its config, which is then known without a comparison.

It tells what was changed or mixed up by accident. Who writes all files can seal what is wrong: so a sealed header is
still built as one that nothing is known of, and the plan read and compared when it is first asked for.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gac.checkpoint.header import Header
from gac.models.families import family_of
from gac.runtime.modeling import SCHEMA


def sealed(header: Header, config: Any) -> dict[str, Any]:
    """The key ``gac`` as it is written.

    Args:
        header: what a plan has just made of ``config``, with the digest of the plan's file.
    """
    content = asdict(header)
    return content | {"seal": _seal(content, config)}


def is_sealed(content: Any, config: Any) -> bool:
    """Whether the key ``gac`` is as it was sealed, and so is what the dims of weights follow from in its config.

    Args:
        content: as it stands in a file.

    Raises:
        ModelError: no model can have the config's sizes.
    """
    if not isinstance(content, dict) or content.get("schema_version") != SCHEMA or not content.get("seal"):
        return False
    return bool(content["seal"] == _seal(content, config))


def _seal(content: Mapping[str, Any], config: Any) -> str:
    stated = {name: value for name, value in content.items() if name != "seal"}
    text = json.dumps(stated, sort_keys=True) + repr(family_of(config).sizes(config))
    return hashlib.sha256(text.encode()).hexdigest()
