"""Which tokens models are evaluated on, and the words for it that every number carries."""

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
    """Windows of a text that do not overlap, and the documents that they were cut from, where there are any."""

    cut: Windows
    documents: Documents | None = None

    @property
    def tokens(self) -> int:
        """How many are predicted: all but the first of each window, which is BOS where that is in every window."""
        return len(self.cut) * (self.cut.length - 1)

    @property
    def protocol(self) -> str:
        """What a number measured on this sample has to say of it."""
        cut = self.cut
        size = f"{len(cut)} windows x {cut.length}{'' if cut.whole else ' in even steps'}"
        return f"{cut.name}, {size} from token {cut.start}, non-overlapping, {cut.head}"

    def check(self, model: PreTrainedModel) -> None:
        """Refuse a model that the sample cannot be, or must not be, measured on.

        Raises:
            TextError: its plan was calibrated on one of the documents, or it has no such tokens.
            ModelError: it has fewer positions than a window has tokens.
        """
        check_positions(model, self.cut.length, "windows")
        if self.documents is not None:
            _check_unseen(self.documents, model)
        embedding: Any = model.get_input_embeddings()
        check_vocabulary(self.cut, embedding.num_embeddings)


def take_sample(tokenizer: Any, text: Text, windows: int | None, length: int | None, bos: bool | None = None) -> Sample:
    """Cut a text into windows.

    Args:
        text: a named source (its evaluation part), a path to a UTF-8 file, the text itself, or documents.
        windows: how many, in even steps through the text; None takes every whole window.
        length: tokens of a window; None takes the text's own.
        bos: whether every window begins with BOS; None as in ``gac.perplexity``.

    Raises:
        TextError: unknown or too short a text, or no BOS.
    """
    given = _given(text)
    length = window_length(given) if length is None else length
    if length < 2:
        raise TextError(f"windows of {length} tokens", "at least 2: the first is not predicted", "Ask for more.")
    documents = given if isinstance(given, Documents) else None
    return Sample(evaluation_windows(given, tokenizer, windows, length, bos), documents)


def dtype_of(model: PreTrainedModel) -> str:
    """The dtype of a model's weights: ``bfloat16``."""
    return str(model.dtype).removeprefix("torch.")


def _given(text: Text) -> str | Documents:
    """A name or path, or else documents; a string with white space in it that is neither is one document."""
    if not isinstance(text, str):
        return Documents.of(text)
    is_text = any(character.isspace() for character in text) and not os.path.isfile(text)
    return Documents([text]) if is_text and text not in text_names() else text


def _check_unseen(documents: Documents, model: nn.Module) -> None:
    plan = getattr(model, "gac_plan", None)
    known = set(plan.documents) if isinstance(plan, Plan) else set()
    seen = [at for at, digest in enumerate(documents.digests) if digest in known]
    if seen:
        raise TextError(
            f"{len(seen)} of {documents.name}, the first at position {seen[0]}, are among the plan's calibration text",
            "text that the model was not calibrated on",
            "Hold documents back for evaluation.",
        )
