"""The evaluation protocol: which tokens models are evaluated on, and its description for every result."""

import os
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from gac.core.errors import TextError
from gac.measurement.documents import Documents, Text
from gac.measurement.text import (
    Windows,
    check_positions,
    check_vocabulary,
    evaluation_windows,
    text_names,
    window_length,
)
from gac.plan.plan import Plan


@dataclass(frozen=True, eq=False)
class Sample:
    """Windows of a text that do not overlap, and their documents, if any."""

    cut: Windows
    documents: Documents | None = None

    @property
    def tokens(self) -> int:
        """The number of predicted tokens: all but the first of each window."""
        return len(self.cut) * (self.cut.length - 1)

    @property
    def protocol(self) -> str:
        cut = self.cut
        size = f"{len(cut)} windows x {cut.length}{'' if cut.complete else ' in even steps'}"
        return f"{cut.name}, {size} from token {cut.start}, non-overlapping, {cut.head}"

    def check(self, model: PreTrainedModel) -> None:
        """Check that the model can be evaluated on the sample.

        Raises:
            TextError: its plan was calibrated on one of the documents, or it lacks a token.
            ModelError: a window has more tokens than the model has positions.
        """
        check_positions(model, self.cut.length, "windows")
        if self.documents is not None:
            _check_unseen(self.documents, model)
        check_vocabulary(self.cut, model)


def take_sample(tokenizer: Any, text: Text, windows: int | None, length: int | None, bos: bool | None = None) -> Sample:
    """Cut a text into windows; arguments as for ``gac.perplexity``.

    Raises:
        TextError: the text is unknown or too short, or there is no BOS.
    """
    source = _source(text)
    length = window_length(source) if length is None else length
    if length < 2:
        raise TextError(f"windows of {length} tokens", "at least 2: the first is not predicted", "Ask for more.")
    documents = source if isinstance(source, Documents) else None
    return Sample(evaluation_windows(source, tokenizer, windows, length, bos), documents)


def dtype_of(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def _source(text: Text) -> str | Documents:
    """A name or path, or documents; a string with white space that is neither is one document."""
    if not isinstance(text, str):
        return Documents.of(text)
    is_text = any(character.isspace() for character in text) and not os.path.isfile(text)
    return Documents([text]) if is_text and text not in text_names() else text


def _check_unseen(documents: Documents, model: nn.Module) -> None:
    plan = getattr(model, "gac_plan", None)
    known = set(plan.documents) if isinstance(plan, Plan) else set()
    seen = [position for position, digest in enumerate(documents.digests) if digest in known]
    if seen:
        raise TextError(
            f"{len(seen)} of {documents.name}, the first at position {seen[0]}, are among the plan's calibration text",
            "text that the model was not calibrated on",
            "Hold documents back for evaluation.",
        )
