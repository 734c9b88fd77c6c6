"""Keys and values as attention reads them, beside gradients of the weights through every block of queries."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama

from gac.core.distributed.ranks import Ranks
from gac.core.errors import ModelError
from gac.forms.curvature.registry import METHODS
from gac.measurement import attended, calibration
from gac.measurement.attended import cached_weights
from gac.measurement.calibration import CalibrationRun, stream_moments
from gac.measurement.curves import fit_layers, measure_curves
from gac.measurement.moments import LayerMoments
from gac.measurement.runs import drawn_loss
from gac.models.families import family_of
from gac.models.sites import Weight
from tests.measurement import runs
from tests.measurement.runs import sites_of
from tests.models.small import VALUE_LAYOUTS, small_config, small_model, weights_of
from tests.runtime.test_latents import OTHERS

WINDOWS = torch.randint(0, 256, (3, 21), generator=torch.Generator().manual_seed(2))
BLOCK = 8
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in VALUE_LAYOUTS} | OTHERS


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attended, "QUERIES", BLOCK)
    monkeypatch.setattr(attended, "AT_ONCE", 2)


def run_of(model: Any, folder: Path | None = None, method: str = "kfac", asked: bool = True) -> CalibrationRun:
    return runs.run_of(model, folder, method, WINDOWS, attended=asked)


def moments_of(model: Any, folder: Path | None = None) -> dict[int, LayerMoments]:
    stream = stream_moments(run_of(model, folder), sites_of(model))
    return {layer: moments for layer, moments in stream if moments is not None}


def by_blocks(model: PreTrainedModel, weight: Weight, output: str) -> list[Tensor]:
    """Of every window the gradient of the weight through each block of queries, shape ``(blocks, out, in)``."""
    found = []
    for number, ids in enumerate(WINDOWS):
        heard: list[Tensor] = []
        hook = model.get_submodule(output).register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0]))  # noqa: B023
        with hook, torch.enable_grad():
            _, loss = drawn_loss(model, ids, "a window", number)
        (mixed,) = heard
        (gradients,) = torch.autograd.grad(loss, mixed, retain_graph=True)
        matrix, blocks = model.get_parameter(f"{weight.name}.weight"), []
        for start in range(0, mixed.shape[1], BLOCK):
            part = torch.zeros_like(gradients)
            part[:, start : start + BLOCK] = gradients[:, start : start + BLOCK]
            blocks += torch.autograd.grad(mixed, matrix, part, retain_graph=True)
        found.append(torch.stack(blocks))
    return found


@pytest.mark.parametrize(
    ("named", "dtype"),
    [
        *((name, torch.float32) for name in VALUE_LAYOUTS),
        *(pytest.param(name, torch.float32, marks=pytest.mark.slow) for name in OTHERS),
        ("qwen3", torch.bfloat16),
    ],
)
def test_the_moments_are_those_of_gradients_through_blocks_of_queries(named: str, dtype: torch.dtype) -> None:
    model_type, changed = CONFIGS.get(named, (named, {}))
    model, tolerance = small_model(small_config(model_type, **changed)).to(dtype), 1e-4 if dtype.itemsize == 4 else 0.05
    measured, family = moments_of(model), family_of(model.config)
    for weight in cached_weights(weights_of(model.config)):
        layer = int(weight.name.split(family.layers)[1].split(".")[1])
        blocks = torch.cat(by_blocks(model, weight, f"{family.layers}.{layer}.{family.output}")).float()
        moments = measured[layer].attended(weight)
        for moment, expected in (
            (moments.inputs, torch.einsum("boi,boj->ij", blocks, blocks) / WINDOWS.numel()),
            (moments.gradients, torch.einsum("boi,bpi->op", blocks, blocks) / blocks.square().sum()),
        ):
            assert (moment - expected).norm() <= tolerance * expected.norm(), weight.name


def test_values_in_one_block_are_priced_by_what_attention_mixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries one by one: D is the gradient at what was mixed, times the inputs mixed by the weights of attention."""
    monkeypatch.setattr(attended, "QUERIES", 1)
    model = small_model(small_config("llama", num_attention_heads=2, num_key_value_heads=2))
    model.set_attn_implementation("eager")
    values = next(weight for weight in weights_of(model.config) if weight.values == "out")
    total = torch.zeros(values.in_features, values.in_features)
    for number, ids in enumerate(WINDOWS):
        heard: dict[str, Tensor] = {}
        attention = model.model.layers[0].self_attn
        hooks = [
            attention.o_proj.register_forward_pre_hook(lambda _, inputs: heard.update(mixed=inputs[0])),  # noqa: B023
            attention.v_proj.register_forward_pre_hook(lambda _, inputs: heard.update(x=inputs[0])),  # noqa: B023
            attention.register_forward_hook(lambda _, __, output: heard.update(shares=output[1])),  # noqa: B023
        ]
        _, loss = drawn_loss(model, ids, "a window", number)
        gradients = torch.autograd.grad(loss, heard["mixed"])[0].view(len(ids), 2, -1)
        read = (heard["shares"][0] @ heard["x"]).detach()  # (heads, queries, in)
        for head in range(2):
            square = gradients[:, head].square().sum(1)
            total += (read[head] * square[:, None]).T @ read[head]
        for hook in hooks:
            hook.remove()
    mine = moments_of(model)[0].attended(values).inputs
    assert (mine - total / WINDOWS.numel()).norm() <= 1e-4 * mine.norm()


class OneByOne(torch.autograd.Function):
    """As kernels that are launched by hand: their gradient is one tensor in memory."""

    @staticmethod
    def forward(_context: Any, given: Tensor) -> Tensor:
        return given.clone()

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        assert gradient.data_ptr()
        return gradient.clone()


def test_kernels_that_take_one_gradient_at_a_time(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    due, rotate = moments_of(tiny_model), modeling_llama.apply_rotary_pos_emb
    by_hand = lambda *given, **options: tuple(map(OneByOne.apply, rotate(*given, **options)))  # noqa: E731
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", by_hand)
    for layer, moments in moments_of(tiny_model).items():
        for name, tensor in moments.tensors.items():
            assert torch.allclose(tensor, due[layer].tensors[name], rtol=1e-4), name


def test_they_are_kept_apart_and_nothing_else_changes(tiny_model: Any, tmp_path: Path) -> None:
    sites = sites_of(tiny_model)
    with_them, without = (dict(stream_moments(run_of(tiny_model, asked=asked), sites)) for asked in (True, False))
    for layer, moments in without.items():
        assert moments is not None
        more = with_them[layer]
        assert more is not None
        for name, tensor in moments.tensors.items():  # with other products, as windows run one by one
            assert torch.allclose(more.tensors[name], tensor, rtol=1e-3, atol=1e-5 * float(tensor.abs().max())), name
        extra = more.tensors.keys() - moments.tensors.keys()
        names = {name.partition("/")[0].removeprefix("attended-") for name in extra}
        assert names == {"inputs", "gradients", "power", "windows"}
    assert not any(module._forward_hooks for module in tiny_model.modules())
    assert all(layer.self_attn.config is tiny_model.config for layer in tiny_model.model.layers)
    sites = sites_of(tiny_model)
    dict(stream_moments(run_of(tiny_model, tmp_path, asked=False), sites))
    first = moments_of(tiny_model, tmp_path)
    again = moments_of(tiny_model, tmp_path)
    assert all(torch.equal(again[0].tensors[name], tensor) for name, tensor in first[0].tensors.items())
    assert len(list(tmp_path.glob("layer-*"))) == len(list(tmp_path.glob(f"{calibration.ATTENDED}-*"))) == 2


def test_latents_are_priced_by_them_where_the_method_is_two_sided(tiny_model: Any) -> None:
    sites = sites_of(tiny_model)
    weight = next(weight for weight in weights_of(tiny_model.config) if weight.values == "out")
    fits = fit_layers(run_of(tiny_model, asked=False), sites, forms=["latent"])
    metric = METHODS.get("kfac").metric(moments_of(tiny_model)[0].attended(weight, METHODS.get("kfac").pooled))
    whole = metric.cost(tiny_model.get_parameter(f"{weight.name}.weight").detach())
    assert fits[0].losses[f"latent/{weight.name}"][0] == pytest.approx(0.64 * float(whole), rel=1e-4)
    one_sided = measure_curves(run_of(tiny_model, method="svd-llm", asked=False), sites, forms=["latent"])
    assert one_sided.curves.by_key


class Adding(Ranks):
    """The first of two processes, which is the owner; what the other has is at hand."""

    count = 2

    def __init__(self, other: attended.AttendedSums) -> None:
        self._others = iter([other.total(name, torch.device("cpu")) for name in other.shapes])

    def total_at(self, owner: int, tensor: Tensor) -> Tensor:
        return tensor.add_(next(self._others))


def test_the_sums_of_two_processes_are_those_of_one(tiny_model: Any) -> None:
    weights = weights_of(tiny_model.config)[:4]
    draw = torch.Generator().manual_seed(3)

    def block() -> dict[str, tuple[Tensor, Tensor]]:
        own = cached_weights(weights)
        return {one.name: (torch.randn(2, 5, 32, generator=draw), torch.randn(5, 64, generator=draw)) for one in own}

    windows = [[block(), block()] for _ in range(3)]
    whole, first, second = (attended.AttendedSums(weights, torch.zeros(3, 5), at) for at in (0, 0, 1))
    for sums, own in ((whole, windows), (first, windows[:1]), (second, windows[1:])):
        for window in own:
            sums._add(iter(window))
    first.bring_to(0, Adding(second))
    ours, theirs = first.means(), whole.means()
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(own, theirs[name]) for name, own in ours.items())


def test_an_attention_that_mixes_otherwise_is_refused(tiny_model: Any) -> None:
    def halved(*given: Any, **options: Any) -> Any:
        mixed, shares = sdpa_attention_forward(*given, **options)
        return mixed / 2, shares

    AttentionInterface.register("halved", halved)
    tiny_model.set_attn_implementation("halved")
    with pytest.raises(ModelError, match=r"which mixed values .* off"):
        moments_of(tiny_model)


def test_what_cannot_be_heard_and_what_is_not_finite_are_refused(tiny_model: Any, monkeypatch: Any) -> None:
    infinite = lambda sums: {name: torch.full(shape, torch.inf) for name, shape in sums.shapes.items()}  # noqa: E731
    for owner, name, broken, message in (
        (attended.AttendedSums, "means", infinite, r"attended-.* of layer 1 is not finite"),
        (attended._Listening, "attended", lambda *_: None, "attention interface"),
    ):
        monkeypatch.setattr(owner, name, broken)
        with pytest.raises(ModelError, match=message):
            moments_of(tiny_model)
