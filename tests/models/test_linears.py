"""How a dense model stores a linear weight, and that everything reads it the same way."""

import copy

import numpy as np
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from gac.forms.curvature.registry import METHODS
from gac.measurement.calibration import CalibrationRun
from gac.measurement.curves import measure_curves
from gac.models.families import family_of
from gac.models.linears import as_linear, check_rows_together
from tests.compression.applying import IDS
from tests.models.small import small_config, small_model, weights_of
from tests.refused import assert_refused


def test_what_the_kernel_for_one_row_cannot_read_is_refused() -> None:
    model = nn.ModuleDict({"rows": nn.Linear(4, 8), "columns": Conv1D(8, 4)})
    check_rows_together(model, ["rows"])
    assert_refused(
        lambda: check_rows_together(model, ["rows", "columns"]),
        "columns is a Conv1D, and one row is to run in Triton; expected weights of shape (out, in)",
    )


def test_a_transposed_weight_computes_the_same() -> None:
    torch.manual_seed(0)
    stored = Conv1D(24, 40)
    nn.init.normal_(stored.bias)
    linear = as_linear(stored)
    assert isinstance(linear, nn.Linear)
    assert linear.weight.shape == (24, 40)
    assert linear.weight.data_ptr() == stored.weight.data_ptr()
    assert as_linear(linear) is linear
    x = torch.randn(2, 3, 40)
    torch.testing.assert_close(linear(x), stored(x))


def test_loss_curves_are_those_of_the_same_linear_layers() -> None:
    stored = small_model(small_config("gpt2"))
    linear = copy.deepcopy(stored)
    for weight in weights_of(stored.config):
        twin = nn.Linear(weight.in_features, weight.out_features)
        with torch.no_grad():
            twin.weight.copy_(stored.get_submodule(weight.name).weight.T)
            twin.bias.copy_(stored.get_submodule(weight.name).bias)
        linear.set_submodule(weight.name, twin)
    sites = family_of(stored.config).sites(stored.config)
    ours, theirs = (
        measure_curves(CalibrationRun(model, IDS, METHODS.get("kfac"), progress=False), sites).curves
        for model in (stored, linear)
    )
    for key, curve in ours.by_key.items():
        np.testing.assert_allclose(curve.loss, theirs.by_key[key].loss, rtol=1e-3, atol=1e-7)
