"""Two processes run a compressed model of which each has its part: with gloo on the CPU, started once."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import gac
from gac.core.errors import CheckpointError
from gac.forms import FORMS, form_named, variants_of
from gac.runtime.modules import KINDS
from gac.runtime.parallel.division import cuts_of, styles_of, units_of
from gac.runtime.parallel.ranks import SplitError, ranks_asked_for
from tests.compression.compressed import MakePlan
from tests.models.small import LAYOUTS, TWO_KINDS, small_config, small_model, weights_of
from tests.runtime.split_models import MIXED, UNEVEN, models

WORKER = Path(__file__).with_name("split_worker.py")
ROOT = WORKER.parents[2]
KINDS_OF_FORMS = tuple(FORMS.names)
NO_PLAN = ("gpt2", "opt")
"""Families of which transformers divides nothing."""


@pytest.fixture(scope="module")
def found(make_plan: MakePlan, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """What the two processes found."""
    folder = tmp_path_factory.mktemp("split")
    for name, model in models(make_plan):
        model.save_pretrained(folder / name)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(WORKER)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, str(folder)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    one, other = (json.loads((folder / name).read_text()) for name in ("found.json", "other.json"))
    return one, other


@pytest.mark.slow
def test_split_models_say_what_whole_ones_say(found: Any) -> None:
    for rank in found:
        assert len(rank["loaded"]) == 7
        for name, model in rank["loaded"].items():
            assert model["error"] < 1e-4, name
            assert model["same"], name
            assert model["names"], name
        assert rank["static"]
        assert len(rank["ends"]) == 3
        assert max(rank["ends"].values()) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("family", "scheme"), MIXED)
def test_each_process_has_half_of_the_layers(family: str, scheme: str, found: Any) -> None:
    for rank in found:
        one = rank["loaded"][f"{family}-{scheme}"]
        whole, part = one["bytes"]
        assert 0.5 * whole < part < 0.6 * whole  # norms are whole, and keys and values of the layer with one head
    assert found[0]["loaded"][f"{family}-{scheme}"]["said"] == []  # all that can be divided is


@pytest.mark.slow
def test_what_cannot_be_divided_is_whole_and_said_once(found: Any) -> None:
    said, nothing = (rank["loaded"][UNEVEN]["said"] for rank in found)
    assert said == ["whole in each of 2 processes: model.layers.0.self_attn.q_proj (3 key-value heads) and 11 more"]
    assert nothing == []


@pytest.mark.slow
def test_a_bench_holds_parts_and_takes_the_slowest_process(found: Any) -> None:
    one, other = (rank["bench"] for rank in found)
    assert one == other
    assert [name for name, *_ in one][3:] == ["GAC, by default", "uniform w8a16"]
    for _, slowest, whole in one:
        assert (slowest - 1) % 4 == 0  # whole bytes of float32, and the slower process's one
        assert 0.5 * whole < slowest < 0.65 * whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("indivisible", "CheckpointError: a gac_llama over 2 processes, of which nothing can be divided (model."),
        ("apart", "CheckpointError: process 1 has files of digest "),
        ("saved", "SplitError: a model that is split over 2 processes; expected a whole one. Load it whole."),
        ("size", "SplitError: tp_size=4; expected 2, the number of processes."),
        ("trained", "RuntimeError: a split model was run with gradients; expected torch.no_grad(). Train it whole."),
    ],
)
def test_what_cannot_be_split_is_refused_in_both(case: str, message: str, found: Any) -> None:
    for rank in found:
        assert rank["errors"][case].startswith(message)


def test_a_module_is_divided_as_its_form_says() -> None:
    """The forms' own word, by which plans are made, and that of the modules, which run, are the same."""
    seen = set()
    for name in ("llama", "gpt_neox", "phi3"):
        for weight in weights_of(small_config(name)):
            for form in variants_of((form_named(kind) for kind in KINDS_OF_FORMS), weight):
                if not form.applies_to(weight):
                    continue
                spec = form.module(weight, max(1, form.min_dim))
                module = KINDS[spec.module][0](**spec.sizes, bias=False, device="meta")
                assert tuple(styles_of(module, weight.split).values()) == form.latency.splits(weight)
                seen.add((form.kind, weight.split))
    assert {kind for kind, _ in seen} == {*KINDS_OF_FORMS} - {"experts"}  # of mixtures, which are not divided


@pytest.mark.parametrize("family", [name for name in LAYOUTS if name not in (*NO_PLAN, *TWO_KINDS)])
def test_transformers_divides_the_side_that_plans_divide(family: str) -> None:
    config = small_config(family)
    units = list(units_of(small_model(config)))
    sides = {weight.name: weight.split for weight in weights_of(config)}
    assert {name: "in" if name == unit.last else "out" for unit in units for name in unit.styles} == sides


def test_without_a_plan_in_transformers_nothing_is_divided() -> None:
    with pytest.raises(SplitError, match="transformers has no plan for it"):
        cuts_of(small_model(small_config("gpt2")), 0, 2)


@pytest.mark.parametrize("size", [2, 4])
def test_the_parts_of_all_processes_are_the_whole(size: int) -> None:
    model = small_model(small_config("llama"))
    cuts = [cuts_of(model, rank, size) for rank in range(size)]
    for name in cuts[0].matrices:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        own = [cut.matrices[name] for cut in cuts]
        if own[0].columns is None:
            taken = sorted({row for one in own for part in one.rows or () for row in range(part.start, part.stop)})
            assert taken == list(range(linear.out_features))
        else:
            ends = [(one.columns.start, one.columns.stop) for one in own if one.columns is not None]
            width = linear.in_features // size
            assert ends == [(rank * width, (rank + 1) * width) for rank in range(size)]
    shared = {f"model.layers.{layer}.self_attn": 1 for layer in (0, 1)} if size == 4 else {}
    assert [cut.groups for cut in cuts] == [shared] * size


def test_other_ways_to_split_are_refused_and_a_device_is_torchruns_affair(tmp_path: Path) -> None:
    colwise, fsdp = {"a": "colwise"}, {"fsdp_size": 2, "tp_size": 2}
    for options, message in (
        ({"tp_plan": colwise}, "tp_plan={'a': 'colwise'}; expected 'auto'. How a compressed model is split"),
        ({"tp_plan": "auto"}, "tp_plan in one process; expected several. Start them with torchrun --nproc-per-node 2."),
        ({"distributed_config": fsdp}, "fsdp_size=2; expected tp_size and tp_plan alone."),
    ):
        with pytest.raises(SplitError, match=re.escape(message)):
            ranks_asked_for(options)
    with pytest.raises(CheckpointError, match="tp_plan='auto' and device='cpu'; expected one of them"):
        gac.load(tmp_path, "cpu", tp_plan="auto")
