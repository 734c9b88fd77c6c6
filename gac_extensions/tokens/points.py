"""The shapes that a plan of tokens looks up."""

from collections.abc import Iterable, Sequence
from typing import Any

from gac.core.errors import ProfileError
from gac.core.workloads import Workload
from gac.models.attentions import heads_of
from gac.models.families import family_of, text_config
from gac.models.shapes import shapes_of
from gac.plan.costs import floored
from gac.profiling.records import Point
from gac.profiling.sweeps.coverage import check_dtype
from gac_extensions.tokens.layers import window_of


def token_points(
    model: Any, workloads: Sequence[Workload], shares: Iterable[float], step: int, dtype: str = "bf16"
) -> tuple[Point, ...]:
    """List the points that a plan of tokens looks up: attention over shares of the context of each decode workload.

    Numbers of tokens are rounded down to a multiple of ``step``. The context and the sliding window are measured too.
    ProfileError where no workload decodes.
    """
    check_dtype(dtype)
    config = text_config(shapes_of(model))
    family_of(config)
    decoding = [workload for workload in workloads if workload.phase == "decode"]
    if not decoding:
        raise ProfileError("attention over tokens kept without a workload that decodes", "decode:B@C", "Name one.")
    heads, window, points = heads_of(config), window_of(config), list[Point]()
    for workload in decoding:
        context = workload.tokens
        shortened = (floored(share, context) // step * step for share in shares)
        lengths = {*shortened, context, min(context, window or context)} - {0}
        points += [Point(heads.over(workload.batch, tokens), dtype) for tokens in sorted(lengths)]
    return tuple(dict.fromkeys(points))
