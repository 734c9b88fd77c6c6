"""The command that times whole models, as far as it goes without a GPU."""

import json

import pytest
import torch
from click.testing import CliRunner

from gac.cli import main

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_models_or_shapes_have_to_be_named() -> None:
    result = CliRunner().invoke(main, ["bench"])
    assert result.exit_code == 2
    assert "give models, or --shapes." in result.output


def test_against_goes_with_models() -> None:
    result = CliRunner().invoke(main, ["bench", "--shapes", "llama-3-8b", "--against", "smollm2"])
    assert result.exit_code == 2
    assert "--against goes with models" in result.output


def test_a_workload_is_checked_before_the_gpu() -> None:
    result = CliRunner().invoke(main, ["bench", "--shapes", "llama-3-8b", "--workload", "decode:1x8", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["given"] == "workload 'decode:1x8'"


@without_gpu
def test_without_a_gpu_there_is_nothing_to_time() -> None:
    result = CliRunner().invoke(main, ["bench", "--shapes", "llama-3-8b", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["expected"] == "an NVIDIA GPU to measure"
