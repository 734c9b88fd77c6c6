"""A model that GAC compressed, for transformers' ``trust_remote_code=True``. Licence: Apache-2.0.

These files are GAC's own, as they are. Where GAC is imported, transformers uses the installed ones instead. Each time
that transformers opens this file it searches it for imports, so there is no more in it than the way to the classes.
"""

from typing import Any

from .classes import class_named
from .compressed import CompressedModel


def __getattr__(name: str) -> Any:
    return class_named(name, CompressedModel, __name__)
