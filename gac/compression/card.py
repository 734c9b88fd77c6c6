"""The model card of a compressed checkpoint: what it is, what it was made from, how to make it again."""

import re
from shlex import quote

from gac.plan import Plan
from gac.sensitivity.methods import method_named

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def model_card(plan: Plan) -> str:
    """README.md for the directory of a compressed model, in Markdown."""
    text = plan.calibration
    base = f"base_model: {plan.model}\n" if _HUB_ID.fullmatch(plan.model) else ""
    model = quote(plan.model)
    calibration = quote(f"{text.text}:{text.windows}x{text.window_tokens}")
    limits = "" if plan.align is True else f" --align-to {plan.align}" if plan.align else " --no-align"
    limits += "".join(f" --latency {workload}={fraction:g}" for workload, fraction in plan.latency.items())
    budget, limits = _budget(plan), limits + _cache_limit(plan)
    forms = "".join(f" --form {form}" for form in plan.forms)
    return f"""---
library_name: gac
pipeline_tag: text-generation
{base}---

# {plan.model}, compressed to {plan.budget.kept:.3f} of its targeted weights

Every weight has the form and the dim that lose least, all chosen at once, within the budget and for the GPU named
below. The predicted perplexity holds for the calibration text: {text.windows} windows of {text.window_tokens} tokens
of {text.text}, non-overlapping, no BOS. `plan.json` has every choice.

```
{plan.summary()}
```

## Load

```python
import gac

model = gac.load("this directory")  # a transformers causal LM
```

## Reproduce

With GAC {plan.gac_version} and the profile `{plan.profile.digest[:12]}` of the {plan.profile.gpu}{_documents(plan)}:

```
gac allocate {model} --budget {budget!r} --method {plan.method}{forms}{limits} \\
  --calibration {calibration} --seed {plan.seed} -o plan.json
gac compress {model} --plan plan.json -o DIR
```
"""


def _budget(plan: Plan) -> float:
    """What was asked for: the kept fraction of the KV cache, where the method takes the budget for that."""
    of_cache = method_named(plan.method).forms and plan.kv_cache and plan.kv_cache.asked
    return of_cache or plan.budget.asked


def _cache_limit(plan: Plan) -> str:
    limited = plan.kv_cache is not None and plan.kv_cache.asked is not None and not method_named(plan.method).forms
    return f" --kv-cache {plan.kv_cache.asked:g}" if limited and plan.kv_cache else ""


def _documents(plan: Plan) -> str:
    """What the command line cannot say of documents that were given in memory."""
    return ", with the same documents in a text file, or in Python as they were" if plan.calibration.documents else ""
