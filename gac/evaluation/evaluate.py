"""Evaluate models alike: perplexity, divergence from the dense model, and tasks."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gac.checkpoint.load import load
from gac.core.arguments import Count, CountOrZero, checked
from gac.core.errors import GacError, ModelError
from gac.evaluation.perplexity import compare_models, perplexity_on
from gac.evaluation.protocol import Sample, dtype_of, take_sample
from gac.evaluation.results import Evaluated, Evaluation, OnText
from gac.evaluation.tasks import Suite, open_suite
from gac.measurement.documents import Documents, Text, ordered
from gac.models.loading import Loaded, is_checkpoint, load_config, load_model, load_tokenizer, model_digest
from gac.models.packaged import PACKAGED
from gac.models.threads import one_call_at_a_time
from gac.runtime.storage.modules import count_parameters

logger = logging.getLogger("gac")

Given = PreTrainedModel | str | Path
"""A loaded model, or the name of one: a directory (a compressed one too), a hub id, ``smollm2``."""


@checked
@one_call_at_a_time
def evaluate(
    models: Given | Sequence[Given],
    *,
    against: Given | None = None,
    text: Text | None = "wiki-sample",
    also: Text | Sequence[Text] = (),
    windows: Count | None = None,
    length: Count | None = None,
    bos: bool | None = None,
    tasks: str | Sequence[str] = (),
    num_fewshot: CountOrZero | None = None,
    limit: Count | None = None,
    batch: Count = 1,
    kl: bool = True,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: bool = True,
) -> Evaluation:
    """Measure models alike, on the same tokens and tasks, one after the other.

    Args:
        models: one or more loaded models, or names: directories (compressed or dense), hub ids, ``smollm2``.
        against: the model that the others are compared with, the dense one.
        text: what perplexity is measured on, as for ``gac.perplexity``; None measures none.
        also: another text, or several, each measured as ``text`` is.
        windows, length, bos: as for ``gac.perplexity``.
        tasks: one or more names of lm-evaluation-harness's tasks, or paths of task files
            (``gac.evaluation.tasks.open_suite``).
        num_fewshot, limit: examples before every item, and items, of each task.
        batch: windows, and requests of a task, that run at once.
        kl: measure KL divergence from ``against`` and top-1 agreement with it too. Both models are in memory then,
            else one at a time is.
        tokenizer: of all models; None takes the first's, and refuses models of other tokens.
        progress: show bars on a terminal.

    Raises:
        GacError: nothing is asked for, a model, text or task cannot be read, or what is measured is not finite.
    """
    named = [models] if isinstance(models, PreTrainedModel | str | Path) else list(models)
    if not named:
        raise GacError("no model", "at least one", "Name a model.")
    tasks = (tasks,) if isinstance(tasks, str) else tasks
    more = (also,) if isinstance(also, (str, Documents)) else ordered(also)
    texts = [*([] if text is None else [text]), *more]
    if not texts and not tasks:
        raise GacError("no text and no tasks", "something to measure", "Name a text, or tasks.")
    if not tasks and (num_fewshot is not None or limit is not None):
        asked = f"num_fewshot={num_fewshot} and limit={limit} without tasks"
        raise GacError(asked, "tasks, whose examples and items these count", "Name tasks, or leave them out.")
    everyone = named if against is None else [*named, against]
    for given in everyone:
        if isinstance(given, str | Path):
            load_config(str(given))  # a name of nothing is refused before anything takes long
    reader = shared_tokenizer(everyone) if tokenizer is None else tokenizer
    suite = open_suite(tasks, num_fewshot, limit) if tasks else None
    samples = [take_sample(reader, one, windows, length, bos) for one in texts]
    measure = partial(_evaluated, tokenizer=reader, samples=samples, suite=suite, batch=batch, progress=progress)
    dtype = _widest(everyone)
    reference = _open(against) if against is not None and kl and samples else None
    measured = [measure(_open(given, dtype), reference) for given in named]
    if against is None:
        return Evaluation(tuple(found for found, _ in measured))
    dense = reference or _open(against)
    found = tuple(replace(found, predicted=_prediction(found, dense)) for found, _ in measured)
    return Evaluation(found, measure(dense, known=measured[0][1])[0])


def _widest(models: Sequence[Given]) -> torch.dtype | None:
    """float32 where a packaged or loaded model runs in it, so that all models compared round activations alike."""
    wide = (one.dtype == torch.float32 if isinstance(one, PreTrainedModel) else str(one) in PACKAGED for one in models)
    return torch.float32 if any(wide) else None


def _open(given: Given, dtype: torch.dtype | None = None) -> Loaded:
    """A model; a compressed checkpoint in this dtype, if one is given."""
    if not isinstance(given, str | Path):
        return open_model(given)
    logger.info("loading %s", given)
    return open_model(given, dtype=dtype if is_checkpoint(given) else None)


def _evaluated(
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
    """Everything of one model, and the reference's perplexities out of the same passes.

    Args:
        known: the model's, where they are known already.
    """
    model, found, others = loaded.model, list(known), []
    plan = getattr(model, "gac_plan", None)  # one that cannot be read is refused before anything is measured
    for sample in () if known else samples:
        if reference is not None:
            perplexity, other, divergence = compare_models(model, reference.model, sample, batch, progress)
            found.append(OnText(perplexity, divergence))
            others.append(OnText(other))
        else:
            found.append(OnText(perplexity_on(model, sample, batch, progress)))
    for one in found:
        logger.info("%s: %s", loaded.name, one.perplexity)
    scores = suite.run(model, tokenizer, batch, progress) if suite else ()
    parameters = count_parameters(model)
    evaluated = Evaluated(loaded.name, parameters, dtype_of(model), scores=scores, plan=plan, also=tuple(found[1:]))
    if found:
        evaluated = replace(evaluated, perplexity=found[0].perplexity, divergence=found[0].divergence)
    return evaluated, others


def _prediction(found: Evaluated, dense: Loaded) -> float | None:
    """What the plan promised for ln(perplexity / dense), where ``dense`` is the model it was made for."""
    plan = found.plan
    if plan is None or found.perplexity is None or plan.healed:  # what healing gives, no plan has predicted
        return None
    names = [weight.name for weight in plan.weights]
    parameters = {name for name, _ in dense.model.named_parameters()}
    if parameters.issuperset(f"{name}.weight" for name in names) and (
        model_digest(dense.model, names) == plan.measured.digest
    ):
        return plan.prediction.loss
    logger.info(
        "%s is not the model that the plan was made for (%s): its prediction is left out",
        dense.name,
        plan.measured.model,
    )
    return None


def open_model(given: Given, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Loaded:
    """A dense model, or a compressed one with its plan as ``gac_plan``; a loaded one is taken as it is.

    Raises:
        GacError: it cannot be read.
    """
    if isinstance(given, str | Path) and is_checkpoint(given):
        name = str(given)
        return Loaded(load(name, device, dtype), name, name)
    return load_model(given, device=device, dtype=dtype)


def shared_tokenizer(models: Sequence[Given]) -> Any:
    """The first model's tokenizer, where all models have the same tokens.

    Raises:
        ModelError: a model without a tokenizer, or two of different vocabularies.
    """
    (first, shared), *others = map(_name_and_tokenizer, models)
    for name, tokenizer in others:
        if tokenizer.get_vocab() != shared.get_vocab():
            raise ModelError(
                f"{first} and {name} have different vocabularies",
                "models of the same tokens: perplexities by the token compare nothing else",
                "Evaluate each on its own.",
            )
    return shared


def _name_and_tokenizer(given: Given) -> tuple[str, Any]:
    if isinstance(given, str | Path):
        return str(given), load_tokenizer(str(given))
    loaded = load_model(given)
    return loaded.name, loaded.tokenizer
