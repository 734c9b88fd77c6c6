from gac.allocation.baselines import uniform_ranks
from gac.forms import Weight


def test_uniform_ranks_of_llama_3_8b_at_0_8() -> None:
    weights = [Weight("q", 4096, 4096), Weight("k", 1024, 4096), Weight("gate", 14336, 4096)]
    assert uniform_ranks(weights, 0.8) == {"q": 1638, "k": 655, "gate": 2548}
