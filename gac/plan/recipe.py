"""The recipe: every choice a caller can make for a plan, validated once and stored as JSON.

``gac.allocate(model, budget=0.8, method="svd-llm")`` is short for
``gac.allocate(model, recipe=Recipe.of(budget=0.8, method="svd-llm"))``. A field that is None is decided by
``gac.allocation.resolve.resolve``, in one place.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

from annotated_types import Ge

from gac.core.arguments import Most, check_fields, is_number, is_whole, plain
from gac.core.errors import BudgetError, GacError, did_you_mean
from gac.core.io import Record
from gac.core.untrusted import MAX_INTEGER
from gac.core.workloads import Workload
from gac.forms import DEFAULT_FORMS, FORMS, LATENCY_FORMS
from gac.forms.curvature.registry import METHODS
from gac.forms.planned_sites import Fusing
from gac.plan.costs import BYTES, COSTS, PARAMS, ns_of
from gac.plan.engines import ENGINES, Step
from gac.plan.evidence import ProfileUsed
from gac.plan.sizes import SIZED, size_of
from gac.schemes import DEFAULT_SCHEME, SCHEMES, scheme_named

if TYPE_CHECKING:
    from gac.forms.curvature.methods import Method
    from gac.models.families import Family
    from gac.models.sites import Site

P = TypeVar("P", "Measure", "Space", "Deployment", "Limits")

_ALIGN = re.compile(r"profile(?:, ?group=([0-9]{1,9}))?")
DEFAULT_WORKLOADS = ("prefill:1x1024", "decode:1@1024")
DEFAULT_BUDGET = 0.8
_PARTS = ("measure", "space", "deployment", "limits")
_ALWAYS_SHOWN = ("method", "text", "seed", "forms", "refit", "workloads")

HEADS = (DEFAULT_SCHEME, "w8a16")
"""Formats of the embedding and the LM head."""

FEW_BITS = 4
"""Schemes of at most this many bits rotate the model by default."""

DEFAULT_TEXT = ("wiki-sample:32x1024", "self:32x1024")
"""Calibration text: what the model is for shows in what it writes."""
DEFAULT_TEXT_ON_A_CPU = ("wiki-sample:14x1024", "self:2x1024")
"""The same where the model is on a CPU, where much of its own text would take longest."""

Refit = Literal["none", "residual", "update"]
"""The refit of weights after compression, see ``gac.compression.refit``."""

Shots = Literal[1, 2]
"""The number of times that gradients are taken, see ``gac.measurement.calibration.stream_second``."""


@dataclass(frozen=True)
class Measure:
    """The estimate of the loss of a choice: metric, calibration text, gradient passes.

    Attributes:
        method: the metric of errors: ``kfac``, ``svd-llm``, ``asvd`` (``asvd:ALPHA``) or ``svd``; or ``palu``
            (``palu:N``), which gives k_proj and v_proj the form ``latent`` in groups of 4 (N) heads, leaves everything
            else dense, and reads the budget as the kept fraction of the KV cache; ``palu-fold`` has groups of one
            head, and folds V's second factor into o_proj.
        text: calibration text: ``wiki-sample``, ``news-sample``, ``python-reference``, from a hub ``wikitext2``,
            ``c4``, ``chat`` (conversations) and ``code`` (Python), a path, or ``self``, which the dense model writes;
            optionally with windows and tokens, as in ``wiki-sample:64x1024``. Several texts are calibrated on
            together; their windows have one length. The default is ``DEFAULT_TEXT``, and ``DEFAULT_TEXT_ON_A_CPU`` for
            a model on a CPU.
        seed: selects the windows of the text; 0 takes them in even steps.
        bos: True starts every calibration window with the tokenizer's BOS, in the place of one token of text. None
            does so where the tokenizer adds BOS by itself (Llama, Gemma, Mistral; not Qwen).
        shots: 2 takes the gradients a second time, from the model compressed to 0.8 by its one-shot plan and fitted
            again: SmolLM2's perplexity is 0.5 % lower for it at 0.8 and 1.8 % at 0.6. Calibration takes two or three
            times as long, and a second copy of the targeted weights needs memory. For the method ``kfac`` and the rule
            ``loss``, where weights can be fitted again by ``residual``.
        balance: of several texts. None: each weighs by its windows. ``mean``: all weigh alike, so that the mean of
            ln(perplexity / dense) over the texts is minimised. ``worst``: they weigh so that the largest of these is as
            small as the search found; it measures the model up to six times, from the same statistics.
    """

    method: str = "kfac"
    text: str | tuple[str, ...] = DEFAULT_TEXT
    seed: Annotated[int, Ge(0), Most(MAX_INTEGER)] = 0
    shots: Shots = 1
    bos: bool | None = None
    balance: Literal["mean", "worst"] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        texts = (self.text,) if isinstance(self.text, str) else tuple(self.text)
        _check(bool(texts) and all(texts), "measure.text", self.text, "a name or a path, or several")
        expected = "several calibration texts to weigh, or None"
        _check(self.balance is None or len(texts) > 1, "measure.balance", self.balance, expected)
        object.__setattr__(self, "text", texts[0] if len(texts) == 1 else texts)


@dataclass(frozen=True)
class Space:
    """The search space: forms, schemes and dims that a weight may have.

    Attributes:
        forms: forms that compete with dense: ``low_rank``, ``narrow`` (fewer neurons of an MLP), ``head_dim`` (shorter
            value vectors, in v_proj, o_proj and the KV cache), ``narrow_pair`` (beside ``narrow``: pairs in a narrower
            MLP, at widths from 3/4 to 1/4 of its neurons; ``narrow_pair:N`` at N of them), ``heads`` (fewer KV heads,
            each with its query heads), ``skip`` (attentions and MLPs left out), ``latent`` (keys and values of groups
            of 4 heads as latents, in the KV cache too; ``latent:N`` of N; ``latent:int8``, ``latent:N:int4`` and so on
            quantise the latents to 8 or 4 bits), ``kv_bits`` (keys and values in 2 to 8 bits in the KV cache). Between
            two forms that tie in every limited cost, the first wins.
            ``Recipe.of`` takes ``low_rank`` and ``narrow`` by default, and adds ``skip`` where a latency below the
            dense model's is asked for with the method ``kfac``.
        schemes: number formats of weights; ``bf16`` is 16 bits a number, as loaded.
        align: True allows only dims that the profile shows to be sound; a number allows their multiples of it, False
            every integer. ``profile,group=128``: whole groups of 128, for weights that are quantised later.
        rotate: rotate the model before it is measured and compressed (``gac.models.rotation.rotate``), so that
            quantising loses less where features have outliers. The function is the same, and nothing is added at run
            time; but a tied LM head becomes a weight of its own. None: where a scheme has at most 4 bits, the model
            can be rotated, and no tied head has to be split off.
        same_count: True keeps as many experts, of one width and in one scheme, in every layer that routes tokens (of
            one shape, where layers differ), so that ``gac.export`` can write a checkpoint of the stock architecture.
            For the form ``experts``.
        head: format of the embedding and the LM head: ``bf16``, as loaded, or ``w8a16``. They are not targeted
            weights: only a limit that is a size of the whole model counts them.
    """

    forms: tuple[str, ...] = DEFAULT_FORMS
    schemes: tuple[str, ...] = (DEFAULT_SCHEME,)
    align: bool | int = True
    rotate: bool | None = None
    head: str = DEFAULT_SCHEME
    same_count: bool = False

    def __post_init__(self) -> None:
        for name, registry in (("forms", FORMS), ("schemes", SCHEMES)):
            names = getattr(self, name)
            _check(isinstance(names, tuple), f"space.{name}", names, "names, as in a list")
            object.__setattr__(self, name, tuple(dict.fromkeys(map(registry.name, names))))
        object.__setattr__(self, "forms", tuple(name for name in self.forms if name != "dense"))  # it always competes
        _check(bool(self.schemes), "space.schemes", self.schemes, "one at least")
        align = plain(self.align)
        expected = "True, False, the number that dims are to be multiples of, or 'profile,group=N'"
        is_step = isinstance(align, bool) or (is_whole(align) and 1 <= align <= MAX_INTEGER)
        _check(is_step, "space.align", align, expected, "Give a number from 1 to 2 ** 62, such as align=16.")
        check_fields(self)
        expected = f"{' or '.join(HEADS)}: embedding and head as they are loaded, or in 8 bits with a scale a row"
        _check(self.head in HEADS, "space.head", self.head, expected)

    @property
    def few_bits(self) -> bool:
        """True where a scheme has so few bits that quantising loses less in a rotated basis."""
        return any(scheme_named(name).bits <= FEW_BITS for name in self.schemes)


@dataclass(frozen=True)
class Deployment:
    """The GPU, the workloads and the way the model will run.

    Attributes:
        profile: the latency table: the name of a shipped one or of one in ``GAC_HOME``, or a path. None: the local
            GPU's, or the shipped H100's where there is no GPU.
        workloads: what latency is looked up for: ``prefill:BxS`` or ``decode:B@C``.
        fuse: True runs the first GEMMs of weights that read the same input (q/k/v; gate/up) as one, and gives them dims
            for it; the profile has to hold the shared shapes. ``"auto"`` does so where the plan is better or faster for
            it. The dense model of latency fractions always does. None: ``"auto"`` for the rule ``loss`` and methods for
            any form, else False.
        engine: the engine that will serve the model. For ``vllm``, GEMMs take the time that they have in GAC's plugin,
            latencies are those of whole steps where the profile has them (``gac profile --engine vllm``), weights of
            one input share a GEMM, and only forms and schemes compete that the plugin runs at full speed. For
            ``transformers``, latencies are those of the targeted weights alone. None: ``vllm`` if the profile has the
            model's steps and the plugin runs all forms and schemes, else ``transformers``.
        decode_kernel: always ``torch``; a field of stored plans, so that those of earlier versions open.
        tensor_parallel: GPUs of a host over which every weight is split (tensor parallelism). Latencies are then those
            of each GPU's part and of the collectives, which the profile has to hold (``gac profile --collectives``
            under torchrun), and every dim divides into parts that are sound. For the rule ``loss``.
    """

    profile: str | None = None
    workloads: tuple[str, ...] = DEFAULT_WORKLOADS
    fuse: Fusing | None = None
    engine: str | None = None
    decode_kernel: Literal["torch"] = "torch"
    tensor_parallel: Annotated[int, Ge(1), Most(MAX_INTEGER)] = 1

    def __post_init__(self) -> None:
        _check(isinstance(self.workloads, tuple), "deployment.workloads", self.workloads, "names, as in a list")
        object.__setattr__(self, "workloads", tuple(dict.fromkeys(map(str, self.parsed))))
        check_fields(self)
        _check(self.engine in (None, *ENGINES), "deployment.engine", self.engine, f"one of {', '.join(ENGINES)}")
        _check(self.profile != "", "deployment.profile", self.profile, "a name, a path or None")

    @cached_property
    def parsed(self) -> tuple[Workload, ...]:
        return tuple(Workload.parse(str(name)) for name in self.workloads)


@dataclass(frozen=True)
class Limits:
    """Limits on what the plan costs, each a fraction of the cost of the dense targeted weights.

    ``params`` and ``memory`` may be a size of the whole model instead, embeddings and head included: ``"6B"``
    parameters, ``"6GB"``. A plan's recipe has the fraction that this allows.

    Attributes:
        params: kept fraction of the parameters, in (0, 1]; 0.8 by default, 1 where ``memory`` is given. The rules
            ``loss`` and ``importance`` never exceed it (``plan.budget.over`` says by how much another rule did).
        memory: kept fraction of the bytes, in (0, 1].
        kv_cache: kept fraction of the KV cache, in (0, 1]; needs a form that makes it smaller (``kv_bits``,
            ``latent``, ``head_dim``).
        latency: allowed fraction of the latency, by workload; {} limits none. None: with the rule ``loss`` no workload
            may be slower than the dense model, where the profile holds that workload's latency.
    """

    params: float | str | None = None
    memory: float | str | None = None
    kv_cache: float | None = None
    latency: dict[str, float] | None = None

    def __post_init__(self) -> None:
        if self.params is None:
            object.__setattr__(self, "params", DEFAULT_BUDGET if self.memory is None else 1.0)
        for column, name in ((cost.name, cost.limit) for cost in COSTS.values()):
            if isinstance(value := getattr(self, name), str) and column in SIZED:
                size_of(column, value)
            elif value is not None:
                check_fraction(f"limits.{name}", value)
                object.__setattr__(self, name, float(value))
        if self.latency is None:
            return
        expected = "fractions by workload, or 'any'"
        _check(isinstance(self.latency, Mapping), "limits.latency", self.latency, expected)
        for workload, fraction in self.latency.items():
            positive = is_number(fraction) and 0 < fraction < math.inf
            expected = "a number above 0, the allowed fraction of the dense latency"
            _check(positive, f"limits.latency.{workload}", fraction, expected, "Give a limit such as 0.9.", BudgetError)
        parsed = {str(Workload.parse(str(name))): float(fraction) for name, fraction in self.latency.items()}
        object.__setattr__(self, "latency", parsed)

    @property
    def budget(self) -> float:
        assert isinstance(self.params, float), "a size that is not resolved"
        return self.params

    @property
    def has_sizes(self) -> bool:
        """True where a limit is a size of the whole model."""
        return isinstance(self.params, str) or isinstance(self.memory, str)


@dataclass(frozen=True)
class Recipe(Record):
    """All options of a plan, validated when the record is made.

    Attributes:
        refit: how weights are fitted again, layer by layer, to the model as compressed so far: ``residual`` (dense
            weights too, to the dense outputs and to what the residual stream has lost), ``update`` (second factors
            alone, SVD-LLM's closed form) or ``none``. None: ``residual`` for the method ``kfac`` and the rule ``loss``,
            but for OPT-350M, whose norms change the residual stream itself. It changes what is predicted, so the plan
            holds it.
        slack: extra loss allowed for speed, as a fraction of the least loss: among the choices within it the fastest is
            taken, which saves most over all workloads (each as a fraction of the dense model's time); 0 takes the least
            loss. None: 0.003 (``gac.allocation.resolve.SLACK``) with the rule ``loss`` where ``limits.latency`` is None
            or {} and the profile has the latencies, else 0.
        rule: how the choice is made. ``loss`` is exact over the loss curves. Others, for comparison: ``importance``
            (scores times parameters in a window of the unaligned ranks, solved exactly), and the peers' rules
            ``uniform`` (SVD-LLM), ``fisher`` (PaLU), ``zero-sum`` (ZS-SVD; one more backward pass over the calibration
            text) and ``sensitivity`` (ASVD; nine runs of the model for every weight), which can also be rounded:
            ``uniform:down8``, ``fisher:nearest32``, ``zero-sum:pad64``.

    Raises:
        GacError: a field is invalid; names the field, its value and what is expected. Names of methods and rules are
            looked up when the recipe is used.
    """

    measure: Measure = field(default_factory=Measure)
    space: Space = field(default_factory=Space)
    deployment: Deployment = field(default_factory=Deployment)
    limits: Limits = field(default_factory=Limits)
    refit: Refit | None = None
    slack: float | None = None
    rule: str = "loss"

    def __post_init__(self) -> None:
        if self.refit is not None:
            known = get_args(Refit)
            remedy = did_you_mean(str(self.refit), known, "Correct the name.")
            _check(self.refit in known, "refit", self.refit, f"one of {', '.join(known)}", remedy)
        check_fields(self)
        if self.slack is not None:
            expected = "a number from 0 to 1, the fraction of the loss to give for speed"
            _check(0 <= self.slack <= 1, "slack", self.slack, expected)
            object.__setattr__(self, "slack", float(self.slack))
        split = self.deployment.tensor_parallel > 1
        expected = f"loss, with tensor_parallel={self.deployment.tensor_parallel}: other rules divide no dims"
        _check(not split or self.rule == "loss", "rule", self.rule, expected, "Leave one of the two out.")
        for name in self.limits.latency or ():
            expected = f"one of the plan's workloads ({', '.join(self.deployment.workloads) or 'none'})"
            remedy = "Add it to the workloads, or drop the limit."
            _check(name in self.deployment.workloads, "limits.latency", name, expected, remedy, BudgetError)

    @property
    def fractions(self) -> dict[str, float]:
        """Allowed fraction of the dense model's cost, by limited cost column; parameters first."""
        latency = self.limits.latency or {}
        counted = {name: getattr(self.limits, cost.limit) for name, cost in COSTS.items()}
        timed = {ns_of(workload): latency.get(workload) for workload in self.deployment.workloads}
        fractions = {PARAMS: counted[PARAMS], BYTES: counted[BYTES]} | timed | counted  # the order in stored plans
        return {column: fraction for column, fraction in fractions.items() if fraction is not None}

    @classmethod
    def of(cls, budget: float | str | None = None, **options: Any) -> "Recipe":
        """Make a recipe from keywords.

        Args:
            budget: ``limits.params``.
            options: the other fields by name. ``calibration`` is ``measure.text``; ``latency`` may be one fraction for
                every workload, or ``"any"``, which limits none. Forms, schemes and methods may be objects, which are
                registered. A single form, scheme, workload or text needs no list. A loaded latency table or documents
                are named in the plan, not here.

        Raises:
            GacError: a keyword is unknown, or a field is invalid.
        """
        if unknown := sorted(options.keys() - set(KEYWORDS)):
            remedy = did_you_mean(unknown[0], KEYWORDS, "Leave it out.")
            raise GacError(f"the option {unknown[0]!r}", f"one of budget, {', '.join(KEYWORDS)}", remedy)
        values: dict[str, Any] = {"params": budget}
        for name, value in options.items():
            if name == "calibration":
                values["text"] = str(value) if isinstance(value, (str, Path)) else tuple(value)
            elif name == "profile":
                values[name] = str(value) if isinstance(value, (str, Path)) else None
            elif name in ("forms", "schemes", "workloads"):
                values[name] = (value,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
            elif name == "method" and not isinstance(value, str):
                values[name] = METHODS.name(value)
            else:
                values[name] = parse_align(value) if name == "align" else value

        def part(kind: type[P]) -> P:
            return kind(**{entry.name: values.pop(entry.name) for entry in fields(kind) if entry.name in values})

        deployment = part(Deployment)
        latency = values.get("latency")
        if latency is not None and not isinstance(latency, Mapping):
            values["latency"] = {} if latency == "any" else dict.fromkeys(deployment.workloads, latency)
        limits = part(Limits)
        faster = any(fraction < 1 for fraction in (limits.latency or {}).values())
        if faster and values.get("method", Measure.method) == Measure.method:
            values.setdefault("forms", LATENCY_FORMS)
        return cls(part(Measure), part(Space), deployment, limits, **values)

    def flat(self) -> dict[str, Any]:
        """Fields by name, ``limits.params`` as ``budget``: the main ones, and others that differ from their default."""
        values: dict[str, Any] = {"budget": self.limits.params}
        for part in (self.measure, self.space, self.limits, self, self.deployment):
            default = type(part)()
            for name in (entry.name for entry in fields(part)):
                value = getattr(part, name)
                changed = value != getattr(default, name) and name not in ("params", *_PARTS)
                if changed or name in _ALWAYS_SHOWN:
                    values[name] = value
        return values


KEYWORDS = tuple(
    {"text": "calibration"}.get(entry.name, entry.name)
    for part in (Measure, Space, Deployment, Limits, Recipe)
    for entry in fields(part)
    if entry.name not in ("params", "decode_kernel", *_PARTS)
)
"""The keywords of ``Recipe.of``, and so of ``gac.allocate``, besides ``budget``."""


@dataclass(frozen=True, eq=False)
class ResolvedRecipe:
    """The recipe that ``gac.allocation.resolve.resolve`` completes; every later step takes this record.

    Attributes:
        recipe: with forms, fuse, refit, slack and limits of latency decided. ``space.rotate`` may be None until the
            model is loaded, whose norms decide it; a limit that is None limits nothing.
        targeted: the sites of the family, in model order: all weights that may change.
        sites: the same weights as the plan decides on them, see ``gac.forms.planned_sites.as_planned``.
        profile: the latency table's name and digest.
        steps: whole steps of the dense model in the recipe's engine, by workload, where the profile has them.
    """

    recipe: Recipe
    method: "Method"
    model_type: str
    family: "Family"
    targeted: Sequence["Site"]
    sites: Sequence["Site"]
    profile: ProfileUsed
    steps: Mapping[str, Step]

    @property
    def weight_names(self) -> list[str]:
        """Those of the linear weights."""
        return [weight.name for site in self.targeted for weight in site.weights if not weight.is_routed]


def check_fraction(name: str, value: object) -> None:
    """Refuse what is no kept fraction.

    Raises:
        BudgetError: it is no number, or not in (0, 1].
    """
    expected = "a number above 0 and at most 1, the kept fraction of what the dense model takes"
    within = is_number(value) and 0 < value <= 1  # type: ignore[operator]
    _check(within, name, value, expected, "Give a fraction such as 0.8.", BudgetError)


def parse_align(align: object) -> Any:
    """Return N for ``profile,group=N``, True for ``profile``, and anything else as it is.

    N inputs share a scale in weights that are quantised later on (GPTQ, AWQ and torchao: 128); every rank and width is
    then a whole number of groups.

    >>> parse_align("profile,group=128"), parse_align("profile"), parse_align(16)
    (128, True, 16)
    """
    match = _ALIGN.fullmatch(align) if isinstance(align, str) else None
    return align if match is None else True if match[1] is None else int(match[1])


def _check(
    valid: bool,
    name: str,
    value: object,
    expected: str,
    remedy: str = "Correct it, or leave it out.",
    error: type[GacError] = GacError,
) -> None:
    if not valid:
        raise error(f"{name}={value!r}", expected, remedy)
