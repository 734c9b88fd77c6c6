"""From a model and a recipe to the problem: what every choice loses, beside what it takes on a GPU."""

import hashlib
import logging
import platform
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gac.allocation.decide import settled
from gac.allocation.feasibility import check_reachable, meets_without_loss
from gac.allocation.problem import Problem
from gac.allocation.rules import RULES
from gac.compression.ends import check_ends, rounded_ends, shapes_of_ends
from gac.compression.expected import expected_curves, expected_error, expected_share
from gac.compression.first_shot import calibration_run, check_shots
from gac.compression.refit import refit_named
from gac.core.distributed.ranks import ALONE, Ranks
from gac.core.distributed.run import check_shared, this_run
from gac.core.errors import GacError, ModelError, PlanError
from gac.core.io import home, to_json
from gac.evaluation.protocol import check_positions
from gac.forms import DEFAULT_FORMS, form_named
from gac.forms.curvature.methods import Method
from gac.forms.curvature.metric import FACTOR
from gac.forms.curvature.registry import METHODS
from gac.forms.planned_sites import Fusing, as_planned, check_forms_fit
from gac.measurement.calibration import CalibrationRun
from gac.measurement.curves import measure_curves
from gac.measurement.documents import Text
from gac.measurement.head import measure_head
from gac.measurement.likeness import check_likeness
from gac.measurement.store import StatisticsStore
from gac.measurement.text import TextSpec, Windows, check_text, check_vocabulary
from gac.measurement.texts import CalibrationText, Texts
from gac.models.basis import Rotation
from gac.models.families import family_of
from gac.models.linears import check_sizes
from gac.models.loading import (
    Loaded,
    check_frequencies,
    check_in_memory,
    check_one_dtype,
    load_config,
    load_model,
    model_digest,
    read_parameter,
)
from gac.models.modules import input_device
from gac.models.plain import check_plain
from gac.models.rotation import rotate, rotated, rotates_freely
from gac.models.sites import Site
from gac.plan.plan import Calibration, CalibrationPart, Measured, Plan, RoundedHead
from gac.plan.recipe import Recipe
from gac.profiling.select import select_profile
from gac.profiling.table import Profile
from gac.runtime.model import CompressedModel
from gac.runtime.storage.embeddings import embeddings_of
from gac.schemes import scheme_named

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("gac")


@dataclass(frozen=True, eq=False)
class Asked:
    """A recipe, with the table and the text that it names, or that were handed over in their place."""

    recipe: Recipe
    profile: Profile | str | Path | None
    text: Texts

    @classmethod
    def of(cls, recipe: Recipe | str | Path | None, budget: float | None, options: Mapping[str, Any]) -> "Asked":
        """From a recipe, or from keywords; forms are those of the method where it has its own.

        Raises:
            GacError: both are given, or what is asked for does not go together.
        """
        if recipe is None:
            given = options.get("calibration", "wiki-sample")
            text = Texts.of(given)
            named = {} if isinstance(given, str) else {"calibration": text.written}
            found = cls(Recipe.of(budget, **{**options, **named}), options.get("profile"), text)
        elif budget is not None or options:
            given = f"a recipe together with {', '.join([*(['budget'] if budget is not None else []), *options])}"
            raise GacError(given, "a recipe alone, or keywords alone", "Change the recipe with dataclasses.replace.")
        else:
            recipe = Recipe.opened(recipe)
            found = cls(recipe, recipe.deployment.profile, Texts.named(recipe.measure.text))
        method = METHODS.get(found.recipe.measure.method)
        fitted = _with_fusing(with_own_forms(found.recipe, method), method)
        RULES.get(fitted.rule).check(fitted)
        return replace(found, recipe=fitted)


def _with_fusing(recipe: Recipe, method: Method) -> Recipe:
    """The recipe with ``fuse`` decided where it is left open."""
    if recipe.deployment.fuse is not None:
        return recipe
    fuse: Fusing = "auto" if recipe.rule == "loss" and not method.forms else False
    return replace(recipe, deployment=replace(recipe.deployment, fuse=fuse))


def with_own_forms(recipe: Recipe, method: Method) -> Recipe:
    """The recipe as the method plans: one with forms of its own takes the budget for that of the KV cache.

    Raises:
        GacError: other forms than its own, or a second limit of the cache.
    """
    forms, limits = recipe.space.forms, recipe.limits
    if not method.forms:
        return recipe
    if forms not in (DEFAULT_FORMS, method.forms):
        given = f"method {method.name} with forms {', '.join(forms)}"
        raise GacError(given, f"its own, {', '.join(method.forms)}", "Leave the forms out.")
    if limits.kv_cache is None:
        limits = replace(limits, params=1.0, kv_cache=limits.params)
    elif limits.budget < 1:
        given = f"method {method.name} with budget {limits.budget:g} and a KV-cache limit of {limits.kv_cache:g}"
        raise GacError(given, "a budget alone, which is the kept fraction of the KV cache", "Drop the KV-cache limit.")
    return replace(recipe, space=replace(recipe.space, forms=method.forms), limits=limits)


def measure_problem(
    model: "PreTrainedModel | str | Path",
    asked: Asked,
    tokenizer: "PreTrainedTokenizerBase | str | Path | None",
    *,
    check: Text | None = None,
    progress: bool,
) -> Problem:
    """The loss curves of a model's sites beside a latency table; limits out of reach are refused before that.

    Args:
        check: a text that the calibration text is compared with first, see ``gac.measurement.likeness``.
    """
    table, used = select_profile(asked.profile)
    logger.info("profile of %s: %s", used.gpu, used.note)
    asked.text.check()
    if isinstance(check, str):
        check_text(check)
    ranks = this_run()
    store = StatisticsStore(home() / "statistics")
    store.check_writable()
    check_shared(store.directory, ranks)
    if isinstance(model, (str, Path)):
        _settled(load_config(str(model)), asked.recipe, table)  # what fails, fails before the weights are read
    loaded = dense_model(model, tokenizer, stream=True)
    planned, recipe = _settled(loaded.model.config, asked.recipe, table)
    recipe = _with_rotation(recipe, loaded.model)
    if spared := [name for name in asked.recipe.space.forms if name not in recipe.space.forms]:
        logger.info("dense weights keep every limit: %s need not be measured, and is left out", " and ".join(spared))
    family: str = loaded.model.config.model_type
    layout = family_of(loaded.model.config)
    sites = layout.sites(loaded.model.config)
    names = [weight.name for site in sites for weight in site.weights]
    check_plain(loaded.model, names)
    method = METHODS.get(recipe.measure.method)
    if recipe.measure.shots == 2:
        check_in_memory(loaded.model, ", with shots=2", "where the first shot is made of it", ", or use shots=1")
    if scheme_named(recipe.space.head).lossy:
        check_ends(loaded.model)
    windows = _windows(asked.text, loaded, recipe.measure.seed, recipe.measure.bos)
    _check_ranges(loaded.model, sites, recipe)
    digest = targeted_digest(loaded, sites)
    check_alike(ranks, loaded, digest, windows, recipe)
    if check is not None:
        compared = partial(check_likeness, loaded.model, loaded.tokenizer, sites, asked.text, windows, check, progress)
        ranks.once(compared)
    params, key = sum(parameter.numel() for parameter in loaded.model.parameters()), statistics_key(digest, recipe)
    with in_basis(recipe, loaded, model) as rotation:
        run = calibration_run(loaded.model, key, windows, method, recipe.measure.shots, progress=progress, ranks=ranks)
        forms, schemes = recipe.space.forms, recipe.space.schemes
        curves = measure_curves(run, sites, forms=forms, schemes=schemes, rounding=_rounds_as_dense(recipe))
        head = _head(loaded.model, run, recipe.space.head)
        extra = ranks.once(lambda: RULES.get(recipe.rule).measure(replace(run, ranks=ALONE), sites))
    text = _calibration(asked.text, windows, curves.dense_loss)
    measured = Measured(
        model=loaded.name,
        digest=digest,
        params=params,
        family=family,
        calibration=text,
        profile=used,
        factor=FACTOR * expected_share(recipe.refit, method, layout),
        error=expected_error(method, text),
        rotation=rotation,
        head=head,
    )
    expected = expected_curves(curves.curves, recipe, method, layout)
    return Problem(planned, expected, table, recipe, measured, extra)


def _check_ranges(model: "PreTrainedModel", sites: Sequence[Site], recipe: Recipe) -> None:
    """Refuse weights, and an embedding and a head, with numbers that a scheme asked for cannot store.

    Raises:
        ModelError: names the first of them, its largest number and the scheme.
    """
    targeted = [weight.name for site in sites for weight in site.weights]
    for names, schemes in ((targeted, recipe.space.schemes), (embeddings_of(model), (recipe.space.head,))):
        tightest = min(map(scheme_named, schemes), key=lambda scheme: scheme.largest)
        for name in names if tightest.largest < inf else ():
            tightest.check_range(read_parameter(model, f"{name}.weight"), name)


def _rounds_as_dense(recipe: Recipe) -> bool:
    """Whether weights may be rounded for the inputs that the dense model gives them."""
    return recipe.refit in (None, "none") and any(scheme_named(name).lossy for name in recipe.space.schemes)


def check_alike(ranks: Ranks, loaded: Loaded, digest: str, windows: Windows, asked: Recipe | Plan) -> None:
    """Refuse processes that see different files or are asked for different things, or that share a GPU.

    Args:
        digest: of the model's weights.

    Raises:
        GacError: names the first difference.
    """
    what = f"{type(asked).__name__.lower()} with digest"
    facts = {"model digest": digest, "calibration text digest": windows.digest}
    ranks.check_alike(facts | {what: hashlib.sha256(to_json(asked)).hexdigest()})
    device = input_device(loaded.model)
    places = ranks.gathered((platform.node(), str(device)))
    twice = [place for place in places if device.type == "cuda" and places.count(place) > 1]
    if twice:
        raise ModelError(
            f"{places.count(twice[0])} processes with their models on {twice[0][1]}",
            "a GPU for each",
            "Pass the name of the model, or put it on cuda:LOCAL_RANK.",
        )


def _head(model: "PreTrainedModel", run: CalibrationRun, name: str) -> RoundedHead | None:
    """Embedding and head in the scheme of this name, and what that loses; None where it does not round."""
    scheme = scheme_named(name)
    if not scheme.lossy:
        return None
    loss = measure_head(run, name, partial(rounded_ends, model, scheme))
    return RoundedHead(name, shapes_of_ends(model), loss)


def _settled(config: Any, recipe: Recipe, table: Profile) -> tuple[Sequence[Site], Recipe]:
    """The sites as they are planned, and the recipe with what it leaves open decided; refused where it cannot be met.

    Forms that the model is run for are left out where latency is limited and dense weights keep all limits.

    Args:
        config: the model's, or the shapes of a known one.
    """
    family, sites = config.model_type, family_of(config).sites(config)
    _check_divided(config, recipe.deployment.tensor_parallel)
    method = METHODS.get(recipe.measure.method)
    check_forms_fit(sites, recipe.space.forms, family)
    refit = refit_named(recipe.refit, recipe.rule, method, recipe.space.forms, sites, family)
    check_shots(recipe.measure.shots, method, recipe.rule, sites, family)
    planned = as_planned(sites, recipe.space.forms, recipe.deployment.fuse)
    recipe = settled(replace(recipe, refit=refit), planned, table)
    check_reachable(planned, recipe, table)
    space = recipe.space
    cheap = tuple(name for name in space.forms if not form_named(name).runs)
    if cheap != space.forms and recipe.limits.latency and meets_without_loss(planned, recipe, table):
        return _settled(config, replace(recipe, space=replace(space, forms=cheap)), table)
    return planned, recipe


def _check_divided(config: Any, gpus: int) -> None:
    """Refuse what would run whole on every GPU.

    Raises:
        ModelError: transformers does not say how the architecture is divided.
    """
    if gpus > 1 and not getattr(config, "base_model_tp_plan", True):
        raise ModelError(
            f"tensor_parallel={gpus} for a {config.model_type}, which transformers does not divide",
            "an architecture with a base_model_tp_plan in transformers",
            "Plan for one GPU (tensor_parallel=1).",
        )


def _with_rotation(recipe: Recipe, model: "PreTrainedModel") -> Recipe:
    """The recipe with ``rotate`` decided where it is left open."""
    space = recipe.space
    if space.rotate is not None:
        return recipe
    return replace(recipe, space=replace(space, rotate=space.few_bits and rotates_freely(model)))


def _calibration(text: Texts, windows: Windows, loss: float) -> Calibration:
    """What the plan records of the text."""
    several = text.parts if len(text.parts) > 1 else ()
    parts = tuple(CalibrationPart(part.name, part.windows) for part in several)
    size, bos = (len(windows), windows.length), windows.bos == "windows"
    return Calibration(text.name, *size, windows.digest, loss, text.documents, bos, parts)


def dense_model(
    model: "PreTrainedModel | str | Path",
    tokenizer: "PreTrainedTokenizerBase | str | Path | None",
    stream: bool = False,
) -> Loaded:
    """The model, which no one has compressed yet; of an unknown family it is refused before its weights are fetched.

    Args:
        stream: as for ``load_model``.
    """
    if isinstance(model, (str, Path)):
        family_of(load_config(str(model)))
    loaded = load_model(model, tokenizer, stream=stream, dequantise=True)
    if isinstance(loaded.model, CompressedModel):
        given = f"a {type(loaded.model).__name__}, which is compressed"
        raise ModelError(given, "a dense model", "Load the one it came from.")
    check_one_dtype(loaded.model)
    check_frequencies(loaded.model)
    return loaded


def in_basis(
    recipe: Recipe, loaded: Loaded, given: "PreTrainedModel | str | Path", keep: bool = False
) -> AbstractContextManager[Rotation | None]:
    """With the model rotated, where the recipe says so. A model that the caller has loaded is then as it was.

    Args:
        given: the model as the caller named it, or loaded it.
        keep: whether that stays rotated too, unless something raises.

    Raises:
        ModelError: it cannot be rotated.
    """
    if not recipe.space.rotate:
        return nullcontext()
    if isinstance(given, (str, Path)):
        return nullcontext(rotate(loaded.model))  # nobody else has it, so that no second copy has to be kept
    return rotated(loaded.model, keep)


def statistics_key(digest: str, recipe: Recipe) -> str:
    """What statistics are kept under: the digest of the weights, which rotated have others."""
    return f"{digest}, rotated" if recipe.space.rotate else digest


def targeted_digest(loaded: Loaded, sites: Sequence[Site]) -> str:
    """SHA-256 of the weights of the sites.

    Raises:
        ModelError: a weight has another size than the config gives it.
    """
    weights = [weight for site in sites for weight in site.weights]
    check_sizes(loaded.model, weights)
    return model_digest(loaded.model, [weight.name for weight in weights])


def planned_digest(plan: Plan, loaded: Loaded, sites: Sequence[Site]) -> str:
    """That digest, which has to be the plan's.

    Raises:
        PlanError: the plan was made for another model.
    """
    digest = targeted_digest(loaded, sites)
    if digest != plan.measured.digest:
        raise PlanError(
            f"the model's config and weights have digest {digest[:12]}",
            f"{plan.measured.digest[:12]}, those of {plan.measured.model} that the plan was made for",
            "Use the plan with the model it was made for, or allocate again.",
        )
    return digest


def planned_windows(plan: Plan, loaded: Loaded, calibration: CalibrationText | None = None) -> Windows:
    """The windows that the plan was calibrated on.

    Raises:
        PlanError: they cannot be had without the documents, or are others here.
    """
    text = plan.measured.calibration
    if calibration is None and text.documents:
        raise PlanError(
            f"a plan calibrated on {text.text}",
            f"the same documents, whose windows have digest {text.digest[:12]}",
            "Pass them: gac.compress(model, plan, calibration=documents).",
        )
    asked = text.texts
    texts = Texts(tuple(TextSpec(one.text) for one in asked)) if calibration is None else Texts.of(calibration)
    if len(texts.parts) != len(asked):
        given, expected = f"calibration on {texts.name}", f"{text.text}, as the plan was"
        raise PlanError(given, expected, "Give as many texts, in the same order.")
    texts = texts.sized([one.windows for one in asked], text.window_tokens)
    windows = _windows(texts, loaded, plan.recipe.measure.seed, text.bos)
    if windows.digest != text.digest:
        raise PlanError(
            f"calibration text {texts.name} has digest {windows.digest[:12]} here",
            f"{text.digest[:12]}, as when the plan was made",
            "Use the same text and tokenizer, or allocate again.",
        )
    return windows


def _windows(text: Texts, loaded: Loaded, seed: int, bos: bool | None) -> Windows:
    windows = text.cut(loaded.tokenizer, seed, bos)
    check_positions(loaded.model, windows.length, "calibration windows")
    embedding: Any = loaded.model.get_input_embeddings()
    check_vocabulary(windows, embedding.num_embeddings)
    return windows
