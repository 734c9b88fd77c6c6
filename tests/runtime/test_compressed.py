"""The compressed classes: damaged files are refused; servers, continuous batching and compilers run them."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, StaticCache

from gac.checkpoint.classes import classes_of
from gac.core.errors import ModelError
from gac.runtime.fusion.shared_gemm import FusedInput
from tests.compression.applying import IDS, logits
from tests.compression.compressed import MakePlan, compressed, small_compressed
from tests.models.small import small_config, small_model
from tests.runtime.interpreted import Graphs

Q_PROJ = "model.layers.0.self_attn.q_proj"
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def model(make_plan: MakePlan) -> Any:
    return small_compressed("llama", make_plan)


def sizes(**changed: Any) -> Change:
    return lambda header: header["modules"][Q_PROJ]["sizes"].update(changed)


def added(name: str) -> Change:
    return lambda header: header["modules"].update({name: {}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((sizes(rank=rank), rf"{Q_PROJ}.sizes.rank is {rank}; expected an integer") for rank in (0, 10**12)),
        (sizes(rank="16"), r"expected `int`, got `str` - at `\$.modules"),
        (lambda header: header["modules"][Q_PROJ]["sizes"].pop("rank"), r"sizes is .* expected an object with"),
        (lambda header: header["modules"][Q_PROJ].update(module="os.system"), "module is 'os.system'; expected one of"),
        *((added(name), f"modules names '{name}'; expected a linear") for name in ("model.layers.9.mlp", "lm_heads")),
        (lambda header: header.update(schema_version=1), "schema_version is 1; expected 3"),
        (lambda header: header.update(fused=[["model.layers.0.input_layernorm"]]), "fused has .* in one storage"),
        (lambda header: header.update(rounded=[{"by": "model.norm", "readers": ["model.norm"]}]), "names of a norm"),
        (lambda header: header.update(rounded=7), r"expected `array`, got `int` - at `\$.rounded`"),
        (lambda header: header.update(rounded=[{"by": "a"}]), "missing required field `readers`"),
        (lambda header: header.update(fused=7), r"expected `array`, got `int` - at `\$.fused`"),
        (lambda header: header.update(code="x"), "object contains unknown field `code`"),
        (lambda header: header["modules"][Q_PROJ].update(code="x"), "object contains unknown field `code`"),
    ],
)
def test_a_damaged_config_is_refused(model: Any, change: Change, message: str) -> None:
    config = copy.deepcopy(model.config)
    change(config.gac)
    with pytest.raises(ValueError, match=f"config.json, key gac: .*{message}"):
        type(model)(config)


def test_weights_that_are_missing_are_not_made_up(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"{Q_PROJ}.first.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{Q_PROJ}.first.weight is missing \(1 in all\); expected every weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved")


class Other(nn.Module):
    """A server's own layer in the place of a linear one."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_other_layers_can_stand_for_the_linear_ones(model_type: str, make_plan: MakePlan) -> None:
    model = small_compressed(model_type, make_plan)
    expected = logits(model)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, linear in linears.items():
        model.set_submodule(name, Other(linear))
    assert torch.equal(logits(model), expected)


def test_transformers_serve_finds_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    server = SimpleNamespace(transformers=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "transformers.cli.serving.model_manager", server)
    classes = classes_of("llama")
    classes.config.from_dict({"architectures": ["GacLlamaForCausalLM", "LlamaForCausalLM"]})
    assert vars(server.transformers) == {"GacLlamaForCausalLM": classes.causal_lm}
    classes.config.from_dict({"architectures": "GacLlamaModel"})
    assert len(vars(server.transformers)) == 1


ATTENTION = "model.layers.1.self_attn"
PROMPTS = [[7, 3, 9, 4, 8], [11, 5]]
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}
REFUSED = {
    "head_dim": ({f"{ATTENTION}.{name}_proj": ("head_dim", 8) for name in "vo"}, "v_proj writes 2 heads of 8 numbers"),
    "heads": ({f"{ATTENTION}.{name}_proj": ("heads", 1) for name in "qkvo"}, "k_proj writes 1 heads of 32 numbers"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_layers_of_other_sizes_are_refused(form: str, make_plan: MakePlan) -> None:
    changes, numbers = REFUSED[form]
    model = compressed(small_model(small_config("llama")), make_plan, changes)
    with pytest.raises(ModelError, match=f"{ATTENTION}.{numbers}; expected 2 of 32 in every layer"):
        model.generate_batch(PROMPTS)


def test_pairs_give_the_tokens_of_generate(make_plan: MakePlan) -> None:
    batching = pytest.importorskip("transformers.generation.configuration_utils").ContinuousBatchingConfig(
        num_blocks=8, max_batch_tokens=64, block_size=32
    )
    pairs = {f"{ATTENTION}.{name}_proj": ("low_rank", 8) for name in "qkvo"}
    model = compressed(small_model(small_config("llama")), make_plan, pairs)
    options: Any = GenerationConfig
    found = model.generate_batch(
        PROMPTS,
        generation_config=options(**GREEDY, eos_token_id=-1),
        continuous_batching_config=batching,
        progress_bar=False,
    )
    alone = []
    for prompt in PROMPTS:
        ids: Tensor = model.generate(torch.tensor([prompt]), eos_token_id=None, **GREEDY)
        alone.append(ids[0, len(prompt) :].tolist())
    assert [request.generated_tokens for request in found.values()] == alone


FIRST, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
CHANGES: dict[str, dict[str, tuple[str, int]]] = {
    "low_rank": {f"{FIRST}.q_proj": ("low_rank", 16), f"{FIRST}.v_proj": ("low_rank", 8)}
    | {f"{MLP}.{name}": ("low_rank", 32) for name in ("gate_proj", "up_proj", "down_proj")},
    "head_dim": {f"{FIRST}.{name}": ("head_dim", 8) for name in ("v_proj", "o_proj")},
    "latent": {f"{FIRST}.k_proj": ("latent:1:int8", 8), f"{FIRST}.v_proj": ("latent:1", 8)},
}


@pytest.fixture(params=[("low_rank", True), ("head_dim", False), ("latent", True)], ids=str)
def one_layer(request: pytest.FixtureRequest, make_plan: MakePlan, nothing_compiled: None) -> Any:
    form, fused = request.param
    return compressed(small_model(small_config("llama", num_hidden_layers=1)), make_plan, CHANGES[form], fused)


@pytest.mark.parametrize("one_layer", [("low_rank", True)], indirect=True, ids=str)
def test_the_whole_model_is_one_graph(one_layer: Any) -> None:
    graphs = Graphs()
    compiled = torch.compile(one_layer, backend=graphs, fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            assert (compiled(IDS, use_cache=False).logits - logits(one_layer)).abs().max() < 1e-5
    assert len(graphs) == 1
    shared = (module for module in one_layer.modules() if isinstance(module, FusedInput))
    assert all(module.read is None and module.output is None for module in shared)


def test_steps_with_a_static_cache_are_one_graph(one_layer: Any) -> None:
    """A prompt of 4 tokens, and then one at a time."""
    graphs, cached = Graphs(), {"past_key_values": StaticCache(config=one_layer.config, max_cache_len=32)}
    compiled = torch.compile(one_layer, backend=graphs, fullgraph=True)
    with torch.no_grad():
        found = [one_layer(IDS[:, :4], **cached).logits]
        for at in range(4, 10):
            found.append(compiled(IDS[:, at : at + 1], position_ids=torch.tensor([[at]]), **cached).logits)
    assert (torch.cat(found, 1) - logits(one_layer)[:, :10]).abs().max() < 1e-5
    assert len(graphs) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_can_be_captured_in_a_cuda_graph(one_layer: Any) -> None:
    one_layer, ids = one_layer.cuda(), IDS.cuda()
    with torch.no_grad():
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            one_layer(ids, use_cache=False)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            found = one_layer(ids, use_cache=False).logits
        ids.add_(1)
        graph.replay()
        assert (found - one_layer(ids, use_cache=False).logits).abs().max() < 1e-4
