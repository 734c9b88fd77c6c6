"""Mixtures of experts in vLLM give the tokens of generate: make test-vllm runs it."""

from pathlib import Path

from gac.runtime.vllm.check import SERVED_MIXTURES
from tests.compression.compressed import MakePlan
from tests.serving.engine import needs_vllm, serve
from tests.serving.mixtures import changes, mixed, mixture, saved

pytestmark = needs_vllm


def test_their_tokens_are_those_of_generate(make_plan: MakePlan, tmp_path: Path) -> None:
    requests = []
    for model_type in SERVED_MIXTURES:
        config = mixture(model_type).config
        for name, chosen in (("compressed", changes(config)), ("dense", {})):
            model = mixed(mixture(model_type), make_plan, chosen)
            requests.append(saved(model, tmp_path / f"{model_type}-{name}"))
    serve(requests, tmp_path)
    for request in requests:
        assert request.answer()["tokens"] == request.expected["tokens"], request.directory
