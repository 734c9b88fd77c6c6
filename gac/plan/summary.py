"""A plan as labelled facts in words, and the commands that make and apply it again."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from shlex import join
from typing import Any

from gac.core.words import number_of
from gac.core.workloads import Workload
from gac.forms import DEFAULT_FORMS, form_named
from gac.plan.costs import BYTES, COSTS, PARAMS, Cost
from gac.plan.engines import VLLM
from gac.plan.evidence import Healed
from gac.plan.layers import lossy_schemes
from gac.plan.recipe import Deployment, Recipe, Space
from gac.plan.record import Limit, PlanRecord, SingleGpuComparison, WorkloadLatency
from gac.schemes import DEFAULT_SCHEME, scheme_named

_REFITTED = {"none": "", "residual": "; refitted layer by layer", "update": "; second factors refitted (SVD-LLM)"}
_LETTERS = ((10**9, "B"), (10**6, "M"), (10**3, "K"))
_MUCH = 0.01  # of the loss, above which the cost of the limits of latency is said
_OPTIONS = {"text": "--calibration", "forms": "--form", "schemes": "--scheme", "workloads": "--workload"}


def summary(plan: PlanRecord) -> str:
    measured = plan.measured
    origin = f"method {plan.recipe.measure.method}" if measured.predicted else "as others pruned it"
    title = f"GAC plan for {measured.model} ({measured.family}), {origin}, made with GAC {plan.gac_version}"
    return f"{title}\n{lines(facts(plan))}"


ON_GRID = "the dense weights were in few bits before: rounding them to as many loses less than it would elsewhere"


def lines(rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"{label:<13}{value}".replace("\n", f"\n{'':13}") for label, value in rows)


def facts(plan: PlanRecord) -> list[tuple[str, str]]:
    """Labels and values, some of several lines: the rows that the summary, the model card and the page show."""
    measured = plan.measured
    forms = Counter(weight.form for weight in plan.weights)
    counts = ", ".join(f"{count} {form}" for form, count in sorted(forms.items()))
    aligned = ", ".join(f"{count} x {step}" for step, count in plan.alignment.items() if count)
    *timed, last = latencies(plan) or [""]
    rows = [
        ("parameters", _parameters(plan)),
        ("memory", _memory(plan)),
        ("forms", f"{counts}{fusion(plan)}{_REFITTED[plan.recipe.refit or 'none']}"),
        ("alignment", aligned or "everything stays dense"),
        ("head", _head(plan)),
        ("experts", _experts(plan)),
        ("rotated", str(measured.rotation or "")),
        ("grid", ON_GRID if measured.on_grid else ""),
        *_loss(plan),
        *(("healed", _healing(healed)) for healed in plan.healed),
        *(("latency", line) for line in timed),
        ("latency", "\n".join(filter(None, (last, modelled(plan))))),
        ("limits", latency_limits(plan)),
        ("speed", speed(plan)),
        *((cost.label, _amount(plan, cost)) for cost in COSTS.values() if cost.name not in (PARAMS, BYTES)),
        ("split", "\n".join(split(plan))),
        ("profile", f"{measured.profile.gpu}, {measured.profile.digest[:12]}; {measured.profile.note}"),
        *_evidence(plan),
    ]
    return [(label, value) for label, value in rows if value]


def _parameters(plan: PlanRecord) -> str:
    budget, dense = plan.budget, plan.measured.params
    model = dense - budget.total + budget.used + plan.measured.untied
    of_model = f"{plan.kept_of_model:.4f} of the whole model, {model:,} of {dense:,}"
    kept = f"{budget.used:,} of {budget.total:,} targeted: {budget.kept:.4f} kept"
    if not plan.measured.predicted:
        return f"{kept}; {of_model}"
    return f"{kept}, {budget.asked:g} asked,\n{_allowed(budget)}; {of_model}"


def _memory(plan: PlanRecord) -> str:
    limit, (used, total), (model, dense) = plan.limit(BYTES), plan.bytes, plan.model_bytes
    weights = _used(limit, "bytes") if limit else f"{used:,} of {total:,} bytes: {used / total:.4f} kept"
    bits, of_model = plan.bits
    allowed = f", {(model - limit.used + limit.limit) / 1e9:.4g} allowed" if limit else ""
    return (
        f"{weights};\n{model:,} of {dense:,} bytes of the whole model: {model / dense:.4f} kept,\n"
        f"in GB {model / 1e9:.4g} of {dense / 1e9:.4g}{allowed};\n{_rest(plan, model - used)}"
        f"{bits:.2f} bits per dense parameter, {of_model:.2f} in the whole model; {stored(plan)}"
    )


def _experts(plan: PlanRecord) -> str:
    measured = plan.measured
    if layers := measured.expert_tokens:
        least = min(layers, key=lambda layer: layer.least)
        median = min(layer.median for layer in layers)
        reached = f"of {least.sampled:,} tokens {least.least:,} or more reach each expert (layer {least.layer})"
        routed = {weight.name for weight in plan.weights if weight.weight.experts}
        timed = any(any(site.latency_ns) for site in plan.sites if {weight.name for weight in site.weights} & routed)
        left_out = "" if timed or not plan.recipe.deployment.workloads else "; latencies leave them out"
        return f"{_same_count(plan)}{reached},\nand half of the experts of a layer {median:,} or more{left_out}"
    if (experts := measured.experts) is None:
        return ""
    share = f"{100 * experts.params / measured.params:.0f} % of the model"
    stay = f"routed experts: {_short(experts.params)} parameters, {share}, stay as they are;"
    return f"{stay}\n{_short(experts.active)} of them are active for a token"


def _same_count(plan: PlanRecord) -> str:
    lines = []
    for choices in plan.experts if plan.recipe.space.same_count else ():
        (count, width), dense = choices[0].expert_sizes, choices[0].weight
        kept = f"{count} of {dense.experts} experts, {width} of {dense.expert_width} neurons each"
        lines.append(f"the same in {number_of(len(choices), 'layer')}: {kept}\n")
    return "".join(lines)


def _short(params: int) -> str:
    """Three digits and a letter: ``30.5B``."""
    size, letter = next(((size, letter) for size, letter in _LETTERS if params >= size), _LETTERS[-1])
    return f"{params / size:.3g}{letter}"


def _rest(plan: PlanRecord, size: int) -> str:
    """The bytes that no choice makes fewer, where they are most of the model in few bits."""
    if plan.measured.experts is not None:
        size -= scheme_named(DEFAULT_SCHEME).bytes(1, plan.measured.experts.params)
    if size <= plan.bytes[0] or plan.measured.head is not None or not lossy_schemes(plan):
        return ""
    remedy = "head='w8a16' (--head w8a16) stores embedding and head in 8 bits"
    return f"{size / 1e9:.4g} of it embedding, head and norms, on which no limit works:\n{remedy};\n"


def _head(plan: PlanRecord) -> str:
    if (head := plan.measured.head) is None:
        return ""
    matrices = "embedding and head, which are one," if len(head.shapes) == 1 else "embedding and head"
    return (
        f"{matrices} in {head.scheme}: {head.bytes:,} of {head.dense_bytes:,} bytes,\n"
        f"{head.loss:.4f} of the loss predicted below"
    )


def _loss(plan: PlanRecord) -> Iterator[tuple[str, str]]:
    predicted, measured = plan.prediction, plan.measured
    if not measured.predicted:
        yield "loss", "unknown: what others pruned was not measured (gac eval measures it)"
        return
    parts = f"\n{predicted.summed:.4f} counted by the choice, {predicted.together:+.4f} measured of several together"
    parts = f"{parts}, or on text" if predicted.together else ""
    yield "loss", f"+{predicted.loss:.4f} nats a token predicted{measured.error_margin_text()}{parts}"
    perplexities = f"{predicted.dense_perplexity:.2f} -> {predicted.perplexity:.2f}"
    yield "perplexity", f"{perplexities} predicted on calibration text"
    for line in _by_text(plan):
        yield "perplexity", line


def _by_text(plan: PlanRecord) -> Iterator[str]:
    for part, by in zip_longest(plan.measured.calibration.parts, plan.prediction.by_text):
        if by is not None:
            counted = "" if part is None or part.weight == 1 else f", counted {part.weight:.3g} times"
            elsewhere = ", which is not calibrated on" if part is None else ""
            yield f"{by.dense_perplexity:.2f} -> {by.perplexity:.2f} on {by.text}{elsewhere}: +{by.loss:.4f}{counted}"


def _healing(healed: Healed) -> str:
    divergence = f"divergence from the dense model {healed.before:.4f} -> {healed.after:.4f} nats a token"
    return f"on {healed}:\n{divergence}, on {number_of(healed.held, 'window')} held out"


def _evidence(plan: PlanRecord) -> Iterator[tuple[str, str]]:
    proof, measure, text = plan.certificate, plan.recipe.measure, plan.measured.calibration
    if plan.measured.predicted:
        gap = f"loss {proof.value:.6g}, bound {proof.lower_bound:.6g}, gap {proof.gap:.3g}"
        yield "calibration", f"{text}, seed {measure.seed}{', two shots' if measure.shots == 2 else ''}"
        of = ", of the choice of least loss; the line speed has this plan's own" if plan.speed else ""
        yield "certificate", f"{proof.status}: {gap}{of}"


def _amount(plan: PlanRecord, cost: Cost) -> str:
    if limit := plan.limit(cost.name):
        return _used(limit, cost.unit)
    used, total = plan.amount(cost.name)
    return f"{used:,} of {total:,} {cost.unit}: {used / total:.4f} kept" if total else ""


def _used(limit: Limit, unit: str) -> str:
    return f"{limit.used:,} of {limit.total:,} {unit}: {limit.kept:.4f} kept, {_allowed(limit)}"


def _allowed(limit: Limit) -> str:
    return f"{limit.limit:,} allowed{f', overshot by {limit.over:,}' if limit.over else ''}"


def what_is_kept(plan: PlanRecord) -> str:
    """The kept share of the targeted weights: of parameters, or of bytes where a scheme is lossy."""
    if not lossy_schemes(plan):
        return f"{plan.budget.kept:.3f} of its targeted parameters"
    (used, total), (bits, _) = plan.bytes, plan.bits
    return f"{used / total:.3f} of its targeted bytes, {bits:.2f} bits a weight"


def stored(plan: PlanRecord) -> str:
    """The number of weights in each scheme: ``60 bf16, 150 w4a16``."""
    schemes = Counter(weight.scheme for weight in plan.weights)
    return ", ".join(f"{count:,} {scheme}" for scheme, count in sorted(schemes.items()))


def rule_of(plan: PlanRecord) -> str | None:
    return None if plan.recipe.rule == "loss" else plan.recipe.rule


def fusion(plan: PlanRecord) -> str:
    """The weights that share their first GEMMs, to follow the forms; empty where none may."""
    fuse = plan.recipe.deployment.fuse
    if fuse == "auto":
        counts = Counter(site.kind for site in plan.sites if site.shared)
        return f"; fused: {', '.join(f'{count} {kind}' for kind, count in counts.items()) or 'none'}"
    return "; q/k/v and gate/up fused" if fuse else ""


# --- latency --------------------------------------------------------------------------------------------------------


def latencies(plan: PlanRecord) -> list[str]:
    """A line a workload: the plan's latency and the dense model's."""
    return [f"{timed.workload}: {_latency(plan, timed)}" for timed in plan.workloads]


def modelled(plan: PlanRecord) -> str:
    """The error of modelled latencies; empty where none is modelled, or no sum of latencies is known."""
    error = plan.measured.profile.error
    if error is None or all(None in (timed.dense_ns, timed.plan_ns) for timed in plan.workloads):
        return ""
    return f"modelled latencies lie within {100 * error:.1f} % in the median on shapes left out of the model"


def how_known(timed: WorkloadLatency) -> str:
    """The sources of the weights' latencies: ``1,204 measured, 310 interpolated, 56 modelled``."""
    last = f", {timed.modelled:,} modelled" if timed.modelled else ""
    return f"{timed.measured:,} measured, {timed.interpolated:,} interpolated{last}"


def speed(plan: PlanRecord) -> str:
    """The loss given for speed and the latency that it bought; empty where the least loss was asked for."""
    if not plan.recipe.slack:
        return ""
    if plan.speed is None:
        return "not looked at: the profile lacks the latency of the dense weights"
    extra = plan.prediction.summed - plan.speed.loss
    ratios = [
        (f"{least / timed.dense_ns:.3f}x", f"{timed.plan_ns / timed.dense_ns:.3f}x", timed.workload)
        for timed, least in zip(plan.workloads, plan.speed.latency_ns, strict=True)
        if least and timed.plan_ns and timed.dense_ns
    ]
    changes = [f"{least} becomes {ratio} at {workload}" for least, ratio, workload in ratios if least != ratio]
    proof = plan.speed.certificate
    proved = f"{proof.status}, gap {proof.gap:.3g}"
    gained = ", ".join(changes) or "no latency changes by a thousandth of the dense model's"
    return f"{extra:.4f} nats above the least loss: {gained} ({proved})"


def latency_limits(plan: PlanRecord) -> str:
    """The cost of the limits of latency, where that is more than a hundredth of the loss; or that there are none."""
    if plan.recipe.rule == "loss" and not plan.recipe.limits.latency:
        return "no latency is limited"
    free, least = plan.any_latency, plan.certificate.value
    if free is None or free.loss > (1 - _MUCH) * least:
        return ""
    times = [
        f"{ns / timed.dense_ns:.3f}x dense at {timed.workload}"
        for timed, ns in zip(plan.workloads, free.latency_ns, strict=True)
        if ns and timed.dense_ns
    ]
    at = ", ".join(times) or "an unknown latency"
    return f"latency binds. With --latency any the loss is {free.loss:.4f} in place of {least:.4f}, at {at}"


def lacking(plan: PlanRecord, timed: WorkloadLatency) -> str:
    """The gap in the profile behind an unknown latency; tables hold a shape for certain numbers of rows."""
    column = plan.workloads.index(timed)
    known = [site for site in plan.sites if site.latency_ns[column] is not None]
    unknown = [site for site in plan.sites if site.latency_ns[column] is None]
    if not unknown:
        return "lacks shapes of the dense weights"
    in_known, in_unknown = ({weight.scheme for site in sites for weight in site.weights} for sites in (known, unknown))
    schemes = in_unknown - in_known - {DEFAULT_SCHEME}
    if timed.dense_ns is not None and schemes:
        return f"has no {', '.join(sorted(schemes))}"
    rows, weight = number_of(Workload.parse(timed.workload).rows, "row"), unknown[0].weights[0].name
    return f"lacks the shapes of {number_of(timed.unknown, 'weight')} with {rows} of input, {weight} among them"


def profile_command(model: str, recipe: Recipe | None, *workloads: str) -> str:
    """The command that measures a model's shapes for workloads (as a recipe runs them); words quoted for a shell.

    For several GPUs a second command measures the collectives, into the same file.
    """
    options: dict[str, Any] = {"model": model, "workloads": workloads}
    space, run = (Space(), Deployment()) if recipe is None else (recipe.space, recipe.deployment)
    options["schemes"] = tuple(name for name in space.schemes if scheme_named(name).lossy)
    if {*space.forms} - {*DEFAULT_FORMS}:
        options["forms"] = space.forms
    if run.engine == VLLM.name:
        options["engine"] = VLLM.name
    if run.tensor_parallel > 1:
        options["tensor_parallel"] = run.tensor_parallel
    command = f"gac profile {join([*_words(options), '-o', 'PROFILE.jsonl'])}"
    if run.tensor_parallel == 1:
        return command
    words = join([*_words({"workloads": workloads}), "-o", "PROFILE.jsonl"])
    return f"{command} and torchrun --nproc-per-node {run.tensor_parallel} -m gac profile --collectives {words}"


def _latency(plan: PlanRecord, timed: WorkloadLatency) -> str:
    if timed.dense_ns is None or timed.plan_ns is None:
        command = profile_command(plan.measured.model, plan.recipe, *plan.recipe.deployment.workloads)
        return f"unknown, the profile {lacking(plan, timed)}; measure them with {command}"
    ms = f"{_ms(timed.plan_ns)} of {_ms(timed.dense_ns)} dense"
    return f"{ms} ({timed.plan_ns / timed.dense_ns:.3f}x; {how_known(timed)}){rates(plan, timed)}"


def rates(plan: PlanRecord, timed: WorkloadLatency) -> str:
    """Tokens a second of whole steps in the engine, to follow a latency; for vLLM also that the profile lacks steps."""
    engine = plan.recipe.deployment.engine
    if not timed.rest_ns or not timed.plan_ns or not timed.dense_ns:
        return f"; GEMMs alone: the profile has no steps in {engine}" if engine == VLLM.name else ""
    plan_rate, dense_rate = map(Workload.parse(timed.workload).tokens_per_second, (timed.plan_ns, timed.dense_ns))
    return f"; {plan_rate:,.0f} tokens/s of {dense_rate:,.0f} in {engine}"


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.3f} ms"


# --- several GPUs ---------------------------------------------------------------------------------------------------


def split(plan: PlanRecord) -> list[str]:
    """The share of each of several GPUs, and the differences from the plan for one; empty for one GPU."""
    if plan.gpus == 1:
        return []
    costs = ((COSTS[name], amount) for name, amount in plan.on_each_gpu.items())
    *amounts, last = (
        f"{amount:,} {cost.unit}{'' if cost.of_weights else f' in the {cost.label}'}" for cost, amount in costs
    )
    return [
        f"over {plan.gpus} GPUs, each with {', '.join(amounts)} and {last}",
        "latencies are those of a GPU's parts and of its collectives; all else is of all GPUs together",
        *(_single_gpu(plan, plan.one_gpu) if plan.one_gpu else ()),
    ]


def _single_gpu(plan: PlanRecord, alone: SingleGpuComparison) -> Iterator[str]:
    shares = Counter[str]()
    for choice in plan.weights:
        shares[form_named(choice.form).kind] += choice.weight.params
    forms, total = sorted({*shares, *alone.forms}), plan.budget.total
    moved = ", ".join(f"{form} {alone.forms.get(form, 0) / total:.1%} -> {shares[form] / total:.1%}" for form in forms)
    yield f"{alone.otherwise:,} weights are otherwise than for one GPU; of the parameters: {moved}"
    yield (
        f"for one GPU: loss +{alone.loss:.4f}; here {alone.uneven:,} of its dims have no equal parts, and "
        f"{alone.unsound:,} slow ones"
    )
    for timed, alone_ns in zip(plan.workloads, alone.latency_ns, strict=True):
        if timed.dense_ns and timed.plan_ns:
            ratio = f"{alone_ns / timed.dense_ns:.3f}x of dense" if alone_ns else "what the table does not know"
            yield f"{timed.workload}: it would take {ratio}, this one takes {timed.plan_ns / timed.dense_ns:.3f}x"


# --- commands -------------------------------------------------------------------------------------------------------


def allocate_command(plan: PlanRecord, profile: str | None = None) -> str:
    """Two lines, words quoted for a shell: all that was asked for, and what was chosen where nothing was.

    Args:
        profile: the name of the latency table; None takes the recipe's.
    """
    text = plan.measured.calibration
    sized = tuple(f"{part.text}:{part.windows}x{text.window_tokens}" for part in text.texts)
    options = plan.recipe.flat() | {"text": sized}
    if options.get("rotate") is False and not plan.recipe.space.few_bits:
        del options["rotate"]  # the default
    if profile is not None:
        options["profile"] = profile
    last = ("workloads", "profile", "text", "seed", "shots", "bos")
    second: dict[str, Any] = {name: options.pop(name) for name in last if name in options}
    first = join([plan.measured.model, *_words(options)])
    return f"gac allocate {first} \\\n  {join([*_words(second), '-o', 'plan.json'])}"


def apply_commands(plan: PlanRecord, plan_file: str = "plan.json") -> list[str]:
    """The commands that compress the model, and heal it where it was healed; words quoted for a shell."""
    model, directory = plan.measured.model, "DIR"
    compressing = [healed.asked for healed in plan.healed if healed.compressing]
    healing = f" --heal {compressing[0]}" if compressing else ""
    commands = [f"gac compress {join([model])} --plan {join([plan_file])}{healing} -o {directory}"]
    for number, healed in enumerate(each for each in plan.healed if not each.compressing):
        options = ["--against", model, *(word for text in healed.texts for word in ("--text", text))]
        options += ["--tokens", str(healed.asked or healed.tokens), "--seed", str(healed.seed)]
        options += ["--learning-rate", f"{healed.learning_rate:g}", "--blocks", f"{healed.blocks:g}"]
        options += (["--labels", f"{healed.labels:g}"] if healed.labels else []) + ["--dense"] * healed.dense
        output = f"HEALED{number or ''}"
        commands.append(join(["gac", "heal", directory, *options, "-o", output]))
        directory = output
    return commands


def _words(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        option = _OPTIONS.get(name, f"--{name.replace('_', '-')}")
        if name == "align":
            yield from ("--align-to", str(value)) if value else ("--no-align",)
        elif isinstance(value, bool):
            yield option if value else f"--no-{name}"
        elif name == "latency" and not value:
            yield from (option, "any")
        elif value != "auto":
            yield from (word for text in _values(value) for word in (option, text))


def _values(value: Any) -> Iterable[str]:
    if isinstance(value, Mapping):
        return [f"{workload}={fraction!r}" for workload, fraction in value.items()]
    return value if isinstance(value, tuple) else [value if isinstance(value, str) else repr(value)]
