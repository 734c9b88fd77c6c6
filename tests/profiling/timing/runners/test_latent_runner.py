"""Attention over latents, timed by itself: its kernel, in Triton's interpreter where there is no GPU."""

import pytest

from gac.profiling.timing.operands import Pools
from gac.profiling.timing.runners import WORST_ERROR, relative_error, runner_of
from gac.runtime.kernels import split_k as tiles
from tests.profiling.examples import EXAMPLES
from tests.runtime.interpreted import DEVICE


@pytest.mark.parametrize("name", ["latent_attention", "latent_attention_int8", "latent_attention_int4"])
def test_it_attends_as_over_keys_and_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong result is seen; a rank that the kernel cannot take is refused."""
    monkeypatch.setattr(tiles, "_processors", lambda device: 4)
    runner, axes, pools = runner_of(name), EXAMPLES[name], Pools(DEVICE, limit_bytes=2**20)
    inputs = runner.operands(axes, "fp16", pools.cut)
    (mixed,) = runner.run(inputs, [])
    assert mixed.shape == runner.operator.outputs(axes, "fp16")[0].shape
    assert relative_error(runner, inputs, [mixed]) < 5e-3
    assert relative_error(runner, inputs, [1.1 * mixed]) > WORST_ERROR
    with pytest.raises(RuntimeError, match="latents have rank 20, no multiple of 8"):
        runner.operands({**axes, "k": 20}, "fp16", pools.cut)
