"""Evaluate models alike: perplexity, divergence from the dense model, and tasks."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from gac.checkpoint.load import open_model
from gac.core.arguments import Count, CountOrZero
from gac.core.errors import GacError, ModelError
from gac.evaluation.perplexity import Sample, compare_models, dtype_of, perplexity_on, take_sample
from gac.evaluation.results import Evaluated, Evaluation, OnText
from gac.evaluation.tasks import Suite, open_suite
from gac.measurement.documents import Documents, Text, ordered
from gac.measurement.images import holds_messages
from gac.measurement.samples import SAMPLE_TEXTS, SAMPLE_WINDOWS, SAMPLES
from gac.models.digests import model_digest
from gac.models.loading import Loaded, is_checkpoint, load_config, load_model, load_tokenizer
from gac.models.packaged import PACKAGED
from gac.models.processors import tokenizer_of
from gac.models.threads import entry_point
from gac.runtime.storage.modules import count_parameters

logger = logging.getLogger("gac")

ModelOrName = PreTrainedModel | str | Path
"""A loaded model, or the name of one: a directory (a compressed one too), a hub id, ``smollm2``."""


@entry_point()
def evaluate(
    models: ModelOrName | Sequence[ModelOrName],
    *,
    against: ModelOrName | None = None,
    text: Text | None = SAMPLES,
    also: Text | Sequence[Text] = (),
    windows: Count | Literal["all"] | None = None,
    length: Count | None = None,
    bos: bool | None = None,
    tasks: str | Sequence[str] = (),
    num_fewshot: CountOrZero | None = None,
    limit: Count | None = None,
    batch: Count = 1,
    kl: bool = True,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    progress: bool = True,
) -> Evaluation:
    """Measure models alike, on the same tokens and tasks, one after the other.

    Args:
        models: one or more loaded models, or names: directories (compressed or dense), hub ids, ``smollm2``.
        against: the model that the others are compared with, the dense one.
        text, length, bos: as for ``gac.perplexity``; ``samples`` stands for ``wiki-sample``, ``news-sample`` and
            ``python-reference``, and None measures no perplexity.
        also: another text, or several, measured like ``text``.
        windows: their number on each text, evenly spaced, or ``all``. None takes at most 32 of each text of
            ``samples``, and all of any other.
        tasks: one or more names of lm-evaluation-harness's tasks, paths of task files, or packaged tasks:
            ``hellaswag-sample``, ``gsm8k-sample``, ``last-word-sample``, or ``samples`` for these three.
        num_fewshot, limit: examples before every item, and items, of each task.
        batch: windows, and requests of a task, that run at once.
        kl: measure KL divergence from ``against`` and top-1 agreement with it too. Both models are then in memory,
            else one at a time is.
        tokenizer: of all models, or their processor; None takes the first's, and refuses models of another vocabulary.
        progress: show bars on a terminal.

    Raises:
        GacError: there is nothing to measure, a model, text or task cannot be read, or a result is not finite.
    """
    named = [models] if isinstance(models, ModelOrName) else list(models)
    if not named:
        raise GacError("no model", "at least one", "Name a model.")
    tasks = (tasks,) if isinstance(tasks, str) else tasks
    more = (also,) if isinstance(also, (str, Documents)) else ordered(also)
    texts = [*([] if text is None else [text]), *more]
    if not texts and not tasks:
        raise GacError("no text and no tasks", "something to measure", "Name a text, or tasks.")
    if not tasks and (num_fewshot is not None or limit is not None):
        problem = f"num_fewshot={num_fewshot} and limit={limit} without tasks"
        raise GacError(problem, "tasks, whose examples and items these count", "Name tasks, or leave them out.")
    everyone = named if against is None else [*named, against]
    for model in everyone:
        if isinstance(model, str | Path):
            load_config(model)  # fails early if there is no such model
    reader = _shared_tokenizer(everyone) if tokenizer is None else tokenizer_of(tokenizer)
    suite = open_suite(tasks, num_fewshot, limit) if tasks else None
    taking = windows, length, bos
    source = named[0] if tokenizer is None else tokenizer
    samples = [sample for each in texts for sample in _samples(each, reader, source, named[0], *taking)]
    measure = partial(_measure, tokenizer=reader, samples=samples, suite=suite, batch=batch, progress=progress)
    wide = (m.dtype == torch.float32 if isinstance(m, PreTrainedModel) else str(m) in PACKAGED for m in everyone)
    dtype = torch.float32 if any(wide) else None  # all models round activations alike
    reference = _open(against) if against is not None and kl and samples else None
    measured = [measure(_open(model, dtype), reference) for model in named]
    if against is None:
        return Evaluation(tuple(result for result, _ in measured))
    dense = reference or _open(against)
    results = tuple(replace(result, predicted=_prediction(result, dense)) for result, _ in measured)
    return Evaluation(results, measure(dense, known=measured[0][1])[0])


def _samples(
    text: Text,
    tokenizer: Any,
    source: Any,
    model: ModelOrName,
    windows: int | Literal["all"] | None,
    length: int | None,
    bos: bool | None,
) -> Iterator[Sample]:
    """The windows of a text, or of each that ``samples`` stands for.

    Messages with images are read by the processor of ``source``, for models like ``model``.
    """
    count = None if windows == "all" else windows
    if isinstance(text, str) and text == SAMPLES:
        most = SAMPLE_WINDOWS if windows is None else None
        yield from (take_sample(tokenizer, name, count, length, bos, most) for name in SAMPLE_TEXTS)
    elif isinstance(text, str) and holds_messages(text):
        name = source.config.name_or_path if isinstance(source, PreTrainedModel) else source
        yield take_sample(name, text, count, length, config=load_config(model))
    else:
        yield take_sample(tokenizer, text, count, length, bos)


def _open(model: ModelOrName, dtype: torch.dtype | None = None) -> Loaded:
    if not isinstance(model, str | Path):
        return open_model(model)
    logger.info("loading %s", model)
    return open_model(model, dtype=dtype if is_checkpoint(model) else None)


def _shared_tokenizer(models: Sequence[ModelOrName]) -> Any:
    """The tokenizer of the first model, if all models have the same vocabulary; else a ModelError."""
    pairs = []
    for model in models:
        loaded = None if isinstance(model, str | Path) else load_model(model)
        pairs.append((loaded.name, loaded.tokenizer) if loaded else (str(model), load_tokenizer(str(model))))
    (first, shared), *others = pairs
    for name, tokenizer in others:
        if tokenizer.get_vocab() != shared.get_vocab():
            raise ModelError(
                f"{first} and {name} have different vocabularies",
                "models of one vocabulary: perplexity per token compares nothing else",
                "Evaluate each on its own.",
            )
    return shared


def _measure(
    loaded: Loaded,
    reference: Loaded | None = None,
    known: Sequence[OnText] = (),
    *,
    tokenizer: Any,
    samples: Sequence[Sample],
    suite: Suite | None,
    batch: int,
    progress: bool,
) -> tuple[Evaluated, list[OnText]]:
    """The results of a model (``known`` on texts, if they are), and of the reference from the same passes."""
    model, on_texts, of_reference = loaded.model, list(known), []
    plan = getattr(model, "gac_plan", None)  # a damaged one fails before anything is measured
    for sample in () if known else samples:
        if reference is not None:
            perplexity, other, divergence = compare_models(model, reference.model, sample, batch, progress)
            on_texts.append(OnText(perplexity, divergence))
            of_reference.append(OnText(other))
        else:
            on_texts.append(OnText(perplexity_on(model, sample, batch, progress)))
    for result in on_texts:
        logger.info("%s: %s", loaded.name, result.perplexity)
    scores = suite.run(model, tokenizer, batch, progress) if suite else ()
    first = vars(on_texts[0]) if on_texts else {}
    also, parameters = tuple(on_texts[1:]), count_parameters(model)
    return Evaluated(
        loaded.name, parameters, dtype_of(model), scores=scores, plan=plan, also=also, **first
    ), of_reference


def _prediction(result: Evaluated, dense: Loaded) -> float | None:
    plan = result.plan
    if plan is None or result.perplexity is None:
        return None
    names = [weight.name for weight in plan.weights]
    parameters = {name for name, _ in dense.model.named_parameters()}
    if parameters.issuperset(f"{name}.weight" for name in names) and (
        model_digest(dense.model, names) == plan.measured.digest
    ):
        return plan.prediction.loss
    message = "%s is not the model that the plan was made for (%s): its prediction is left out"
    logger.info(message, dense.name, plan.measured.model)
    return None
