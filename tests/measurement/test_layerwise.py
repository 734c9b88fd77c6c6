"""Layer by layer against one backward pass through the whole model, in every architecture."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import AlignDevicesHook
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from gac.core.errors import ModelError
from gac.forms.curvature.methods import Kfac
from gac.forms.curvature.metric import Moments
from gac.measurement import layerwise
from gac.measurement.calibration import CalibrationRun, stream_moments
from gac.measurement.layerwise import LayerwiseBackward
from gac.models import layer_stack
from gac.models.families import family_of
from gac.models.streaming import streamed
from gac.runtime.storage.eight_bits import READERS
from tests.models.small import every_layout, small_config, small_model

LAYERS = 7
NOISE = 1e-2  # a number that is halfway may be rounded either way
WINDOWS = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(1))


def deep_model(model_type: str) -> PreTrainedModel:
    """Seven random layers; where the architecture knows sliding windows they are shorter than the text."""
    return small_model(small_config(model_type, num_hidden_layers=LAYERS, sliding_window=8))


def drawn(logits: Tensor, seed: int) -> Tensor:
    """A label for each row of logits, from the distribution that it is of."""
    dice = torch.Generator(logits.device).manual_seed(seed)
    upto = logits.detach().softmax(-1).cumsum(-1)
    return torch.searchsorted(upto, torch.rand(len(upto), 1, generator=dice, device=upto.device))[:, 0]


def whole_backward(model: PreTrainedModel, name: str, power: float) -> Moments:
    """Of one weight, by plain autograd."""
    inputs, gradients = [], []
    for seed, window in enumerate(WINDOWS):
        seen: list[Tensor] = []
        handle = model.get_submodule(name).register_forward_hook(lambda _m, i, o, seen=seen: seen.extend([i[0], o]))
        ids = window.to(model.device)
        logits = model(ids[None]).logits
        handle.remove()
        loss = F.cross_entropy(logits[0, :-1].float(), drawn(logits[0, :-1].float(), seed), reduction="sum")
        inputs.append(seen[0].detach().flatten(0, -2))
        gradients.append(torch.autograd.grad(loss, seen[1])[0].flatten(0, -2))
    x, g = torch.cat(inputs).double(), torch.cat(gradients).double()
    of_g, of_x = (rows.norm(dim=1, keepdim=True) ** power for rows in (g, x))
    read = {reader: of_reader(x.float()) for reader, of_reader in READERS.items()}
    rounded = {reader: (numbers * scale - x).square() for reader, (numbers, scale) in read.items()}
    return Moments(
        (of_g * x).T @ x / of_g.sum(),
        (of_x * g).T @ g / len(g) * of_g.sum() / (of_g * of_x).sum(),
        (of_g * x.abs()).sum(0) / of_g.sum(),
        {reader: (of_g * squared).sum(0) / of_g.sum() for reader, squared in rounded.items()},
    )


def check(model: PreTrainedModel, tolerance: float, power: float = 0.0) -> None:
    sites = family_of(model.config).sites(model.config)
    method = type("Weighed", (Kfac,), {"power": power})()
    run = CalibrationRun(model, WINDOWS, method, progress=False, readers=tuple(READERS))
    found = dict(stream_moments(run, sites))
    assert sorted(found) == list(range(LAYERS))
    ends = [(site.layer, weight) for site in (sites[0], sites[-1]) for weight in site.weights]
    for layer, weight in ends:
        moments, expected = found[layer].of(weight), whole_backward(model, weight.name, power)
        for what in ("inputs", "gradients", "scale"):
            mine, plain = getattr(moments, what), getattr(expected, what)
            assert (mine - plain).norm() <= tolerance * plain.norm(), (weight.name, what)
        for reader in READERS:
            mine, plain = moments.noise[reader], expected.noise[reader]
            assert (mine - plain).norm() <= max(tolerance, NOISE) * plain.norm(), (weight.name, reader)


@every_layout
def test_the_moments_are_those_of_a_whole_backward_pass(model_type: str) -> None:
    check(deep_model(model_type), 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance", "power"), [(torch.float32, 1e-5, 2.0), (torch.bfloat16, 0.03, 0.0)])
def test_weighed_tokens_and_16_bits(dtype: torch.dtype, tolerance: float, power: float) -> None:
    check(deep_model("llama").to(dtype), tolerance, power)


def text_loss(model: PreTrainedModel) -> float:
    logits = (model(ids[None]).logits[0, :-1] for ids in WINDOWS)
    losses = (F.cross_entropy(rows, ids[1:], reduction="sum") for rows, ids in zip(logits, WINDOWS, strict=True))
    return float(sum(losses).detach())  # type: ignore[union-attr]


def test_a_layer_may_leave_another_dtype_than_it_enters() -> None:
    model = deep_model("llama")
    model.model.embed_tokens.to(torch.bfloat16)
    backward = LayerwiseBackward(model, list(model.model.layers), WINDOWS, 0)
    backward.start(lambda: None)
    assert backward.gradients.dtype == torch.float32
    dtypes = [backward._states[layer].dtype for layer in range(LAYERS)]
    assert dtypes == [torch.bfloat16, *[torch.float32] * (LAYERS - 1)]
    assert float(backward.loss) == pytest.approx(text_loss(model), rel=1e-6)


def test_hidden_states_that_do_not_fit_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_stack, "HOST_BYTES", 1)
    check(deep_model("gemma3_text"), 1e-5)


@pytest.mark.parametrize(
    ("enough", "kept"), [(7, [0, 1, 2, 3, 4, 5, 6]), (5, [0, 2, 4, 6]), (4, [0, 1, 2, 3, 4, 5, 6])]
)
def test_no_more_is_kept_than_will_do(enough: int, kept: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 7 layers, in rooms for so many states; the last is too small for any stride, so what is free is taken."""
    model = deep_model("llama")
    monkeypatch.setattr(layerwise, "ENOUGH", enough * WINDOWS.numel() * model.config.hidden_size * 4)
    backward = LayerwiseBackward(model, list(model.model.layers), WINDOWS, 0)
    backward.start(lambda: None)
    assert sorted(backward._states) == kept


def test_weights_in_host_memory_come_once_for_all_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = streamed(deep_model("llama"), "cpu")
    left, leave = Counter[torch.nn.Module](), AlignDevicesHook.post_forward

    def counted(hook: AlignDevicesHook, module: torch.nn.Module, output: Any) -> Any:
        left[module] += bool(hook.offload)
        return leave(hook, module, output)

    monkeypatch.setattr(AlignDevicesHook, "post_forward", counted)
    layers = list(model.model.layers)
    LayerwiseBackward(model, layers, WINDOWS, 0).start(lambda: None)
    assert all(parameter.requires_grad for parameter in model.parameters())
    ends = [model.model.embed_tokens, model.model.norm, model.lm_head]
    assert [left[one] for one in ends] == [1, 1, 1]
    assert [left[one.mlp.down_proj] for one in layers] == [2, *[1] * (LAYERS - 1)]  # the first shows what it returns


@pytest.mark.skipif(not torch.cuda.is_available(), reason="TF32 products, float32 sums")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
def test_a_gpu_measures_the_same(dtype: torch.dtype, tolerance: float) -> None:
    check(deep_model("llama").to("cuda", dtype), tolerance)
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_layer_that_is_called_with_what_differs_between_windows_is_refused(tiny_config: LlamaConfig) -> None:
    model = LlamaForCausalLM(tiny_config).eval()
    model.model.rotary_emb.register_forward_hook(lambda _m, _i, out: tuple(part * torch.rand(()) for part in out))
    backward = LayerwiseBackward(model, list(model.model.layers), WINDOWS, 0)
    with pytest.raises(ModelError, match="layer 0 also takes what differs between windows"):
        backward.start(lambda: None)
    assert not any(module._forward_pre_hooks for module in model.modules())
