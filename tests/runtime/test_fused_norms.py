"""Norms, gated products and rotary embeddings in one launch, and norms that round for readers: the same outputs."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import StaticCache
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

import gac
from gac.forms import form_named
from gac.runtime.fusion import elementwise as replaced
from gac.runtime.fusion.elementwise import fuse_elementwise
from gac.runtime.fusion.quantised_inputs import QuantisingNorm, quantise_in_norms
from gac.runtime.kernels import int8_fp8 as eight_bits_gemm
from gac.runtime.kernels import quantise_rows as rounded_rows
from gac.runtime.kernels.elementwise.rows import ACTIVATIONS, NORMS, plainly_rotated
from gac.runtime.kernels.split_k import COUNTERS
from gac.runtime.plain.modeling_gac import in_parts
from gac.runtime.storage.eight_bits import Floats8, Floats8Blocks
from gac.runtime.storage.modules import StoredLinear, stored_modules
from gac.runtime.storage.packed import PackedIntegers
from tests.changed import edited
from tests.compression.applying import IDS, logits
from tests.compression.compressed import MakePlan
from tests.compression.stored import stored
from tests.models.small import every_layout, small_config, small_model, weights_of
from tests.runtime.interpreted import DEVICE, Graphs, Hopper, operators, small_gpu

Ran = Counter[str]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ran]:
    """How often each kernel has run, in plain PyTorch, on a CPU that passes for a GPU."""
    if DEVICE == "cuda":
        pytest.skip("a GPU has its own kernels")
    found: Ran = Counter()

    def noted(name: str, run: Any) -> Any:
        def counted(*given: Any) -> Any:
            found[name] += 1
            return run(*given)

        return counted

    plain = {
        "normed": lambda x, weight, eps, kind: NORMS[kind](x, weight, eps),
        "gated": lambda gate, up, kind: ACTIVATIONS[kind](gate) * up,
        "rotated_heads": plainly_rotated,
        "write_to_cache": cache_plainly,
    }
    monkeypatch.setattr(replaced, "unsupported_reason", lambda device, dtype: None)
    with operators(**{name: noted(name, run) for name, run in plain.items()}):
        yield found


def cache_plainly(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, length: Tensor) -> None:
    for cached, new in ((keys, k), (values, v)):
        cached[:, :, int(length) : int(length) + new.shape[2]] = new


def narrow(model_type: str, layers: int = 2) -> Any:
    """A model in 16 bits, its angles in 32."""
    config = small_config(model_type, num_hidden_layers=layers)
    config.dtype = torch.bfloat16
    return small_model(config)


llama = partial(narrow, "llama")


NOT_ROTATED = ("cohere2", "glm", "gpt2", "olmo2", "opt", "qwen3_5_text")
"""No rotary embedding; neighbours that are a pair; a part of each head, cut off inside; or rounded elsewhere."""
NORMS_APART = ("cohere2", "gpt2", "olmo2", "opt")
"""LayerNorms, and RMSNorms that round at another step: in all other architectures both of a layer hand over."""
UNGATED = ("falcon_h1", "gpt2", "granitemoehybrid", "lfm2", "opt")
"""Without a gate, with a factor inside, or with other names."""
MASKED = {"falcon_h1": 2, "granitemoehybrid": 3, "lfm2": 3, "qwen3_5_text": 3}
"""Norms that hand over, where others are read by mixers, which mask padding first."""


@every_layout
def test_outputs_are_the_same_in_every_architecture(model_type: str, ran: Ran) -> None:
    model = narrow(model_type)
    expected = logits(model)
    ran.clear()
    fuse_elementwise(model)
    assert torch.equal(logits(model), expected)
    assert (ran["normed"] > 0) == (model_type not in NORMS_APART)
    assert ran["gated"] == (0 if model_type in UNGATED else 2)
    attentions = 1 if model_type in ("granitemoehybrid", "lfm2") else 2
    assert ran["rotated_heads"] == (0 if model_type in NOT_ROTATED else attentions)


def test_gradients_training_hooks_and_copies(ran: Ran) -> None:
    model = llama()
    fuse_elementwise(model)
    model(IDS)  # with gradients
    model.train()
    logits(model)
    assert ran["normed"] == ran["gated"] == 0
    model.eval()
    seen: list[Tensor] = []
    hook = model.model.layers[0].mlp.act_fn.register_forward_hook(lambda module, args, output: seen.append(output))
    found = logits(model)
    assert len(seen) == 1
    assert (ran["normed"], ran["gated"]) == (5, 1)
    hook.remove()
    other = copy.deepcopy(model)
    nn.init.zeros_(model.model.norm.weight)
    assert torch.equal(logits(other), found)
    assert not torch.equal(logits(model), found)


def test_a_static_cache_is_written_in_one_launch(ran: Ran) -> None:
    model, options = llama(), {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    expected = model.generate(IDS, **options)
    fuse_elementwise(model)
    assert torch.equal(model.generate(IDS, **options), expected)
    assert ran["write_to_cache"] == 0
    cache = StaticCache(config=model.config, max_cache_len=IDS.shape[1] + 4)
    assert torch.equal(model.generate(IDS, past_key_values=cache, disable_compile=True, **options), expected)
    assert ran["write_to_cache"] == 2 * 3  # the prompt's tokens lay out the cache
    assert int(cache.layers[0].cumulative_length) == IDS.shape[1] + 3


@pytest.mark.usefixtures("nothing_compiled")
def test_compiled_code_has_the_plain_steps(ran: Ran) -> None:
    model = llama()
    expected = logits(model)
    fuse_elementwise(model)
    ran.clear()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(IDS, use_cache=False).logits, expected)
    assert not ran


def test_the_function_of_a_file_rotates_in_other_models_as_before(ran: Ran) -> None:
    other = llama()
    for _ in range(2):
        fuse_elementwise(llama())
    logits(other)
    assert not ran
    q, k, angles = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), torch.randn(1, 3, 8)
    function = modeling_llama.apply_rotary_pos_emb
    with torch.no_grad():
        expected = plainly_rotated(q, k, angles, angles)
        assert all(map(torch.equal, function(q, k, angles, angles), expected))
        found = function(q.transpose(1, 2), k.transpose(1, 2), angles, angles, unsqueeze_dim=2)
    assert all(torch.equal(one.transpose(1, 2), other) for one, other in zip(found, expected, strict=True))
    assert not hasattr(function.__wrapped__, "with_fused_updates")  # it is replaced once


def test_a_compressed_model_runs_so(make_plan: Any, ran: Ran) -> None:
    model = stored(llama(), make_plan, {"model.layers.0.self_attn.q_proj": ("low_rank", 8, "bf16")})
    logits(model)
    assert (ran["normed"], ran["gated"], ran["rotated_heads"]) == (5, 2, 2)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3"])
def test_a_gpu_does_the_same_captured(model_type: str) -> None:
    model = narrow(model_type).cuda()
    ids = torch.arange(7, device="cuda")[None]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits.float()
        fuse_elementwise(model)
        found = model(ids, use_cache=False).logits
        assert float((found.float() - expected).norm() / expected.norm()) < 1e-2
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(ids, use_cache=False).logits
        graph.replay()
        assert torch.equal(captured, found)


Chosen = dict[str, tuple[str, int, str]]
Check = Callable[[Any, int], None]


def round_plainly(x: Tensor, number: torch.dtype, group: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    rows = in_parts(x.reshape(-1, x.shape[-1]).float(), group or x.shape[-1])
    scale = (rows.abs().amax(-1, keepdim=True) / (448 if number.is_floating_point else 127)).clamp_min(1e-30)
    units = rows / scale if number.is_floating_point else (rows / scale).round()
    return units.flatten(1)[:, : x.shape[-1]].to(number), scale[..., 0], torch.zeros(COUNTERS, dtype=torch.int32)


def norm_plainly(
    x: Tensor, weight: Tensor, eps: float, kind: str, number: torch.dtype, whole: bool, group: Any = None
) -> Any:
    y = NORMS[kind](x, weight, eps)
    return y if whole else y.new_full((1,), torch.nan), *round_plainly(y, number, group)


def multiply_rounded(
    numbers: Tensor, own: Tensor, counters: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype, block: Any = None
) -> Tensor:
    if block is not None:
        values = Floats8Blocks().values({"weight": weight, "weight_scale": scale}, *weight.shape, torch.float32)
        return ((numbers.float() * own.repeat_interleave(block, 1)[:, : values.shape[1]]) @ values.T).to(dtype)
    return ((numbers.float() @ weight.float().T) * own * scale.float().T).to(dtype)


def multiply_plainly(x: Tensor, weight: Tensor, scale: Tensor, block: int | None = None) -> Tensor:
    y = multiply_rounded(*round_plainly(x, weight.dtype, block), weight, scale, x.dtype, block)
    return y.view(*x.shape[:-1], len(weight))


@pytest.fixture
def gpu(kernels_anywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU is asked what a Hopper GPU is, by models in 16 bits."""
    if DEVICE == "cuda":
        pytest.skip("a GPU has its own kernels")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Hopper)
    monkeypatch.setattr(PackedIntegers, "kernel_unsupported_reason", lambda *_: "few bits are another test's matter")
    small_gpu(monkeypatch)


@pytest.fixture
def running(gpu: None) -> Iterator[None]:
    """What kernels do, in plain PyTorch."""
    plain = {"eight_bits_linear": multiply_plainly, "eight_bits_linear_of": multiply_rounded}
    with operators(**plain, normed_rows=norm_plainly):
        yield


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What is handed over."""
    found: list[Tensor] = []
    give = QuantisingNorm.put

    def noted(self: QuantisingNorm, made: Tensor, rounded: Any) -> Tensor:
        found.append(made)
        return give(self, made, rounded)

    monkeypatch.setattr(QuantisingNorm, "put", noted)
    return found


def dense(model_type: str, scheme: str = "fp8", layers: int = 2) -> tuple[Any, Chosen]:
    """A model in 16 bits, and all of its weights in a scheme."""
    model = narrow(model_type, layers)
    chosen = {one.name: ("dense", min(one.out_features, one.in_features), scheme) for one in weights_of(model.config)}
    return model, chosen


def rounded_llama(make_plan: MakePlan, schemes: dict[str, str] | None = None, fused: bool = False) -> Any:
    """One with other schemes by the last part of a weight's name."""
    model, chosen = dense("llama")
    for name, (form, dim, scheme) in chosen.items():
        chosen[name] = form, dim, (schemes or {}).get(name.rpartition(".")[2], scheme)
    return stored(model, make_plan, chosen, fused=fused)


def unchanged(model: Any, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Its logits where every weight rounds its own input."""
    with monkeypatch.context() as patch:
        patch.setattr(QuantisingNorm, "can", lambda *_: False)
        return logits(model)


def forgotten(model: Any) -> bool:
    """Whether nothing that was handed over is kept."""
    found = (one.before for one in stored_modules(model).values() if isinstance(one, StoredLinear))
    return all(isinstance(one, QuantisingNorm) and one._output is None for one in found if one is not None)


@pytest.fixture
def check(given: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> Check:
    """Outputs are those of weights that round their own inputs, and so many norms hand over."""

    def same(model: Any, handed: int) -> None:
        found = logits(model)
        assert len(given) == handed
        assert torch.equal(found, unchanged(model, monkeypatch))
        assert forgotten(model)

    return same


@every_layout
@pytest.mark.usefixtures("running")
def test_rounded_outputs_are_the_same_in_every_architecture(
    model_type: str, make_plan: MakePlan, given: list[Tensor], check: Check
) -> None:
    model, chosen = dense(model_type)
    check(stored(model, make_plan, chosen), 0 if model_type in NORMS_APART else MASKED.get(model_type, 4))
    assert all(one.isnan().all() for one in given)  # nobody reads 16 bits


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("schemes", "handed"),
    [
        ({"v_proj": "bf16"}, 4),
        ({"q_proj": "w4a16", "up_proj": "w8a16"}, 4),
        ({"q_proj": "w8a8"}, 2),  # of two kinds of numbers
        ({"q_proj": "fp8_block"}, 2),  # in groups of their own
        (dict.fromkeys(("q_proj", "k_proj", "v_proj"), "fp8_block"), 4),
        ({"gate_proj": "bf16", "up_proj": "bf16"}, 2),
    ],
)
def test_other_readers_find_16_bits(
    schemes: dict[str, str], handed: int, fused: bool, make_plan: MakePlan, check: Check
) -> None:
    check(rounded_llama(make_plan, schemes, fused), handed)


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize(("form", "handed"), [(("low_rank", 32, "fp8"), 4), (("skip", 0, "bf16"), 2)])
def test_other_forms_read_what_was_rounded(form: Any, handed: int, make_plan: MakePlan, check: Check) -> None:
    model, chosen = dense("llama")
    for weight in weights_of(model.config):
        if ".1." in weight.name and form_named(form[0]).applies_to(weight):
            chosen[weight.name] = form
    check(stored(model, make_plan, chosen), handed)


@pytest.mark.usefixtures("running")
def test_rounded_inputs_with_gradients_training_hooks_and_copies(make_plan: MakePlan, given: list[Tensor]) -> None:
    model = rounded_llama(make_plan)
    model(IDS)  # with gradients
    assert not given
    model.train()
    logits(model)
    assert not given
    model.eval()
    seen: list[Tensor] = []
    norm, q_proj = model.model.layers[0].input_layernorm, model.model.layers[1].self_attn.q_proj
    hooks = [
        norm.register_forward_hook(lambda module, args, output: seen.append(output)),
        q_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0])),
    ]
    found = logits(model)
    assert len(given) == 2
    assert all(one.isfinite().all() for one in seen)
    for hook in hooks:
        hook.remove()
    other = copy.deepcopy(model)
    nn.init.zeros_(model.model.layers[0].mlp.down_proj.weight_scale)
    assert torch.equal(logits(other), found)
    assert len(given) == 6
    assert not torch.equal(logits(model), found)


@pytest.mark.usefixtures("running", "nothing_compiled")
def test_compiled_it_is_one_graph(make_plan: MakePlan) -> None:
    model, graphs = rounded_llama(make_plan, {"v_proj": "bf16"}, fused=True), Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    expected = logits(model)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(compiled(IDS, use_cache=False).logits, expected)
    assert len(graphs) == 1
    called = [str(node.target) for node in graphs[0].graph.nodes]
    assert called.count("gac.normed_rows") == 4
    assert forgotten(model)


@pytest.mark.usefixtures("gpu")
def test_a_model_runs_in_the_kernels(make_plan: MakePlan, given: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its norms sum in another order than PyTorch's."""
    model, chosen = dense("llama", "w8a8", layers=1)
    model = stored(model.half(), make_plan, chosen)
    kernels = eight_bits_gemm.eight_bits_linear, eight_bits_gemm.eight_bits_linear_of, rounded_rows.normed_rows
    with operators(*kernels):
        found = logits(model)
        assert len(given) == 2
        expected = unchanged(model, monkeypatch)
    assert float((found - expected).norm() / expected.norm()) < 5e-3


@pytest.mark.usefixtures("running")
def test_a_saved_model_does_the_same(make_plan: MakePlan, given: list[Tensor], tmp_path: Path) -> None:
    model = rounded_llama(make_plan, fused=True)
    expected = logits(model)
    gac.save(model, tmp_path / "saved")
    loaded: Any = gac.load(tmp_path / "saved")
    given.clear()
    assert torch.equal(logits(loaded), expected)
    assert len(given) == 4
    assert set(loaded.state_dict()) == set(model.state_dict())


@pytest.mark.usefixtures("running")
def test_a_checkpoint_without_a_description_runs_as_before(
    make_plan: MakePlan, given: list[Tensor], tmp_path: Path
) -> None:
    model = rounded_llama(make_plan)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    with edited(tmp_path / "config.json") as config:
        assert len(config["gac"].pop("rounded")) == 4
    loaded = type(model).from_pretrained(tmp_path)
    given.clear()
    assert torch.equal(logits(loaded), expected)
    assert not given


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("scheme", ["fp8", "w8a8", "fp8_block"])
@pytest.mark.parametrize("rows", [1, 5, 100])
def test_a_gpu_does_the_same_captured_and_compiled(
    rows: int, scheme: str, make_plan: MakePlan, given: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, chosen = dense("llama", scheme)
    model = stored(model, make_plan, chosen, fused=True).cuda()
    ids = torch.arange(rows, device="cuda")[None]
    with torch.no_grad():
        found = model(ids, use_cache=False).logits.float()
        assert len(given) == 4
        with monkeypatch.context() as patch:
            patch.setattr(QuantisingNorm, "can", lambda *_: False)
            expected = model(ids, use_cache=False).logits.float()
        assert float((found - expected).norm() / expected.norm()) < 2e-2
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(ids, use_cache=False).logits
        for _ in range(2):  # counters are zeros again
            graph.replay()
            assert torch.equal(captured.float(), found)
        with torch._inductor.config.patch(emulate_precision_casts=True):  # it rounds where PyTorch does
            compiled = torch.compile(model, fullgraph=True)(ids, use_cache=False).logits.float()
        assert float((compiled - expected).norm() / expected.norm()) < 2e-2
    assert forgotten(model)


@pytest.mark.parametrize(
    ("norm", "device", "handed"),
    [
        (LlamaRMSNorm(64), "cpu", True),
        (LlamaRMSNorm(64), "meta", False),
        (nn.LayerNorm(64, bias=False), "cpu", False),
        (Olmo2RMSNorm(64), "cpu", False),
    ],
)
def test_norms_that_are_offloaded_or_others_stay(norm: nn.Module, device: str, handed: bool) -> None:
    weight = StoredLinear(Floats8(), nn.Linear(64, 32))
    block = nn.ModuleDict({"norm": norm, "weight": weight}).to(device)
    quantise_in_norms(block, [{"by": "norm", "readers": ["weight"]}])
    assert ("forward" in vars(norm)) is handed
    assert (weight.before is not None) is handed
