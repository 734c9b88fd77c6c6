"""What each of several GPUs has of a weight, as planning counts it: the runtime's own word is the same."""

from typing import Any

import pytest
import torch

from gac.compression.apply import empty_stored
from gac.core.errors import GacError
from gac.core.operations import all_gather, all_reduce, linear
from gac.forms import form_named
from gac.forms.tensor_parallel import check_splits, divides, split_gemms, split_matrices, split_operations
from gac.models.families import family_of
from gac.models.modules import swap_in
from gac.models.shapes import SHAPES
from gac.models.sites import Weight
from gac.plan.plan import WeightChoice
from gac.runtime.parallel.division import cuts_of
from gac.schemes import scheme_named
from tests.models.small import small_config, small_model, weights_of

BF16, W4A16 = scheme_named("bf16"), scheme_named("w4a16")
Q = Weight("q_proj", 4096, 4096, input_group="x")
K = Weight("k_proj", 1024, 4096, input_group="x", heads=8, cached=True)
O = Weight("o_proj", 4096, 4096, values="in", heads=32, to_residual=True)  # noqa: E741
DOWN = Weight("down_proj", 4096, 14336, neurons="in", to_residual=True)
GATE = Weight("gate_proj", 14336, 4096, neurons="out", input_group="y")


@pytest.mark.parametrize(
    ("form", "weight", "dim", "expected"),
    [
        ("dense", Q, 4096, [linear(3, 4096, 1024)]),
        ("dense", O, 4096, [linear(3, 1024, 4096), all_reduce(4, 3, 4096)]),
        ("low_rank", Q, 512, [linear(3, 4096, 128), all_gather(4, 3, 512), linear(3, 512, 1024)]),
        (
            "low_rank",
            O,
            512,
            [linear(3, 1024, 512), all_reduce(4, 3, 512), linear(3, 512, 1024), all_gather(4, 3, 4096)],
        ),
        ("narrow", GATE, 8192, [linear(3, 4096, 2048)]),
        ("narrow", DOWN, 8192, [linear(3, 2048, 4096), all_reduce(4, 3, 4096)]),
        ("skip", DOWN, 0, []),
    ],
)
def test_a_gpu_runs_its_part_of_every_gemm_and_the_collective_that_follows(form, weight, dim, expected) -> None:
    assert list(split_operations(form_named(form), weight, dim, 3, 4)) == expected


def test_gpus_share_the_key_value_heads_that_are_fewer() -> None:
    dense, pair = form_named("dense"), form_named("low_rank")
    assert K.parts(4) == 4
    assert K.parts(16) == 8
    assert split_gemms(dense, K, 1024, 1, 16) == (linear(1, 4096, 128),)
    assert split_gemms(pair, K, 256, 1, 16) == (linear(1, 4096, 16), linear(1, 256, 128))


@pytest.mark.parametrize(
    ("form", "weight", "dim", "scheme", "gpus", "even"),
    [
        ("low_rank", Q, 510, BF16, 4, False),  # the rank is divided
        ("low_rank", O, 510, BF16, 4, True),  # it is not: its vectors are summed
        ("narrow", DOWN, 8190, BF16, 4, False),
        ("heads", K, 6, BF16, 4, False),  # of 128 numbers each: rows would divide
        ("heads", K, 4, BF16, 4, True),
        ("dense", DOWN, 4096, W4A16, 2, True),  # 7,168 columns in groups of 128
        ("narrow", DOWN, 8320, W4A16, 2, False),
        ("narrow", DOWN, 8448, W4A16, 2, True),
        ("low_rank", Q, 24, W4A16, 2, False),  # 12 rows, whose zero points are packed in eights
        ("low_rank", Q, 48, W4A16, 2, True),
        ("low_rank", Q, 48, scheme_named("w8a8"), 2, False),  # it runs multiples of 16
        ("latent", K, 64, BF16, 2, True),  # groups of 4 of the 8 heads
        ("latent", K, 64, BF16, 4, False),
    ],
)
def test_what_each_gpu_has_is_equal_and_whole(form, weight, dim, scheme, gpus, even) -> None:
    named = form_named(form)
    weight = Weight(**{**vars(weight), "groups": 8}) if form == "heads" else weight
    assert divides(named, weight, dim, scheme, gpus) == even


LAYERS: tuple[dict[str, int], ...] = (
    {"low_rank": 16},
    {"latent:1": 16, "narrow": 128},
    {"head_dim": 16, "narrow_pair:128": 16},
    {"heads": 2, "skip": 0},
)


@pytest.mark.parametrize(
    ("family", "scheme", "gpus"), [("llama", "bf16", 4), ("llama", "w4a16:16", 2), ("glm", "bf16", 2)]
)
def test_what_runs_has_the_matrices_that_plans_count(family: str, scheme: str, gpus: int) -> None:
    config = small_config(family, num_hidden_layers=len(LAYERS))
    setattr(config, family_of(config).neurons, 192)
    choices = [_choice(weight, scheme, gpus) for weight in weights_of(config)]
    choices = [each for each in choices if each.divides(gpus)]
    model: Any = small_model(config)
    swap_in(model, {each.name: empty_stored(each, False, "meta", torch.float32) for each in choices})
    cuts = cuts_of(model, gpus - 1, gpus)
    assert not cuts.undivided
    assert len(choices) > 10
    for each in choices:
        expected = split_matrices(form_named(each.form), each.weight, each.dim, gpus)
        leaves = ("",) if len(expected) == 1 else (".first", ".second")
        assert tuple(_size(model, f"{each.name}{leaf}", cuts) for leaf in leaves) == expected


def _choice(weight: Weight, scheme: str, gpus: int) -> WeightChoice:
    """What the weight is in its layer; dense where the GPUs have no equal parts of that."""
    layer = int(weight.name.split(".layers.")[1].split(".")[0])
    dense = WeightChoice(weight, "dense", form_named("dense").full(weight), scheme)
    taken = [WeightChoice(weight, form, dim, scheme) for form, dim in LAYERS[layer].items() if _takes(form, weight)]
    return next((each for each in taken if each.form != "skip" and each.divides(gpus)), dense)


def _takes(form: str, weight: Weight) -> bool:
    return form_named(form).applies_to(weight)


def _size(model: Any, name: str, cuts: Any) -> tuple[int, int]:
    module, cut = model.get_submodule(name), cuts.matrices[name]
    blocks = getattr(getattr(module, "weight", None), "ndim", 2) == 3
    columns = module.weight.shape[2] if blocks else getattr(module, "matrix", (0, module.in_features))[1]
    rows = getattr(module, "matrix", (module.out_features, 0))[0]
    return cut.count or rows, cut.columns.stop - cut.columns.start if cut.columns else columns


@pytest.mark.parametrize(
    ("model", "gpus", "message"),
    [
        (
            "smollm2",
            2,
            "tensor_parallel=2 for a model with 3 key-value heads; expected a number of GPUs that divides them: 1, 3. ",
        ),
        ("llama-3-8b", 64, "tensor_parallel=64 for a model with 8 key-value heads; expected a number of GPUs that "),
    ],
)
def test_heads_that_cannot_be_divided_are_named_with_the_numbers_of_gpus_that_divide_all(model, gpus, message) -> None:
    shapes = SHAPES[model]
    with pytest.raises(GacError) as error:
        check_splits(family_of(shapes).sites(shapes), gpus)
    assert str(error.value).startswith(message)
