"""What is asked for: one record that is validated once, written as JSON, and travels from the caller to the plan.

``gac.allocate(model, budget=0.8, method="svd-llm")`` is short for
``gac.allocate(model, recipe=Recipe.of(budget=0.8, method="svd-llm"))``.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from gac.core.arguments import is_number, is_whole, plain
from gac.core.errors import BudgetError, GacError, did_you_mean
from gac.core.io import Record
from gac.core.untrusted import MAX_INTEGER
from gac.core.workloads import Workload
from gac.forms import DEFAULT_FORMS, DENSE, FORMS, LATENCY_FORMS
from gac.forms.planned_sites import Fusing
from gac.plan.costs import BYTES, KV_NUMBERS, PARAMS, ns_of
from gac.schemes import DEFAULT_SCHEME, SCHEMES, scheme_named

if TYPE_CHECKING:
    from gac.allocation.rules import Rule
    from gac.forms import Form
    from gac.forms.curvature.methods import Method
    from gac.measurement.texts import CalibrationText
    from gac.profiling.table import Profile
    from gac.schemes import Scheme

_ALIGN = re.compile(r"profile(?:, ?group=([0-9]{1,9}))?")
DEFAULT_WORKLOADS = ("prefill:1x1024", "decode:1@1024")
DEFAULT_BUDGET = 0.8
_PARTS = ("measure", "space", "deployment", "limits")
_SEAMS = {"method": "gac.forms.curvature.registry:METHODS", "rule": "gac.allocation.rules:RULES"}
_SEVERAL = ("calibration", "forms", "schemes", "workloads")
_ALWAYS = ("method", "text", "seed", "forms", "refit", "workloads")

HEADS = tuple(scheme.name for scheme in SCHEMES if scheme.for_embeddings)
"""How embedding and head can be stored."""

FEW_BITS = 4
"""Most bits of a scheme for which a model is rotated where nothing is said."""

DecodeKernel = Literal["torch", "triton"]
"""What runs linear weights where they have one row."""

Refit = Literal["none", "residual", "update"]
"""How weights are fitted again, see ``gac.compression.refit``."""

Shots = Literal[1, 2]
"""How often the gradients are taken, see ``gac.measurement.second_shot``."""


@dataclass(frozen=True)
class Measure:
    """How it is measured what a choice loses.

    Attributes:
        method: the metric that errors are measured in: ``kfac``, ``svd-llm``, ``asvd`` (``asvd:ALPHA``) or ``svd``; or
            ``palu`` (``palu:N``), which gives k_proj and v_proj its form ``latent``, in groups of 4 (N) heads, leaves
            everything else dense, and takes the budget for the kept fraction of the KV cache; ``palu-fold`` has groups
            of one head, and folds V's second factor into o_proj.
        text: calibration text: ``wiki-sample``, ``wikitext2``, ``c4`` or a path, optionally with windows and tokens, as
            in ``wiki-sample:64x1024``. Several texts, each with its windows, are calibrated on together; their windows
            have one length.
        seed: which windows of the text are used; 0 takes them in even steps.
        bos: whether every calibration window begins with the tokenizer's BOS, in the place of one token of text; None
            has it where the tokenizer puts BOS first by itself (Llama, Gemma, Mistral; not Qwen).
        shots: 2 takes the gradients a second time, from the model compressed to 0.8 by its plan of one shot and fitted
            again (inputs stay the dense model's), and plans with them: SmolLM2's perplexity is 0.5 % lower for it at
            0.8 and 1.8 % at 0.6. Calibration takes twice as long (three times where statistics are too large to be
            kept, see ``gac.measurement.calibration``), and the first shot's model is a second copy of the targeted
            weights on the same devices. For the method ``kfac`` and the rule ``loss``, where weights can be fitted
            again by ``residual``; its statistics are kept by themselves, and serve every budget.
    """

    method: str = "kfac"
    text: str | tuple[str, ...] = "wiki-sample"
    seed: int = 0
    shots: Shots = 1
    bos: bool | None = None

    def __post_init__(self) -> None:
        _make_plain(self)
        _check(isinstance(self.method, str), "measure.method", self.method, "the name of a method")
        if isinstance(self.text, tuple) and len(self.text) == 1:
            object.__setattr__(self, "text", self.text[0])
        named = self.text if isinstance(self.text, tuple) and self.text else (self.text,)
        strings = all(isinstance(one, str) and one for one in named)
        _check(strings, "measure.text", self.text, "a name or a path, or several")
        _check(_is_count(self.seed, 0), "measure.seed", self.seed, "a whole number, 0 or more, up to 2 ** 62")
        _check(is_whole(self.shots) and self.shots in (1, 2), "measure.shots", self.shots, "1 or 2")
        _check(self.bos is None or isinstance(self.bos, bool), "measure.bos", self.bos, "True, False or None")


@dataclass(frozen=True)
class Space:
    """What a weight may become.

    Attributes:
        forms: forms that compete with staying dense: ``low_rank``, ``narrow`` (fewer neurons of an MLP), ``head_dim``
            (shorter value vectors, in v_proj, o_proj and the KV cache), ``narrow_pair`` (beside ``narrow``: pairs in a
            narrower MLP, at widths from 3/4 to 1/4 of its neurons; ``narrow_pair:N`` at N of them), ``heads`` (fewer
            key-value heads, each with its query heads), ``skip`` (attentions and MLPs that do nothing), ``latent``
            (keys and values of groups of 4 heads as latents, in the KV cache too; ``latent:N`` of N; ``latent:int8``,
            ``latent:N:int4`` and so on of latents that are rounded to 8 or 4 bits). Of two that differ in nothing that
            is limited, the first stays. ``Recipe.of`` has ``low_rank`` and ``narrow`` where none are named, and
            ``skip`` beside them where a latency below the dense model's is asked for with the method ``kfac``.
        schemes: how numbers may be stored; ``bf16`` is 16 bits a number, as they are loaded.
        align: True keeps to dims that the profile shows to be sound; a number keeps to its multiples among them, False
            allows every integer. ``profile,group=128``: whole groups of 128, for weights that are quantised later.
        rotate: measure and compress the model in another basis, in which rounding loses less where features stand out:
            gains of RMSNorm are folded, and the residual stream and the values of heads rotated. Its function is the
            same, and nothing is added at run time; but a head that was tied to the embedding becomes a weight of its
            own. See ``gac.models.rotation.rotate``. None: where a scheme of at most 4 bits is among ``schemes``, the
            model can be rotated, and no head becomes a weight of its own by it.
        head: how embedding and head are stored: ``bf16``, as they are loaded, or ``w8a16``. They are not among the
            targeted weights, so no limit counts them; bytes of the whole model do.
    """

    forms: tuple[str, ...] = DEFAULT_FORMS
    schemes: tuple[str, ...] = (DEFAULT_SCHEME,)
    align: bool | int = True
    rotate: bool | None = None
    head: str = DEFAULT_SCHEME

    def __post_init__(self) -> None:
        _make_plain(self)
        _check_names("space.forms", self.forms)
        given = dict.fromkeys(map(FORMS.name, self.forms))
        object.__setattr__(self, "forms", tuple(name for name in given if name != DENSE.name))  # which always competes
        _check_names("space.schemes", self.schemes)
        _check(bool(self.schemes), "space.schemes", self.schemes, "one at least")
        object.__setattr__(self, "schemes", tuple(dict.fromkeys(map(SCHEMES.name, self.schemes))))
        _check(
            isinstance(self.align, bool) or _is_count(self.align, 1),
            "space.align",
            self.align,
            "True, False, the number that dims are to be multiples of, or 'profile,group=N'",
            "Give a number from 1 to 2 ** 62, such as align=16.",
        )
        rotating = self.rotate is None or isinstance(self.rotate, bool)
        _check(rotating, "space.rotate", self.rotate, "True or False")
        expected = f"{' or '.join(HEADS)}: embedding and head as they are loaded, or in 8 bits with a scale a row"
        _check(self.head in HEADS, "space.head", self.head, expected)

    @property
    def few_bits(self) -> bool:
        """Whether numbers may be stored in so few bits that rounding them loses less in a rotated basis."""
        return any(scheme_named(name).bits <= FEW_BITS for name in self.schemes)


@dataclass(frozen=True)
class Deployment:
    """Where and how the model will run.

    Attributes:
        profile: a latency table's path, or the name of a shipped one; None takes the local GPU's, and the shipped
            H100's where there is no GPU (the plan says so).
        workloads: what latency is predicted for: ``prefill:BxS``, ``decode:B@C``.
        fuse: run the first GEMMs of weights that read the same input (q/k/v, gate/up) as one, and choose their dims
            together for it; the profile has to hold those shapes (``gac profile --model ... --fuse``) where latency is
            limited or to be predicted. ``"auto"``: where the plan is better so, chosen with the dims; where only
            parameters are limited that is where it is faster, and where the profile lacks a shape it is not done. The
            dense model that latencies are fractions of then runs unfused. None: ``"auto"`` for the rule ``loss`` and
            methods for any form, else False.
        decode_kernel: ``triton`` runs every linear weight but the head in a Triton kernel where it has one row, which
            is decoding one sequence, and chooses dims for it; in CUDA graphs and compiled code, for launching takes
            longer than the kernel. Where such a workload is asked for, the profile has to hold its shapes
            (``gac profile --model ... --decode-kernel triton``). The dense model that latencies are fractions of runs
            as it is.
        tensor_parallel: over how many GPUs of a host every weight is split (tensor parallelism). Latencies are then
            those of each GPU's part and of the collectives, which the profile has to hold (``gac profile
            --collectives`` under torchrun), and every dim divides into parts that are sound. For the rule ``loss``.
    """

    profile: str | None = None
    workloads: tuple[str, ...] = DEFAULT_WORKLOADS
    fuse: Fusing | None = None
    decode_kernel: DecodeKernel = "torch"
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        _make_plain(self)
        named = self.profile is None or (isinstance(self.profile, str) and bool(self.profile))
        _check(named, "deployment.profile", self.profile, "a name, a path or None")
        _check_names("deployment.workloads", self.workloads)
        object.__setattr__(self, "workloads", tuple(dict.fromkeys(map(str, self.parsed))))
        fusing = self.fuse is None or isinstance(self.fuse, bool) or self.fuse == "auto"
        _check(fusing, "deployment.fuse", self.fuse, "True, False or 'auto'", "Leave it out to fuse where it pays.")
        _check(
            self.decode_kernel in ("torch", "triton"), "deployment.decode_kernel", self.decode_kernel, "torch or triton"
        )
        gpus = self.tensor_parallel
        _check(_is_count(gpus, 1), "deployment.tensor_parallel", gpus, "a number of GPUs, 1 or more, up to 2 ** 62")

    @property
    def triton(self) -> bool:
        """Whether GEMMs of one row run in Triton."""
        return self.decode_kernel == "triton"

    @cached_property
    def parsed(self) -> tuple[Workload, ...]:
        """The workloads."""
        return tuple(Workload.parse(str(name)) for name in self.workloads)


@dataclass(frozen=True)
class Limits:
    """What a choice may take, each as a fraction of what the dense targeted weights take.

    Attributes:
        params: kept fraction of the parameters, in (0, 1]; by default 0.8, or 1 where ``memory`` is given. Never
            exceeded by the rules ``loss`` and ``importance`` (``plan.budget.over`` says by how much another one did).
        memory: kept fraction of the bytes, in (0, 1].
        kv_cache: kept fraction of the KV cache, in (0, 1]; needs a form that makes it smaller (``latent``,
            ``head_dim``).
        latency: allowed fraction of the latency, by workload; {} limits none. None: with the rule ``loss`` no workload
            may be slower than the dense model, where the profile holds that workload's latency.
    """

    params: float | None = None
    memory: float | None = None
    kv_cache: float | None = None
    latency: dict[str, float] | None = None

    def __post_init__(self) -> None:
        if self.params is None:
            object.__setattr__(self, "params", DEFAULT_BUDGET if self.memory is None else 1.0)
        for name in ("params", "memory", "kv_cache"):
            if (value := getattr(self, name)) is not None:
                check_fraction(f"limits.{name}", value)
                object.__setattr__(self, name, float(value))
        if self.latency is None:
            return
        expected = "fractions by workload, or 'any'"
        _check(isinstance(self.latency, Mapping), "limits.latency", self.latency, expected)
        for workload, fraction in self.latency.items():
            above = is_number(fraction) and 0 < fraction < math.inf
            expected = "a number above 0, the allowed fraction of the dense latency"
            _check(above, f"limits.latency.{workload}", fraction, expected, "Give a limit such as 0.9.", BudgetError)
        parsed = {str(Workload.parse(str(name))): float(fraction) for name, fraction in self.latency.items()}
        object.__setattr__(self, "latency", parsed)

    @property
    def budget(self) -> float:
        """Kept fraction of the parameters."""
        assert self.params is not None
        return self.params


class Options(TypedDict, total=False):
    """The fields of a recipe as keywords; what has a name may be given as the object, and one of several by itself."""

    method: "str | Method"
    calibration: "CalibrationText"
    seed: int
    shots: Shots
    bos: bool | None
    forms: "str | Form | Iterable[str | Form]"
    schemes: "str | Scheme | Iterable[str | Scheme]"
    align: bool | int | str
    rotate: bool | None
    head: str
    profile: "Profile | str | Path | None"
    workloads: str | Iterable[str]
    fuse: Fusing
    decode_kernel: DecodeKernel
    tensor_parallel: int
    memory: float | None
    kv_cache: float | None
    latency: float | Mapping[str, float] | Literal["any"] | None
    slack: float | None
    refit: Refit | None
    rule: "str | Rule"


@dataclass(frozen=True)
class Recipe(Record):
    """All that is asked for, validated when it is made.

    Attributes:
        refit: how weights are fitted again, layer by layer, to the model as it is compressed so far: ``residual``
            (dense weights too, to the dense outputs and to what the residual stream has lost), ``update`` (second
            factors alone, SVD-LLM's closed form) or ``none``. None: ``residual`` for the method ``kfac`` and the rule
            ``loss``, but for OPT-350M, whose norms change the residual stream itself. It belongs to the plan, for it
            changes what is predicted.
        slack: how much more than the least loss may be lost for speed: of the choices that lose at most this fraction
            more, the fastest is taken, which saves most over all workloads together (each as a fraction of the dense
            model's time); 0 takes the least loss. None: 0.003 (``gac.allocation.decide.SLACK``) with the rule ``loss``
            where ``limits.latency`` is None or {} and the profile has the latencies, else 0.
        rule: how the choice is made. ``loss`` is exact over the loss curves. Others to compare it with: ``importance``
            (scores times parameters in a window of the unaligned ranks, solved exactly), and the peers' rules
            ``uniform`` (SVD-LLM), ``fisher`` (PaLU), ``zero-sum`` (ZS-SVD; one more backward pass over the calibration
            text) and ``sensitivity`` (ASVD; nine runs of the model for every weight), which can also be rounded:
            ``uniform:down8``, ``fisher:nearest32``, ``zero-sum:pad64``.

    Raises:
        GacError: a field holds what it cannot; names the field, what was given and what is expected. Names of methods
            and rules are looked up when the recipe is used.
    """

    measure: Measure = field(default_factory=Measure)
    space: Space = field(default_factory=Space)
    deployment: Deployment = field(default_factory=Deployment)
    limits: Limits = field(default_factory=Limits)
    refit: Refit | None = None
    slack: float | None = None
    rule: str = "loss"

    def __post_init__(self) -> None:
        for name, kind in zip(_PARTS, (Measure, Space, Deployment, Limits), strict=True):
            _check(
                isinstance(getattr(self, name), kind), name, getattr(self, name), f"a gac.plan.recipe.{kind.__name__}"
            )
        known = Refit.__args__  # type: ignore[attr-defined]
        remedy = did_you_mean(str(self.refit), known, "Correct the name.")
        _check(self.refit is None or self.refit in known, "refit", self.refit, f"one of {', '.join(known)}", remedy)
        loose = self.slack is None or (is_number(self.slack) and 0 <= self.slack <= 1)
        _check(loose, "slack", self.slack, "a number from 0 to 1, the fraction of the loss to give for speed")
        if self.slack is not None:
            object.__setattr__(self, "slack", float(self.slack))
        _check(isinstance(self.rule, str), "rule", self.rule, "the name of a rule")
        split = self.deployment.tensor_parallel > 1
        expected = f"loss, with tensor_parallel={self.deployment.tensor_parallel}: other rules divide no dims"
        _check(not split or self.rule == "loss", "rule", self.rule, expected, "Leave one of the two out.")
        for name in self.limits.latency or ():
            expected = f"one of the plan's workloads ({', '.join(self.deployment.workloads) or 'none'})"
            remedy = "Add it to the workloads, or drop the limit."
            _check(name in self.deployment.workloads, "limits.latency", name, expected, remedy, BudgetError)

    @property
    def fractions(self) -> dict[str, float]:
        """The limited cost columns, and the fraction of the dense model's that is allowed of each; parameters first."""
        limits = self.limits
        found = {PARAMS: limits.params, BYTES: limits.memory}
        latency = limits.latency or {}
        found |= {ns_of(workload): latency.get(workload) for workload in self.deployment.workloads}
        found[KV_NUMBERS] = limits.kv_cache
        return {column: fraction for column, fraction in found.items() if fraction is not None}

    @classmethod
    def of(cls, budget: float | None = None, **options: Any) -> "Recipe":
        """A recipe from keywords.

        Args:
            budget: ``limits.params``.
            options: any of ``Options``. ``calibration`` is ``measure.text``; ``latency`` may be one fraction for every
                workload, or ``"any"``, which limits none; forms, methods and rules may be objects, which are
                registered; a latency table or documents that are given as objects are named in the plan, not here.

        Raises:
            GacError: a keyword is unknown, or a field holds what it cannot.
        """
        unknown = sorted(options.keys() - Options.__annotations__.keys())
        if unknown:
            known = Options.__annotations__
            remedy = did_you_mean(unknown[0], known, "Leave it out.")
            raise GacError(f"the option {unknown[0]!r}", f"one of budget, {', '.join(known)}", remedy)
        given = {name: _plain(name, value) for name, value in options.items()}
        deployment = _part(Deployment, given)
        latency = given.pop("latency", None)
        if latency == "any":
            latency = {}
        elif latency is not None and not isinstance(latency, Mapping):
            latency = dict.fromkeys(deployment.workloads, latency)
        limits = Limits(budget, given.pop("memory", None), given.pop("kv_cache", None), latency)
        faster = any(fraction < 1 for fraction in (limits.latency or {}).values())
        if faster and given.get("method", Measure.method) == Measure.method:
            given.setdefault("forms", LATENCY_FORMS)
        if "calibration" in given:
            given["text"] = given.pop("calibration")
        return cls(_part(Measure, given), _part(Space, given), deployment, limits, **given)

    def flat(self) -> dict[str, Any]:
        """The fields by their own names: those that everybody should see, and the others where they are no default.

        ``limits.params`` is called ``budget``.
        """
        found: dict[str, Any] = {"budget": self.limits.budget}
        for part in (self.measure, self.space, self.limits, self, self.deployment):
            plain = type(part)()
            for name in (one.name for one in fields(part)):
                value = getattr(part, name)
                changed = value != getattr(plain, name) and name not in ("params", *_PARTS)
                if changed or name in _ALWAYS:
                    found[name] = value
        return found


def check_fraction(name: str, value: object) -> None:
    """Refuse what is no kept fraction.

    Raises:
        BudgetError: it is no number, or not in (0, 1].
    """
    expected = "a number above 0 and at most 1, the kept fraction of what the dense model takes"
    within = is_number(value) and 0 < value <= 1  # type: ignore[operator]
    _check(within, name, value, expected, "Give a fraction such as 0.8.", BudgetError)


def parse_align(align: object) -> Any:
    """The number of ``profile,group=N``, True for ``profile``; anything else as it is.

    N is how many neighbouring inputs share a scale in weights that are quantised later on (GPTQ, AWQ and torchao: 128):
    every rank and width is then a whole number of groups.

    >>> parse_align("profile,group=128"), parse_align("profile"), parse_align(16)
    (128, True, 16)
    """
    match = _ALIGN.fullmatch(align) if isinstance(align, str) else None
    return align if match is None else True if match[1] is None else int(match[1])


def _part(kind: type[Any], given: dict[str, Any]) -> Any:
    """A part of the recipe from the keywords that are its fields, which are taken away."""
    return kind(**{one.name: given.pop(one.name) for one in fields(kind) if one.name in given})


def _plain(name: str, value: Any) -> Any:
    """A keyword's value as the record has it: names for objects, tuples, Python's own numbers."""
    if name == "align":
        return parse_align(value)
    if name == "profile":
        return str(value) if isinstance(value, (str, Path)) else None
    if name == "calibration" and isinstance(value, Path):
        return str(value)
    if name in _SEAMS and not isinstance(value, str):
        return resolve_name(_SEAMS[name]).name(value)
    if name in ("forms", "schemes", "workloads") and (isinstance(value, str) or not isinstance(value, Iterable)):
        return (value,)
    return tuple(value) if name in _SEVERAL and not isinstance(value, str) else value


def _make_plain(record: Any) -> None:
    """Numbers and truth values of NumPy in the fields become Python's own."""
    for one in fields(record):
        object.__setattr__(record, one.name, plain(getattr(record, one.name)))


def _is_count(value: Any, least: int) -> bool:
    """True for a whole number that the file of a plan can hold."""
    return is_whole(value) and least <= value <= MAX_INTEGER


def _check_names(name: str, value: object) -> None:
    _check(isinstance(value, tuple), name, value, "names, as in a list")


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
