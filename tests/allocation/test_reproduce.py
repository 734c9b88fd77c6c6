"""The command that makes a plan again: every word of it can be pasted into a shell."""

import shlex
from collections.abc import Callable
from dataclasses import replace

import pytest
from transformers import LlamaConfig

from gac.allocation.reproduce import allocate_command, rule_of
from gac.plan import Plan


@pytest.fixture
def plan(tiny_config: LlamaConfig, make_plan: Callable[..., Plan]) -> Plan:
    return make_plan(tiny_config, {"model.layers.0.self_attn.q_proj": ("low_rank", 24)})


def certified(plan: Plan, method: str) -> Plan:
    return replace(plan, certificate=replace(plan.certificate, method=method))


@pytest.mark.parametrize("note", ["", "; of its bound CP-SAT agrees: it proved the same optimum", "; zero-padded"])
@pytest.mark.parametrize("rule", ["uniform", "fisher:nearest32"])
def test_a_rule_is_told_whatever_was_noted_of_its_plan_since(plan: Plan, rule: str, note: str) -> None:
    assert rule_of(certified(plan, rule + note)) == rule
    assert f" --rule {rule} --refit none" in allocate_command(certified(plan, rule + note))


def test_how_it_runs_is_told(plan: Plan) -> None:
    assert "--one-row" not in allocate_command(plan)
    assert " --fuse --one-row \\\n" in allocate_command(replace(plan, fused=True, one_row=True))


def test_the_exact_choice_is_by_no_rule(plan: Plan) -> None:
    assert rule_of(certified(plan, "Lagrangian bound; losses in units of 1e-16; uniform")) is None


def test_what_a_plan_says_is_no_command_of_its_own(plan: Plan) -> None:
    hostile = replace(certified(plan, "uniform:$(reboot)"), model="tiny; reboot", method="kfac | reboot")
    words = shlex.split(allocate_command(hostile))
    assert [words[2], words[words.index("--method") + 1], words[words.index("--rule") + 1]] == [
        "tiny; reboot",
        "kfac | reboot",
        "uniform:$(reboot)",
    ]
    assert "'tiny; reboot'" in allocate_command(hostile)
