"""The model card of a compressed checkpoint: what it is, what it was made from, how to make it again."""

import re

from gac.core.errors import escaped
from gac.plan.plan import Plan
from gac.plan.summary import allocate_command, apply_commands, what_is_kept

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_MARKUP = re.compile(r"([\\`*_\[\]|~$]|(?<!\w)www\.|:)")

_LOAD = """## Load

```python
import gac
from transformers import AutoModelForCausalLM

model = gac.load("this directory")  # compares all that it reads with the digests
model = AutoModelForCausalLM.from_pretrained("this directory")  # takes all of transformers' options
```

Neither runs code of the directory. Without GAC, its `modeling_gac.py` does the same:

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("this directory", trust_remote_code=True)
```
"""


def model_card(plan: Plan, itemsize: int = 2) -> str:
    """README.md for the directory of a compressed model; ``itemsize``: bytes of a number that no scheme stores."""
    if not plan.measured.predicted:
        pruned = (
            "Others pruned it. `gac repair` filled dims up with zeros to ones that run fast, and wrote down in "
            "`plan.json`\nwhat every weight is. What the pruning lost was not measured."
        )
        return f"{_about(plan, '', pruned)}\n{_LOAD}"
    text, profile = plan.measured.calibration, plan.measured.profile
    commands = "\n".join([allocate_command(plan), *apply_commands(plan)])
    what = (
        "Every weight has the form and the dim that lose least, all chosen at once, within the budget and for the GPU "
        f"named\nbelow. The predicted perplexity holds for the calibration text: {_words(text)};\nits windows do not "
        "overlap. "
        "`plan.json` has every choice."
    )
    if itemsize != 2:
        what += f"\nNumbers that no scheme stores take {itemsize} bytes here; the bytes below count 2 for each."
    # The command line cannot say which documents were given in memory.
    documents = ", with the same documents in a text file, or in Python as they were" if plan.documents else ""
    return f"""{_about(plan, "", what)}
{_LOAD}
## Reproduce

With GAC {_words(plan.gac_version)} and the profile `{profile.digest[:12]}` of the {_words(profile.gpu)}{documents}:

{_verbatim(commands)}
"""


_STOCK = "No code but transformers is needed."
_EXPORTED = {  # what the card says of each way to export
    None: f"Its MLPs have fewer neurons, which the config of its stock architecture says. {_STOCK}",
    "merge": "It was exported merged: pairs are multiplied out, and what was removed is filled with zeros. So it has "
    f"as many parameters as the dense model, and is neither smaller nor faster. {_STOCK}",
    "compressed_tensors": "Its weights of few bits lie as compressed-tensors has them. No code but transformers and "
    "compressed-tensors is needed.",
    "deci": "It is a DeciLM: the sizes of its layers differ, as `block_configs` in its config says. vLLM has the "
    "model, and needs a class for this config: docs/checkpoints.md of GAC has it. transformers does not open it.",
}


def export_card(plan: Plan, way: str | None = None) -> str:
    """README.md for an exported model; ``way`` is the option of ``gac.export`` that was used, if any."""
    return _about(plan, ", exported", _EXPORTED[way])


def _about(plan: Plan, how: str, what: str) -> str:
    base_model = f"base_model: {plan.measured.model}\n" if _HUB_ID.fullmatch(plan.measured.model) else ""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- gac
{base_model}---

# {_words(plan.measured.model)}, compressed to {what_is_kept(plan)}{how}

{what}

{_verbatim(plan.summary())}
"""


def _words(text: object) -> str:
    return _MARKUP.sub(r"\\\1", _without_tags(" ".join(str(text).split())).replace(">", "&gt;"))


def _verbatim(text: str) -> str:
    return f"<pre>\n{_without_tags(text)}\n</pre>"


def _without_tags(text: str) -> str:
    return escaped(text).replace("&", "&amp;").replace("<", "&lt;")
