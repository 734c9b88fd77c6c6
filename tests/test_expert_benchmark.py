"""The benchmark of fewer experts: REAP's saliency is as its paper has it, and every rule keeps the same share."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import silu
from transformers import PreTrainedTokenizerFast

from gac.forms.planned_sites import targeted_sites
from gac.models.loading import load_model
from tests.benchmarks import experts
from tests.models.small import EXPERT_NEURONS, small_config, small_model

IDS = torch.arange(48).reshape(2, 24) * 5 % 251


def test_saliency_is_the_mean_weight_times_norm_of_the_tokens_of_an_expert() -> None:
    model = small_model(small_config("mixtral"))
    sites = targeted_sites(model.config, ["experts"])
    saliency = experts.reap_saliencies(model, sites, IDS)["model.layers.0.mlp.experts"]
    heard = []
    block = model.get_submodule("model.layers.0.mlp")
    hook = block.register_forward_hook(lambda _module, args, _output: heard.append(args[0][0].double()))
    with torch.no_grad():
        for ids in IDS:
            model(ids[None])
    hook.remove()
    block.requires_grad_(False)
    x = torch.cat(heard)
    weights, numbers = (x @ block.gate.weight.double().T).softmax(-1).topk(2)
    weights = weights / weights.sum(-1, keepdim=True)
    for expert in range(8):
        gate, up = (x @ block.experts.gate_up_proj[expert].double().T).chunk(2, -1)
        norms = ((silu(gate) * up) @ block.experts.down_proj[expert].double().T).norm(dim=1)
        taken = [
            float(weights[token, place] * norms[token]) for token, place in torch.nonzero(numbers == expert).tolist()
        ]
        assert float(saliency[expert]) == pytest.approx(sum(taken) / max(len(taken), 1), rel=1e-4)


def test_every_rule_keeps_the_same_share(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, text_file: Path
) -> None:
    small_model(small_config("mixtral", num_hidden_layers=2, max_position_embeddings=1024)).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    study = experts.ExpertStudy(loaded, [f"{text_file}:4x64"], {"text": str(text_file)}, 1)
    rows = study.rows(0.5, 1)
    rules = ["chosen", "refitted", "one share", "reap", "frequency", "random 0"]
    assert [row["rule"] for row in rows] == rules
    kept = [sum(count * width for count, width in row["by layer"]) for row in rows]
    assert all(0.75 * kept[-1] < each <= 1.01 * kept[-1] for each in kept)
    assert all(row["by layer"] == [(4, EXPERT_NEURONS)] * 2 for row in rows[2:])
    assert all(abs(row["text"]) < 1 for row in rows)
    with torch.no_grad():
        assert study.perplexities(loaded.model) == study.dense
