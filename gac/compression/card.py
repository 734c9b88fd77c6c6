"""The model card of a compressed checkpoint: what it is, what it was made from, how to make it again."""

import re
from shlex import quote

from gac.allocation.reproduce import allocate_command
from gac.plan import Plan

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def model_card(plan: Plan) -> str:
    """README.md for the directory of a compressed model, in Markdown."""
    text = plan.calibration
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- gac
{_base_model(plan)}---

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
from transformers import AutoModelForCausalLM

model = gac.load("this directory")  # checks every file against the plan
model = AutoModelForCausalLM.from_pretrained("this directory")  # takes all of transformers' options
```

Neither runs code of the directory. Without GAC, its `modeling_gac.py` does the same:

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("this directory", trust_remote_code=True)
```

## Reproduce

With GAC {plan.gac_version} and the profile `{plan.profile.digest[:12]}` of the {plan.profile.gpu}{_documents(plan)}:

```
{allocate_command(plan)}
gac compress {quote(plan.model)} --plan plan.json -o DIR
```
"""


def export_card(plan: Plan, merged: bool) -> str:
    """README.md for the directory of a compressed model that was exported to its stock architecture."""
    what = (
        "It was exported merged: pairs are multiplied out, and what was removed is filled with zeros. So it has as "
        "many parameters as the dense model, and is neither smaller nor faster."
        if merged
        else "Its MLPs are narrower, which the config of its stock architecture says."
    )
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- gac
{_base_model(plan)}---

# {plan.model}, compressed to {plan.budget.kept:.3f} of its targeted weights, exported

{what} No code but transformers is needed.

```
{plan.summary()}
```
"""


def _base_model(plan: Plan) -> str:
    return f"base_model: {plan.model}\n" if _HUB_ID.fullmatch(plan.model) else ""


def _documents(plan: Plan) -> str:
    """What the command line cannot say of documents that were given in memory."""
    return ", with the same documents in a text file, or in Python as they were" if plan.calibration.documents else ""
