"""Experts in a storage hold what was rounded, expert by expert, and run as transformers runs them."""

from copy import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from gac.runtime.storage.experts import rounded
from gac.schemes import scheme_named
from gac.schemes.base import storage_of

SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
KINDS: Any = [(MixtralConfig, MixtralExperts), (GptOssConfig, GptOssExperts)]


def _experts(config: Any, make: Any) -> Any:
    torch.manual_seed(0)
    experts = make(config(**SIZES)).requires_grad_(False)
    for values in experts.parameters():
        values.normal_(std=0.1)
    return experts


def _stored(name: str, dense: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    scheme, kept = scheme_named(name), dict[str, list[torch.Tensor]]()
    storage: Any = storage_of(scheme)

    def round_(matrix: str, _expert: int, values: torch.Tensor) -> Any:
        kept.setdefault(matrix, []).append(scheme.quantised(values))
        return scheme.stored(values)

    stored = rounded(storage, dense, round_)
    return stored, {matrix: torch.stack(each) for matrix, each in kept.items()}


@pytest.mark.parametrize(("config", "make"), KINDS)
@pytest.mark.parametrize("scheme", ["w4a16:32", "w8a16", "fp8", "w8a8", "mxfp4a16", "nvfp4a16"])
def test_runs_as_transformers_with_the_rounded_values(scheme: str, config: Any, make: Any) -> None:
    dense = _experts(config, make)
    stored, values = _stored(scheme, dense)
    same = copy(dense)
    if stored.is_transposed:
        values = {name: each.mT.contiguous() for name, each in values.items()}
    vars(same)["_parameters"] = {**dense._parameters, **values}
    x, numbers = torch.randn(6, 64), torch.tensor([[0, 1], [2, 3], [1, 3], [0, 2], [3, 0], [1, 2]])
    weights = torch.full((6, 2), 0.5)
    torch.testing.assert_close(stored(x, numbers, weights), same(x, numbers, weights))


@pytest.mark.parametrize(("config", "make"), KINDS)
def test_words_decode_to_what_was_rounded(config: Any, make: Any) -> None:
    stored, values = _stored("w4a16:32", _experts(config, make))
    for name, expected in values.items():
        tensors = {key: each.numpy() for key, each in stored.state_dict().items() if key.startswith(f"{name}.")}
        packed, scale = tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"].astype(np.float32)
        shifts = np.arange(0, 32, 4)
        numbers = (packed[:, :, None] >> shifts & 15).reshape(len(packed), -1)
        zero = (tensors[f"{name}.weight_zero_point"][:, None, :] >> shifts[:, None] & 15).reshape(len(packed), -1)
        decoded = (numbers - zero.repeat(32, 1)).astype(np.float32) * scale.repeat(32, 1)
        np.testing.assert_array_equal(decoded.reshape(expected.shape), expected.numpy())


def test_casts_leave_the_numbers_alone() -> None:
    stored, _ = _stored("fp8", _experts(*KINDS[0]))
    before = {name: values.clone() for name, values in stored.state_dict().items()}
    stored.to(torch.bfloat16)
    for name, values in stored.state_dict().items():
        assert values.dtype == before[name].dtype
        assert torch.equal(values.view(torch.uint8), before[name].view(torch.uint8))


def test_experts_share_no_scale() -> None:
    with pytest.raises(ValueError, match=r"experts of 64 rows .* expected a multiple of 128"):
        _stored("fp8_block", _experts(*KINDS[0]))


@pytest.mark.parametrize(("config", "make"), KINDS)
def test_bytes_of_fp8_decode_to_what_was_rounded(config: Any, make: Any) -> None:
    stored, values = _stored("fp8", _experts(config, make))
    for name, expected in values.items():
        state = {key: each for key, each in stored.state_dict().items() if key.startswith(f"{name}.")}
        codes = state[f"{name}.weight"].view(torch.uint8).numpy().astype(np.int64)
        scale = state[f"{name}.weight_scale"].float().numpy()
        power, fraction = codes >> 3 & 15, (codes & 7) / 8
        number = np.where(power == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (power - 7))
        decoded = np.where(codes >> 7, -number, number).astype(np.float32) * scale
        np.testing.assert_array_equal(decoded.reshape(expected.shape), expected.numpy())
