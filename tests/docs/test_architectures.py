"""The page of architectures is what the command prints with the transformers that it names."""

import re

import transformers
from pages import PAGES

from gac.models.families import supported, wrappers
from gac_extensions.lab import architectures
from gac_extensions.lab.architectures import ENTRY, EXPERTS, MULTIMODAL, TAKEN, verdict_of

PAGE = PAGES["docs/architectures.md"]


def test_every_family_is_taken_and_on_the_page() -> None:
    text, multimodal = (line for line in PAGE.splitlines() if line.startswith("**Taken"))
    assert set(supported()) <= set(re.findall(r"`([^`]+)`", text))
    assert set(wrappers()) == set(re.findall(r"`([^`]+)`", multimodal))
    assert {verdict_of(name).group for name in (*supported(), *wrappers())} == {TAKEN}


def test_refusals_say_why() -> None:
    expected = {"jetmoe": EXPERTS, "mllama": MULTIMODAL, "diffllama": ENTRY, "bert": "an encoder"}
    assert {name: verdict_of(name).group for name in expected} == expected
    assert verdict_of("mllama").reason == "around a mllama_text_model"
    assert "no text without an image" in verdict_of("blip-2").reason
    assert "`model.layers`: `self_attn.q_proj`" in verdict_of("diffllama").reason


def test_the_page_is_what_the_command_prints() -> None:
    if f"transformers {transformers.__version__} " in PAGE:
        assert "\n".join(architectures.page()) + "\n" == PAGE
    else:
        assert "| `diffllama` |" in PAGE
