"""How others allocate: the rules that a plan is compared with."""

from collections.abc import Sequence

from gac.forms import Weight


def uniform_ranks(weights: Sequence[Weight], budget: float) -> dict[str, int]:
    """SVD-LLM's rule: every weight keeps the same fraction of its parameters, ``rank = int(m * n * ratio / (m + n))``.

    The ranks are as they fall, aligned to nothing (Wang et al., SVD-LLM, arXiv 2403.07378; its code rounds down).

    Args:
        budget: kept fraction of each weight's parameters (the paper's 1 - compression ratio).
    """
    return {
        weight.name: int(weight.out_features * weight.in_features * budget / (weight.out_features + weight.in_features))
        for weight in weights
    }
