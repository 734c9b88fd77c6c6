"""Calibration text: one text, or several, each with its share of the windows."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gac.core.distributed.run import this_run
from gac.core.errors import PlanError, TextError
from gac.core.io import home
from gac.measurement.documents import Documents, Text, ordered
from gac.measurement.images import check_takes_images, digest_of_examples, holds_messages
from gac.measurement.own_text import FOLDER, sampled_windows
from gac.measurement.text import (
    SELF,
    TextSpec,
    Windows,
    as_examples,
    calibration_windows,
    check_positions,
    check_text,
    check_vocabulary,
    digest_of,
    example_windows,
    is_sized_text,
)
from gac.models.examples import Examples
from gac.models.loading import Loaded
from gac.models.plain import check_in_memory
from gac.models.processors import load_processor
from gac.plan.plan import Plan

_SPLITS = 16
Part = TextSpec | Documents
CalibrationText = Text | Part | Iterable[str | Part]
"""Calibration text as a caller may pass it, see ``Texts.of``."""
Cutter = Callable[[Part], Windows | None]
"""Cuts the windows of texts that need the model, which it writes or reads with images; None for any other text."""


@dataclass(frozen=True)
class Texts:
    """Texts to calibrate on, each with its windows; all of one length, and none of them twice."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if len(lengths := {part.length for part in self.parts}) > 1:
            problem = f"calibration windows of {' and '.join(map(str, sorted(lengths)))} tokens"
            raise TextError(problem, "one length for all texts", "Give all of them the same: NAME:32x1024.")
        names = [part.name for part in self.parts if isinstance(part, TextSpec)]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise TextError(f"the calibration text {twice} twice", "each text once", "Add up its windows.")

    @classmethod
    def of(cls, text: CalibrationText) -> "Texts":
        """Parse calibration text in any form that a caller may pass.

        A string is a name or a path. A list is one of texts where one of its items is a ``TextSpec``, ``Documents``, or
        a known name or a file with its windows, as ``notes.txt:32x1024``. The other items then have to be texts too.
        Any other iterable of strings holds documents.

        Raises:
            TextError: a size below 1, a text that is neither known nor a file, or documents that are no strings.
        """
        if isinstance(text, (str, os.PathLike)):
            return cls((TextSpec.parse(str(text)),))
        if isinstance(text, Part):
            return cls((text,))
        if not isinstance(text, Iterable):
            expected = "a name, a path, documents, or a list of these"
            raise TextError(f"a {type(text).__name__} as calibration text", expected, "Name one, such as wiki-sample.")
        items = ordered(text)
        # No document is a known name or a file with its windows.
        if any(is_sized_text(item) if isinstance(item, str) else isinstance(item, Part) for item in items):
            return cls(tuple(map(_part, items)))
        return cls((Documents(items),))

    @property
    def name(self) -> str:
        if len(self.parts) == 1:
            return self.parts[0].name
        return " and ".join(f"{part.name} ({part.windows})" for part in self.parts)

    @property
    def written(self) -> str | tuple[str, ...]:
        each = tuple(str(part) if isinstance(part, TextSpec) else part.name for part in self.parts)
        return each[0] if len(each) == 1 else each

    @property
    def windows(self) -> int:
        return sum(part.windows for part in self.parts)

    @property
    def length(self) -> int:
        return self.parts[0].length

    @property
    def documents(self) -> tuple[str, ...]:
        return tuple(digest for part in self.parts if isinstance(part, Documents) for digest in part.digests)

    def sized(self, windows: Sequence[int], length: int) -> "Texts":
        sized = zip(self.parts, windows, strict=True)
        return Texts(tuple(replace(part, windows=count, length=length) for part, count in sized))

    def cut(self, tokenizer: Any, seed: int = 0, bos: bool | None = None, special: Cutter | None = None) -> Windows:
        """The windows of all of them, in the order of ``interleaved``; as ``calibration_windows`` otherwise.

        Args:
            special: cuts what needs the model; without it that is refused.
        """
        each = [
            (special(part) if special else None) or calibration_windows(part, tokenizer, seed, bos)
            for part in self.parts
        ]
        if len(each) == 1:
            return each[0]
        order, rows = interleaved([len(windows) for windows in each]), [iter(windows.ids) for windows in each]
        ids = torch.stack([next(rows[part]) for part in order])
        places = [tuple(number for number, part in enumerate(order) if part == index) for index in range(len(each))]
        texts = tuple(replace(windows, numbers=numbers) for windows, numbers in zip(each, places, strict=True))
        joined = replace(each[0], name=self.name, ids=ids, digest=digest_of(ids), texts=texts, examples=None)
        if all(windows.examples is None for windows in each):
            return joined
        singly = [iter(as_examples(windows)) for windows in each]
        examples = [next(singly[part]) for part in order]
        return replace(joined, digest=digest_of_examples(examples), examples=Examples(tuple(examples)))


def interleaved(counts: Sequence[int]) -> list[int]:
    """Order windows of several texts so that every k-th window, too, has the texts in their shares.

    The next window is of the part that is most overdue, summed over the windows so far and over those among them that
    are whole multiples of 2, 3, ... 16 windows away.
    """
    total, remaining = sum(counts), list(counts)
    taken = {(step, position): [0] * len(counts) for step in range(1, _SPLITS + 1) for position in range(step)}
    order = []
    for position in range(total):
        alike = [taken[step, position % step] for step in range(1, _SPLITS + 1)]
        overdue = [
            sum(count * (sum(counter) + 1) - total * counter[part] for counter in alike)
            for part, count in enumerate(counts)
        ]
        chosen = max((part for part, more in enumerate(remaining) if more), key=overdue.__getitem__)
        remaining[chosen] -= 1
        for counter in alike:
            counter[chosen] += 1
        order.append(chosen)
    return order


def _part(item: str | Part) -> Part:
    if isinstance(item, Part):
        return item
    if not isinstance(item, str):
        problem = f"a {type(item).__name__} among calibration texts"
        raise TextError(problem, "names, paths, gac.Documents", "Leave it out.")
    spec = TextSpec.parse(item)
    check_text(spec.name, sampled=True)
    return spec


def cut_windows(
    texts: Texts, loaded: Loaded, digest: str, seed: int, bos: bool | None, progress: bool = True
) -> Windows:
    """Cut the windows of texts. The model writes text ``self``, once: it is kept by ``digest``, that of the weights.

    Its processor reads messages with images.

    A GacError says if the model cannot write text, or lacks positions or token ids.
    """

    def special(part: Part) -> Windows | None:
        if isinstance(part, Documents):
            return None
        if holds_messages(part.name):
            config = loaded.model.config
            check_takes_images(config, part.name)
            processor = load_processor(loaded.reader)
            return example_windows(part.name, processor, config, part.windows, part.length, seed, bos)
        if part.name != SELF:
            return None
        check_in_memory(loaded.model, f", with text {SELF!r}", "where it writes text", ", or name another text")
        check_positions(loaded.model, part.length, "calibration windows")
        source = loaded.model, loaded.tokenizer, digest, seed
        return sampled_windows(*source, this_run(), progress, part.windows, part.length, with_bos=bos)

    windows = texts.cut(loaded.tokenizer, seed, bos, special)
    check_positions(loaded.model, windows.length, "calibration windows")
    check_vocabulary(windows, loaded.model)
    return windows


def planned_windows(
    plan: Plan, loaded: Loaded, calibration: CalibrationText | None = None, progress: bool = True
) -> Windows:
    """Cut the windows that the plan was calibrated on; PlanError if they cannot be had, or are others here."""
    text = plan.measured.calibration
    if calibration is None and text.documents:
        raise PlanError(
            f"a plan calibrated on {text.text}",
            f"the same documents, whose windows have digest {text.digest[:12]}",
            "Pass them: gac.compress(model, plan, calibration=documents).",
        )
    parts = text.texts
    texts = Texts(tuple(TextSpec(part.text) for part in parts)) if calibration is None else Texts.of(calibration)
    if len(texts.parts) != len(parts):
        problem, expected = f"calibration on {texts.name}", f"{text.text}, as the plan was"
        raise PlanError(problem, expected, "Give as many texts, in the same order.")
    texts = texts.sized([part.windows for part in parts], text.window_tokens)
    windows = cut_windows(texts, loaded, plan.measured.digest, plan.recipe.measure.seed, text.bos, progress)
    if windows.digest != text.digest:
        copied = (
            f" Copy {home() / FOLDER} from where the plan was made."
            if any(part.name == SELF for part in texts.parts)
            else ""
        )
        raise PlanError(
            f"calibration text {texts.name} has digest {windows.digest[:12]} here",
            f"{text.digest[:12]}, as when the plan was made",
            f"Use the same text and tokenizer, or allocate again.{copied}",
        )
    return windows
