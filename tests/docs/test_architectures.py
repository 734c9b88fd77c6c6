"""The page of architectures is what the command prints with the transformers that it names."""

import re

import transformers
from pages import PAGES

from gac.models.families import supported
from gac_extensions.lab import architectures
from gac_extensions.lab.architectures import ENTRY, EXPERTS, TAKEN, TOWER, verdict_of

PAGE = PAGES["docs/architectures.md"]


def test_every_family_is_taken_and_on_the_page() -> None:
    taken = next(line for line in PAGE.splitlines() if line.startswith("**Taken**"))
    assert set(supported()) <= set(re.findall(r"`([^`]+)`", taken))
    assert {verdict_of(name).group for name in supported()} == {TAKEN}


def test_refusals_say_why() -> None:
    expected = {"mixtral": EXPERTS, "llava": TOWER, "modernbert-decoder": ENTRY, "bert": "an encoder"}
    assert {name: verdict_of(name).group for name in expected} == expected
    assert "its language model is llama" in verdict_of("llava").reason
    assert "`model.layers`: `attn.q_proj`" in verdict_of("modernbert-decoder").reason


def test_the_page_is_what_the_command_prints() -> None:
    if f"transformers {transformers.__version__} " in PAGE:
        assert "\n".join(architectures.page()) + "\n" == PAGE
    else:
        assert "| `modernbert-decoder` |" in PAGE
