"""A plan in words, and as the command that makes it again."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from shlex import join
from typing import TYPE_CHECKING, Any

from gac.forms import form_named
from gac.plan.costs import BYTES, KV_NUMBERS, PARAMS
from gac.schemes import DEFAULT_SCHEME

if TYPE_CHECKING:
    from gac.plan.plan import Limit, Plan, SingleGpuComparison, WorkloadLatency

FUSED = "dense, fused"
"""What the dense model is called where all weights that read the same input share their first GEMMs."""

_REFITTED = {"none": "", "residual": "; refitted layer by layer", "update": "; second factors refitted (SVD-LLM)"}
_NAMES = {
    "budget": "--budget",
    "text": "--calibration",
    "forms": "--form",
    "schemes": "--scheme",
    "workloads": "--workload",
}


def summary(plan: "Plan") -> str:
    """A dozen lines of plain text."""
    measured = plan.measured
    forms = Counter(weight.form for weight in plan.weights)
    aligned = ", ".join(f"{count} x {step}" for step, count in plan.alignment.items() if count)
    lines = [
        f"GAC plan for {measured.model} ({measured.family}), {_made(plan)}, made with GAC {plan.gac_version}",
        *_parameters(plan),
        *_memory(plan),
        f"forms        {', '.join(f'{count} {form}' for form, count in sorted(forms.items()))}"
        f"{run_as(plan)}{_REFITTED[plan.recipe.refit or 'none']}",
        f"alignment    {aligned or 'everything stays dense'}",
        *_head(plan),
        *([f"rotated      {measured.rotation}"] if measured.rotation else []),
        *_loss(plan),
        *_healed(plan),
        *(f"latency      {told}" for told in latencies(plan)),
        *([f"             {told}"] if (told := modelled(plan)) else []),
        *([f"speed        {told}"] if (told := speed(plan)) else []),
        *_cache(plan),
        *_split(plan),
        f"profile      {measured.profile.gpu}, {measured.profile.digest[:12]}; {measured.profile.note}",
        *_evidence(plan),
    ]
    return "\n".join(lines)


def _made(plan: "Plan") -> str:
    return f"method {plan.recipe.measure.method}" if plan.measured.predicted else "as others pruned it"


def _parameters(plan: "Plan") -> list[str]:
    budget, whole = plan.budget, f"{plan.kept_of_model:.4f} of the whole model"
    kept = f"parameters   {budget.used:,} of {budget.total:,} targeted: {budget.kept:.4f} kept"
    if not plan.measured.predicted:
        return [f"{kept}; {whole}"]
    return [f"{kept}, {budget.asked:g} asked,", f"             {_allowed(budget)}; {whole}"]


def _memory(plan: "Plan") -> list[str]:
    """The bytes of the targeted weights and of the model, and how the numbers are stored."""
    limit, (used, total), (whole, dense) = plan.limit(BYTES), plan.bytes, plan.model_bytes
    taken = _taken(limit, "bytes") if limit else f"{used:,} of {total:,} bytes: {used / total:.4f} kept"
    bits, of_model = plan.bits
    return [
        f"memory       {taken};",
        f"             {whole:,} of {dense:,} bytes of the whole model: {whole / dense:.4f} kept;",
        f"             {bits:.2f} bits per dense parameter, {of_model:.2f} in the whole model; {stored(plan)}",
    ]


def _head(plan: "Plan") -> list[str]:
    """Embedding and head where they are rounded."""
    if (head := plan.measured.head) is None:
        return []
    ends = "embedding and head, which are one," if len(head.shapes) == 1 else "embedding and head"
    return [
        f"head         {ends} in {head.scheme}: {head.bytes:,} of {head.dense_bytes:,} bytes,",
        f"             {head.loss:.4f} of the loss predicted below",
    ]


def _loss(plan: "Plan") -> list[str]:
    found, measured = plan.prediction, plan.measured
    if not measured.predicted:
        return ["loss         unknown: what others pruned was not measured (gac eval measures it)"]
    beyond = f"{found.summed:.4f} counted by the choice, {found.together:+.4f} measured of several together, or on text"
    return [
        f"loss         +{found.loss:.4f} nats a token predicted{measured.give_or_take()}",
        *([f"             {beyond}"] if found.together else []),
        f"perplexity   {found.dense_perplexity:.2f} -> {found.perplexity:.2f} predicted on calibration text",
    ]


def _healed(plan: "Plan") -> list[str]:
    """What the model was trained on after the plan was applied, and what that gave."""
    found = []
    for one in plan.healed:
        lost = f"{one.before:.4f} -> {one.after:.4f} nats a token"
        found += [f"healed       on {one}:", f"             divergence from the dense model {lost}, on text held out"]
    return found


def _evidence(plan: "Plan") -> list[str]:
    """What the choice rests on; nothing where nobody made it with GAC."""
    proof, asked, text = plan.certificate, plan.recipe.measure, plan.measured.calibration
    if not plan.measured.predicted:
        return []
    return [
        f"calibration  {text}, seed {asked.seed}{', two shots' if asked.shots == 2 else ''}",
        f"certificate  {proof.status}: loss {proof.value:.6g}, bound {proof.lower_bound:.6g}, gap {proof.gap:.3g}",
    ]


def what_is_kept(plan: "Plan") -> str:
    """How much of the targeted weights is left: parameters, or bytes and bits where numbers are rounded."""
    if not rounding_of(plan):
        return f"{plan.budget.kept:.3f} of its targeted parameters"
    (used, total), (bits, _) = plan.bytes, plan.bits
    return f"{used / total:.3f} of its targeted bytes, {bits:.2f} bits a weight"


def latencies(plan: "Plan") -> list[str]:
    """What each workload takes as planned, beside dense: a line each, and one more where sharing GEMMs changes that."""
    found = []
    for one in plan.workloads:
        found.append(f"{one.workload}: {_latency(one, rounding_of(plan))}")
        if (ratio := over_fused(one)) is not None:
            found.append(f"{one.workload}: {_ms(one.plan_ns)} of {_ms(one.fused_ns)} {FUSED} ({ratio:.3f}x)")
    return found


def over_fused(workload: "WorkloadLatency") -> float | None:
    """What the plan takes over the dense model with shared GEMMs; None where that is unknown, or as long as dense."""
    plan, fused = workload.plan_ns, workload.fused_ns
    return None if plan is None or fused is None or fused == workload.dense_ns else plan / fused


def modelled(plan: "Plan") -> str:
    """How far modelled latencies are off; empty where none is, or no sum of latencies is known."""
    error = plan.measured.profile.error
    if error is None or all(None in (one.dense_ns, one.plan_ns) for one in plan.workloads):
        return ""
    return f"modelled latencies lie within {100 * error:.1f} % in the median on shapes left out of the model"


def how_known(workload: "WorkloadLatency") -> str:
    """How the latencies of the weights were obtained: ``1,204 measured, 310 interpolated, 56 modelled``."""
    last = f", {workload.modelled:,} modelled" if workload.modelled else ""
    return f"{workload.measured:,} measured, {workload.interpolated:,} interpolated{last}"


def speed(plan: "Plan") -> str:
    """What was given for speed and what that bought; empty where the least loss was asked for."""
    if not plan.recipe.slack:
        return ""
    if plan.speed is None:
        return "not looked at: the profile lacks the latency of the dense weights"
    given = plan.prediction.summed - plan.speed.loss
    times = [
        f"{least / one.dense_ns:.3f}x becomes {one.plan_ns / one.dense_ns:.3f}x at {one.workload}"
        for one, least in zip(plan.workloads, plan.speed.latency_ns, strict=True)
        if least and one.plan_ns and one.dense_ns
    ]
    proof = plan.speed.certificate
    kept = f"{proof.status}, gap {proof.gap:.3g}"
    return f"{given:.4f} nats more than the least loss bought it: {', '.join(times)} ({kept})"


def run_as(plan: "Plan") -> str:
    """What does not run weight by weight as PyTorch does, to follow the forms; nothing where all of it does."""
    run, fused = plan.recipe.deployment, ""
    if run.fuse == "auto":
        counts = Counter(site.kind for site in plan.sites if site.shared)
        fused = f"; fused: {', '.join(f'{count} {kind}' for kind, count in counts.items()) or 'none'}"
    elif run.fuse:
        fused = "; q/k/v and gate/up fused"
    return fused


def _allowed(limit: "Limit") -> str:
    return f"{limit.limit:,} allowed{f', overshot by {limit.over:,}' if limit.over else ''}"


def _taken(limit: "Limit", unit: str) -> str:
    return f"{limit.used:,} of {limit.total:,} {unit}: {limit.kept:.4f} kept, {_allowed(limit)}"


def split(plan: "Plan") -> list[str]:
    """What each of several GPUs holds, and what was chosen otherwise than for one and why; nothing for one GPU."""
    if plan.gpus == 1:
        return []
    each = plan.on_each_gpu
    found = [
        f"over {plan.gpus} GPUs, each with {each[PARAMS]:,} parameters, {each[BYTES]:,} bytes and "
        f"{each[KV_NUMBERS]:,} KV numbers a token",
        "latencies are those of a GPU's parts and of its collectives; all else is of all GPUs together",
    ]
    return found if plan.one_gpu is None else [*found, *_beside_one_gpu(plan, plan.one_gpu)]


def _beside_one_gpu(plan: "Plan", alone: "SingleGpuComparison") -> Iterator[str]:
    shares = Counter[str]()
    for one in plan.weights:
        shares[form_named(one.form).kind] += one.weight.params
    forms, whole = sorted({*shares, *alone.forms}), plan.budget.total
    moved = ", ".join(f"{form} {alone.forms.get(form, 0) / whole:.1%} -> {shares[form] / whole:.1%}" for form in forms)
    yield f"{alone.otherwise:,} weights are otherwise than for one GPU; of the parameters: {moved}"
    yield (
        f"for one GPU: loss +{alone.loss:.4f}; here {alone.uneven:,} of its dims have no equal parts, and "
        f"{alone.unsound:,} slow ones"
    )
    for run, theirs in zip(plan.workloads, alone.latency_ns, strict=True):
        if run.dense_ns and run.plan_ns:
            ratio = f"{theirs / run.dense_ns:.3f}x of dense" if theirs else "what the table does not know"
            yield f"{run.workload}: it would take {ratio}, this one takes {run.plan_ns / run.dense_ns:.3f}x"


def _split(plan: "Plan") -> list[str]:
    return [f"{'' if at else 'split':<13}{told}" for at, told in enumerate(split(plan))]


def _cache(plan: "Plan") -> list[str]:
    used, total = plan.kv_numbers
    if limit := plan.limit(KV_NUMBERS):
        return [f"KV cache     {_taken(limit, 'numbers a token')}"]
    return [f"KV cache     {used:,} of {total:,} numbers a token: {used / total:.4f} kept"] if total else []


def stored(plan: "Plan") -> str:
    """How many weights are stored in each scheme: ``60 bf16, 150 w4a16``."""
    schemes = Counter(weight.scheme for weight in plan.weights)
    return ", ".join(f"{count:,} {scheme}" for scheme, count in sorted(schemes.items()))


def rounding_of(plan: "Plan") -> list[str]:
    """The schemes that round, of those that the plan chose."""
    return sorted({weight.scheme for weight in plan.weights} - {DEFAULT_SCHEME})


def lacking(workload: "WorkloadLatency", rounded: Sequence[str]) -> str:
    """What the profile lacks, where the latency is unknown."""
    if workload.dense_ns is not None and rounded:
        return f"has no {', '.join(rounded)}"
    if not workload.unknown:
        return "lacks shapes of the dense weights"
    return f"lacks the shapes of {workload.unknown:,} weight{'' if workload.unknown == 1 else 's'}"


def _latency(workload: "WorkloadLatency", rounded: Sequence[str]) -> str:
    if workload.dense_ns is None or workload.plan_ns is None:
        scheme = " --scheme ..." if rounded else ""
        return f"unknown, the profile {lacking(workload, rounded)} (gac profile --model ...{scheme} measures them)"
    ms = f"{_ms(workload.plan_ns)} of {_ms(workload.dense_ns)} dense"
    return f"{ms} ({workload.plan_ns / workload.dense_ns:.3f}x; {how_known(workload)})"


def _ms(ns: int | None) -> str:
    assert ns is not None, "an unknown latency"
    return f"{ns / 1e6:.3f} ms"


def allocate_command(plan: "Plan", profile: str | None = None) -> str:
    """All that was asked for, and what was chosen where nothing was; two lines, its words quoted for a shell.

    Args:
        profile: the name of the latency table; None takes the recipe's.
    """
    text = plan.measured.calibration
    sized = tuple(f"{one.text}:{one.windows}x{text.window_tokens}" for one in text.texts)
    asked = plan.recipe.flat() | {"text": sized}
    if asked.get("rotate") is False and not plan.recipe.space.few_bits:
        del asked["rotate"]  # as where nothing is said
    if profile is not None:
        asked["profile"] = profile
    named = ("workloads", "profile", "text", "seed", "shots", "bos")
    second: dict[str, Any] = {name: asked.pop(name) for name in named if name in asked}
    return (
        f"gac allocate {join([plan.measured.model, *_words(asked)])} \\\n  {join([*_words(second), '-o', 'plan.json'])}"
    )


def apply_commands(plan: "Plan", plan_file: str = "plan.json") -> list[str]:
    """What makes the model of the plan, and heals it where it was healed; words quoted for a shell."""
    model, made = plan.measured.model, "DIR"
    found = [f"gac compress {join([model])} --plan {join([plan_file])} -o {made}"]
    for number, one in enumerate(plan.healed):
        healed = f"HEALED{number or ''}"
        options = ["--against", model, *(word for text in one.texts for word in ("--text", text))]
        options += ["--tokens", str(one.asked or one.tokens), "--seed", str(one.seed)]
        options += ["--learning-rate", f"{one.learning_rate:g}", "--blocks", f"{one.blocks:g}"]
        options += (["--labels", f"{one.labels:g}"] if one.labels else []) + (["--dense"] if one.dense else [])
        found.append(join(["gac", "heal", made, *options, "-o", healed]))
        made = healed
    return found


def rule_of(plan: "Plan") -> str | None:
    """The rule that made it; None for the exact choice."""
    return None if plan.recipe.rule == "loss" else plan.recipe.rule


def _words(options: Mapping[str, Any]) -> Iterator[str]:
    """Options and their values as the command line has them."""
    for name, value in options.items():
        option = _NAMES.get(name, f"--{name.replace('_', '-')}")
        if name == "align":
            yield from ("--align-to", str(value)) if value else ("--no-align",)
        elif isinstance(value, bool):
            yield option if value else f"--no-{name}"
        elif name == "latency" and not value:
            yield from (option, "any")
        elif value == "auto":
            continue
        else:
            for one in _several(value):
                yield from (option, one)


def _several(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [f"{workload}={fraction!r}" for workload, fraction in value.items()]
    return [*value] if isinstance(value, tuple) else [value if isinstance(value, str) else repr(value)]
