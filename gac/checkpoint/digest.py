"""A digest over a checkpoint's header, the dims of its config and its plan: whether they are as they were written.

It shows what was changed or mixed up by accident, without a comparison. Whoever writes all files can write a digest
that fits: so the model is built as strictly with it, and the plan is read and compared when it is first asked for.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gac.checkpoint.header import Header
from gac.models.families import family_of
from gac.runtime.contract import SCHEMA


def with_digest(header: Header, config: Any) -> dict[str, Any]:
    """The key ``gac`` as it is written.

    Args:
        header: what a plan has just made of ``config``, with the digest of the plan's file.
    """
    content = asdict(header)
    return content | {"digest": _digest(content, config)}


def is_unchanged(content: Any, config: Any) -> bool:
    """Whether the key ``gac``, and all of its config that the dims of weights follow from, are as they were written.

    Args:
        content: as it stands in a file.

    Raises:
        ModelError: no model can have the config's sizes.
    """
    if not isinstance(content, dict) or content.get("schema_version") != SCHEMA or not content.get("digest"):
        return False
    return bool(content["digest"] == _digest(content, config))


def _digest(content: Mapping[str, Any], config: Any) -> str:
    stated = {name: value for name, value in content.items() if name != "digest"}
    text = json.dumps(stated, sort_keys=True) + repr(family_of(config).sizes(config))
    return hashlib.sha256(text.encode()).hexdigest()
