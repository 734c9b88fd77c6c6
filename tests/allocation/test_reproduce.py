"""The command that makes a plan again: every word of it can be pasted into a shell."""

import shlex
from collections.abc import Callable

import pytest
from transformers import LlamaConfig

from gac.plan.plan import Plan
from gac.plan.summary import allocate_command
from tests.changed import with_measured, with_recipe


@pytest.fixture
def plan(tiny_config: LlamaConfig, make_plan: Callable[..., Plan]) -> Plan:
    return make_plan(tiny_config, {"model.layers.0.self_attn.q_proj": ("low_rank", 24)})


def test_what_is_no_default_is_told(plan: Plan) -> None:
    asked = with_recipe(plan, fuse=True, rule="fisher:nearest32")
    assert " --refit none --rule fisher:nearest32 --fuse \\\n" in allocate_command(asked)


def test_what_a_plan_says_is_no_command_of_its_own(plan: Plan) -> None:
    asked = with_recipe(plan, method="kfac | reboot", rule="uniform:$(reboot)")
    hostile = with_measured(asked, model="tiny; reboot")
    words = shlex.split(allocate_command(hostile))
    assert [words[2], words[words.index("--method") + 1], words[words.index("--rule") + 1]] == [
        "tiny; reboot",
        "kfac | reboot",
        "uniform:$(reboot)",
    ]
    assert "'tiny; reboot'" in allocate_command(hostile)
