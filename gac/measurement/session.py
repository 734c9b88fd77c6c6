"""From a model and a resolved recipe to its loss curves: load, check, calibrate, measure every form and scheme."""

import hashlib
import logging
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import comb, inf
from pathlib import Path

import numpy as np
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from gac.core.arrays import Floats
from gac.core.distributed.ranks import ALONE, Ranks
from gac.core.distributed.run import check_shared, this_run
from gac.core.errors import ModelError, PlanError, TextError
from gac.core.io import home, to_json
from gac.core.version import __version__
from gac.forms import form_named
from gac.forms.curvature.metric import FACTOR
from gac.forms.curvature.registry import METHODS
from gac.forms.loss_curves import LossCurves
from gac.measurement.attended import held_out
from gac.measurement.calibration import (
    FIRST_KEPT,
    CalibrationRun,
    TextOfMixture,
    kept_on_disk,
    moment_bytes,
    routed_by_layer,
    stream_second,
)
from gac.measurement.curves import ModelCurves, measure_curves
from gac.measurement.documents import Text
from gac.measurement.embeddings import check_embeddings, measure_head
from gac.measurement.expected import expected_curves, expected_error, expected_share
from gac.measurement.joint_losses import MOST
from gac.measurement.moments import LayerMoments
from gac.measurement.runs import TOKENS
from gac.measurement.similarity import check_windows, compare_texts
from gac.measurement.store import StatisticsStore
from gac.measurement.text import Windows
from gac.measurement.texts import Texts, cut_windows
from gac.measurement.weight_measurements import measure_weights
from gac.models.basis import Rotation
from gac.models.digests import model_digest, read_parameter
from gac.models.families import family_of
from gac.models.linears import check_sizes
from gac.models.loading import Loaded, default_device, load_config, load_model
from gac.models.modules import input_device
from gac.models.plain import check_frequencies, check_in_memory, check_one_dtype, check_plain
from gac.models.rotation import rotated, rotates_freely
from gac.models.sites import Site
from gac.plan.evidence import Calibration, CalibrationPart, ExpertTokens, Measured
from gac.plan.plan import Plan
from gac.plan.recipe import DEFAULT_TEXT, DEFAULT_TEXT_ON_A_CPU, Recipe, ResolvedRecipe
from gac.plan.summary import ON_GRID
from gac.runtime.model import CompressedModel
from gac.runtime.storage.embeddings import embeddings_of
from gac.schemes import DEFAULT_SCHEME, scheme_named

logger = logging.getLogger("gac")

FirstShot = Callable[[CalibrationRun], nn.Module]
"""Makes the compressed model of a first shot, see ``gac.compression.first_shot.first_shot``."""

_FORMAT = 15  # raised when the stored statistics of a layer change, or the way a first shot is made


@dataclass(frozen=True, eq=False)
class Measurement:
    """Measured losses of a model, and the facts that a plan records about them.

    Attributes:
        recipe: with every default decided, rotation too.
        curves: expected loss of every weight by form, scheme and dim.
        evidence: the model, its text and how far predictions are off.
        by_weight: what the rule asked for besides curves, by weight name.
        run: the calibration that the curves come from; for as long as the session is open.
        check: windows of the text that was compared with the calibration text.
    """

    recipe: Recipe
    curves: LossCurves
    evidence: Measured
    by_weight: Mapping[str, Floats]
    run: CalibrationRun
    check: Windows | None = None


Measuring = Callable[[Sequence[float]], Measurement]
"""Measures the loss of every choice, with so much weight for each token of every calibration text; () for 1."""


@contextmanager
def measuring(
    model: PreTrainedModel | str | Path,
    resolved: ResolvedRecipe,
    texts: Texts,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | str | Path | None = None,
    *,
    first_shot: FirstShot,
    needs: str | None = None,
    compare_with: Text | None = None,
    progress: bool = True,
) -> Iterator[Measuring]:
    """Open a model to measure the loss of every choice that the recipe allows.

    Statistics are stored under ``GAC_HOME``, by text; a repeated call reads them.

    Args:
        first_shot: compresses the model once, where the recipe has two shots.
        needs: the name of another measurement of each weight, see ``gac.measurement.weight_measurements``.
        compare_with: a text that the calibration text is compared with first, see ``gac.measurement.similarity``.

    Raises:
        GacError: the model, the text or the statistics are not usable.
    """
    ranks, sites = this_run(), resolved.targeted
    by_default = resolved.recipe.measure.text == DEFAULT_TEXT
    if by_default and (default_device() if isinstance(model, (str, Path)) else input_device(model).type) == "cpu":
        texts = Texts.of(DEFAULT_TEXT_ON_A_CPU)
        more = " and ".join(f"--calibration {text}" for text in DEFAULT_TEXT)
        logger.info("few windows calibrate on a CPU; %s, the default on a GPU, takes longer and loses less", more)
    _announce(resolved, texts, ranks)
    loaded = load_dense_model(model, tokenizer, sites, stream=True)
    if (space := resolved.recipe.space).rotate is None:
        space = replace(space, rotate=space.few_bits and rotates_freely(loaded.model))
        resolved = replace(resolved, recipe=replace(resolved.recipe, space=space))
    recipe = resolved.recipe
    of_head, lossy = scheme_named(space.head), any(scheme_named(name).lossy for name in space.schemes)
    if recipe.measure.balance == "worst":
        check_in_memory(loaded.model, ", with balance='worst'", "where it runs as planned", ", or balance the mean")
    if recipe.measure.shots == 2 or lossy or of_head.lossy:
        _check_options(loaded.model, resolved)
    if on_grid := loaded.on_grid and (lossy or of_head.lossy) and not space.rotate:
        logger.warning("%s: %s; rotate=True (--rotate) takes them off that grid", loaded.name, ON_GRID)
    digest = targeted_digest(loaded, sites)
    cut = partial(cut_windows, loaded=loaded, digest=digest, seed=recipe.measure.seed, bos=recipe.measure.bos)
    if by_default:
        texts, windows = _default_windows(texts, partial(cut, progress=progress))
        balance = recipe.measure.balance if len(texts.parts) > 1 else None
        recipe = replace(recipe, measure=replace(recipe.measure, text=texts.written, balance=balance))
    else:
        windows = cut(texts, progress=progress)
    if ranks.count > 1:
        check_same_everywhere(ranks, loaded, digest, windows, recipe)
    check = None
    if compare_with is not None:
        compared = (loaded.model, loaded.tokenizer, sites, texts, windows, compare_with, progress)
        ranks.once(partial(compare_texts, *compared))
        check = check_windows(loaded.model, loaded.tokenizer, texts, windows, compare_with)
    params = sum(parameter.numel() for parameter in loaded.model.parameters())
    opened = calibration_runs(
        loaded, recipe, windows, digest, owned=isinstance(model, (str, Path)), first_shot=first_shot, progress=progress
    )

    def measured_with(weights: Sequence[float]) -> Measurement:
        weights = weights or _balanced(recipe, texts)
        run = run_of(weights)
        dense_inputs = lossy and recipe.refit in (None, "none")
        measured = measure_curves(run, sites, forms=space.forms, schemes=space.schemes, rounding=dense_inputs)
        head = measure_head(run, loaded.model, of_head) if of_head.lossy else None
        by_weight = ranks.once(lambda: measure_weights(needs, replace(run, ranks=ALONE), sites) if needs else {})
        text = _calibration(texts, windows, measured, weights)
        evidence = Measured(
            model=loaded.name,
            digest=digest,
            params=params,
            family=resolved.model_type,
            calibration=text,
            profile=resolved.profile,
            factor=FACTOR * expected_share(recipe.refit, resolved.method, resolved.family),
            error=expected_error(resolved.method, text),
            rotation=rotation,
            head=head,
            on_grid=on_grid,
            experts=None if routed_by_layer(sites) else resolved.family.routed_params(loaded.model.config),
            expert_tokens=_expert_tokens(measured, sites),
        )
        curves = expected_curves(measured.curves, recipe, resolved.method, resolved.family)
        return Measurement(recipe, curves, evidence, by_weight, run, check)

    with opened as (run_of, rotation):
        yield measured_with


def _expert_tokens(measured: ModelCurves, sites: Sequence[Site]) -> tuple[ExpertTokens, ...]:
    top_k = {layer: weights[0].top_k for layer, weights in routed_by_layer(sites).items()}
    return tuple(
        ExpertTokens(layer, int(reached.sum()) // top_k[layer], int(reached.min()), int(np.median(reached)))
        for layer, reached in sorted(measured.reached.items())
    )


def _balanced(recipe: Recipe, texts: Texts) -> Sequence[float]:
    """Return the weights of the texts by the recipe; () for the same of every token."""
    if recipe.measure.balance is None:
        return ()
    return [texts.windows / (len(texts.parts) * part.windows) for part in texts.parts]


def _calibration(texts: Texts, windows: Windows, measured: ModelCurves, weights: Sequence[float]) -> Calibration:
    losses, parts = measured.dense_losses, tuple[CalibrationPart, ...]()
    if len(texts.parts) > 1:
        each = zip(texts.parts, losses, weights or [1.0] * len(losses), strict=True)
        parts = tuple(CalibrationPart(part.name, part.windows, loss, weight) for part, loss, weight in each)
    return Calibration(
        text=texts.name,
        windows=len(windows),
        window_tokens=windows.length,
        digest=windows.digest,
        loss=measured.dense_loss,
        documents=texts.documents,
        bos=windows.bos == "windows",
        parts=parts,
    )


@contextmanager
def calibration_runs(
    loaded: Loaded,
    recipe: Recipe,
    windows: Windows,
    digest: str,
    *,
    owned: bool,
    first_shot: FirstShot,
    keep_rotated: bool = False,
    progress: bool = True,
) -> Iterator[tuple[Callable[[Sequence[float]], CalibrationRun], Rotation | None]]:
    """Open the statistics of a model, by the weights of texts; with the model rotated inside, where the recipe says so.

    The second shot's statistics are stored apart, and its model is made when its moments are first asked for.
    ``owned`` and ``keep_rotated`` are as for ``gac.models.rotation.rotated``.
    """
    method = METHODS.get(recipe.measure.method)
    # Statistics of a rotated model are others, so they have another key.
    start, end = f"{digest}, rotated" if recipe.space.rotate else digest, str(method.power)

    def run_of(weights: Sequence[float], suffix: str = "") -> CalibrationRun:
        counts = tuple(weights) or (1.0,) * len(windows.texts)
        weighted = f", weights {counts}" if len({*counts}) > 1 else ""
        texts = tuple(
            TextOfMixture(text.numbers, _store(f"{start} {text.digest} {end}{suffix}"), weight)
            for text, weight in zip(windows.texts, counts, strict=True)
        )
        store = _store(f"{start} {windows.digest} {end}{suffix}{weighted}")
        return CalibrationRun(loaded.model, windows.sequences, method, store, progress, ranks=this_run(), texts=texts)

    def two_shots(weights: Sequence[float]) -> CalibrationRun:
        dense, run = run_of(weights), run_of(weights, f", gradients at {FIRST_KEPT}")

        def stream(request: CalibrationRun, sites: Sequence[Site]) -> Iterator[tuple[int, LayerMoments | None]]:
            first = replace(run, model=first_shot(dense))
            return stream_second(replace(dense, attended=request.attended, readers=request.readers), first, sites)

        return replace(run, source=stream)

    rotating: AbstractContextManager[Rotation | None] = nullcontext()
    if recipe.space.rotate:
        rotating = rotated(loaded.model, keep_rotated, owned)
    with rotating as rotation:
        yield run_of if recipe.measure.shots == 1 else two_shots, rotation


def _store(key: str) -> StatisticsStore:
    name = hashlib.sha256(f"{__version__} {_FORMAT} {key}".encode()).hexdigest()
    return StatisticsStore(home() / "statistics" / name[:24])


def _announce(resolved: ResolvedRecipe, texts: Texts, ranks: Ranks) -> None:
    """Log the work to come, and refuse a folder of statistics that cannot be written, before weights are read."""
    for line in _expected_work(resolved, texts):
        logger.info("%s", line)
    store = StatisticsStore(home() / "statistics")
    store.check_writable()
    if ranks.count > 1:
        check_shared(store.directory, ranks)


def _expected_work(resolved: ResolvedRecipe, texts: Texts) -> Iterator[str]:
    recipe, sites = resolved.recipe, resolved.targeted
    weights = [weight for site in sites for weight in site.weights]
    forms = [form_named(name) for name in dict.fromkeys((*resolved.method.forms, *recipe.space.forms))]
    attended = resolved.method.two_sided and any(form.loss.uses_attention_curvature for form in forms)
    folder, stored = home() / "statistics", kept_on_disk(sites, attended)
    size = len(texts.parts) * moment_bytes(sites, attended) / 1e9
    where = f"and factors in {folder}" if stored else f"not kept on disk, factors in {folder}"
    yield (
        f"{len(sites)} sites; calibration on {texts.windows} windows of {texts.length} tokens of {texts.name}; "
        f"{size:.2g} GB of statistics {where}, reused where they exist"
    )
    if recipe.measure.shots == 2:
        times = "twice" if kept_on_disk(sites) else "three times"
        yield (
            f"two shots: calibration takes {times} as long and twice the disk, and needs memory for a second copy of "
            f"the weights, compressed to {FIRST_KEPT:g}"
        )
    for form in (form for form in map(form_named, recipe.space.forms) if form.loss.needs_forward_runs):
        if form.loss.anchors:
            continue
        dims = [form.full(weight) - form.min_dim for weight in weights if form.shortens(weight) == "in"]
        runs = sum(dims) + (0 if form.min_dim else comb(min(len(dims), MOST), 2))
        others = [f"--form {name}" for name in recipe.space.forms if name != form.name]
        how = f" ({' '.join(others)})" if others else ""
        yield (
            f"form {form.name}: the model is run {runs} times on up to {TOKENS} tokens, from the first layer that "
            f"changes on; leave the form out{how} to save that"
        )
    windows = sum(len(held_out(part.windows, part.length)) for part in texts.parts) if attended else 0
    bases = {base.name: base for form in forms for base in (form.base_form or form,) if base.loss.anchors and windows}
    for form in bases.values():
        runs = (len(form.loss.anchors) + 1) * (sum(map(form.applies_to, weights)) + 1)
        yield (
            f"form {form.name}: the model is run up to {runs} times on {windows * texts.length} held-out tokens, from "
            "the layer that changes on"
        )
    if (head := recipe.space.head) != DEFAULT_SCHEME:
        yield f"head {head}: the model is run on up to {TOKENS} tokens, with embedding and LM head quantised and not"


def load_dense_model(
    model: PreTrainedModel | str | Path,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | str | Path | None,
    targeted: Sequence[Site] = (),
    stream: bool = False,
) -> Loaded:
    """Load a model that is not compressed yet; an unknown family is refused before weights are read.

    Args:
        targeted: the sites that its config gives, whose weights may be replaced; a model that they do not fit, or that
            cannot be compressed and saved (``gac.models.plain.check_plain``), is then refused too.
    """
    if isinstance(model, (str, Path)):
        family_of(load_config(model))
    loaded = load_model(model, tokenizer, stream=stream, dequantise=True)
    if isinstance(loaded.model, CompressedModel):
        problem = f"a {type(loaded.model).__name__}, which is compressed"
        raise ModelError(problem, "a dense model", "Load the one it came from.")
    check_one_dtype(loaded.model)
    check_frequencies(loaded.model)
    if targeted:
        sites = family_of(loaded.model.config).sites(loaded.model.config, routed=bool(routed_by_layer(targeted)))
        if sites != tuple(targeted):
            expected = "the sizes that its config had before the weights were read"
            raise ModelError("a model with another config", expected, "Allocate again.")
        check_plain(loaded.model, [weight.name for site in targeted for weight in site.weights if not weight.is_routed])
    return loaded


def _check_options(model: PreTrainedModel, resolved: ResolvedRecipe) -> None:
    if resolved.recipe.measure.shots == 2:
        check_in_memory(model, ", with shots=2", "where the first shot is made of it", ", or use shots=1")
    space = resolved.recipe.space
    if scheme_named(space.head).lossy:
        check_embeddings(model)
    for names, schemes in ((resolved.weight_names, space.schemes), (embeddings_of(model), (space.head,))):
        tightest = min(map(scheme_named, schemes), key=lambda scheme: scheme.largest)
        for name in names if tightest.largest < inf else ():
            tightest.check_range(read_parameter(model, f"{name}.weight"), name)


def check_same_everywhere(ranks: Ranks, loaded: Loaded, digest: str, windows: Windows, options: Recipe | Plan) -> None:
    name = f"{type(options).__name__.lower()} with digest"
    facts = {"model digest": digest, "calibration text digest": windows.digest}
    ranks.check_alike(facts | {name: hashlib.sha256(to_json(options)).hexdigest()})
    device = input_device(loaded.model)
    devices = ranks.gathered((platform.node(), str(device)))
    shared = [place for place in devices if device.type == "cuda" and devices.count(place) > 1]
    if shared:
        raise ModelError(
            f"{devices.count(shared[0])} processes with their models on {shared[0][1]}",
            "a GPU for each",
            "Pass the name of the model, or put it on cuda:LOCAL_RANK.",
        )


def targeted_digest(loaded: Loaded, sites: Sequence[Site]) -> str:
    """SHA-256 of the weights of the sites, which have to be of the sizes that the config gives them."""
    weights = [weight for site in sites for weight in site.weights if not weight.is_routed]
    check_sizes(loaded.model, weights)
    return model_digest(loaded.model, [weight.name for weight in weights])


def planned_digest(plan: Plan, loaded: Loaded, sites: Sequence[Site]) -> str:
    """``targeted_digest``, which has to be the plan's."""
    digest = targeted_digest(loaded, sites)
    if digest != plan.measured.digest:
        raise PlanError(
            f"the model's config and weights have digest {digest[:12]}",
            f"{plan.measured.digest[:12]}, those of {plan.measured.model} that the plan was made for",
            "Use the plan with the model it was made for, or allocate again.",
        )
    return digest


def _default_windows(texts: Texts, cut: Callable[[Texts], Windows]) -> tuple[Texts, Windows]:
    """Cut the windows of texts, without the model's own where it cannot write any."""
    try:
        return texts, cut(texts)
    except (TextError, ModelError) as failure:
        rest = Texts.of(f"{texts.parts[0].name}:{texts.windows}x{texts.length}")
        windows = cut(rest)
        logger.warning("calibrating on %s alone, for the dense model writes no text: %s", rest.name, failure)
        return rest, windows
