"""How compressed-tensors' configs write formats of weights and of inputs. Imports no torch."""

from typing import Any


def config_group(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """A config group without its targets.

    Args:
        layout: the name of the format, which says how the tensors lie.
        weights, inputs: from ``in_rows``, ``in_groups`` and ``by_token``; None: inputs are multiplied as they are.
    """
    return {"format": layout, "weights": weights, "input_activations": inputs, "output_activations": None}


def in_rows(bits: int, kind: str, symmetric: bool = True) -> dict[str, Any]:
    """Weights with a scale a row.

    Args:
        kind: of a number, ``int`` or ``float``.
        symmetric: whether there are no zero points.
    """
    return _arguments(bits, kind, symmetric, "channel", None, dynamic=False)


def in_groups(bits: int, group: int, symmetric: bool) -> dict[str, Any]:
    """Weights of whole numbers with a scale for each group of so many neighbouring columns."""
    return _arguments(bits, "int", symmetric, "group", group, dynamic=False)


def by_token(bits: int, kind: str) -> dict[str, Any]:
    """Inputs with a scale for each token, which is found as it comes."""
    return _arguments(bits, kind, True, "token", None, dynamic=True)


def _arguments(
    bits: int, kind: str, symmetric: bool, strategy: str, group: int | None, *, dynamic: bool
) -> dict[str, Any]:
    found = {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy, "dynamic": dynamic}
    return found | {"group_size": group}
