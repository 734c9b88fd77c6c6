"""Models whose shapes no shipped table holds: every weight has a latency, in every form and at every aligned dim."""

from itertools import product

import numpy as np
import pytest

from gac.allocation.latencies import UNKNOWN, Timing
from gac.core.workloads import Workload
from gac.forms import DEFAULT_FORMS, form_named
from gac.models.families import family_of
from gac.models.shapes import Shapes
from gac.profiling.table import Profile

MODELS = {
    "gemma-3-270m": Shapes("gemma3_text", 640, 2048, 18, 4, 1, 256, 262_144),
    "qwen3-0.6b": Shapes("qwen3", 1024, 3072, 28, 16, 8, 128, 151_936),
    "llama-3.2-1b": Shapes("llama", 2048, 8192, 16, 32, 8, 64, 128_256),
}
WORKLOADS = [Workload.parse(name) for name in ("prefill:1x1024", "decode:1@1024")]


@pytest.mark.parametrize(("name", "table"), zip(MODELS, ("nvidia-h200", "nvidia-h100-80gb-hbm3") * 2, strict=False))
def test_no_latency_of_the_model_is_unknown(name: str, table: str) -> None:
    timing, shapes = Timing(Profile.load(table), WORKLOADS), MODELS[name]
    weights = [weight for site in family_of(shapes).sites(shapes) for weight in site.weights]
    distinct = {(weight.out_features, weight.in_features): weight for weight in weights}
    for weight, form in product(distinct.values(), map(form_named, ("dense", *DEFAULT_FORMS))):
        if form.applies_to(weight):
            full = form.full(weight)
            dims = np.arange(64, full + 1, 64) if form.latency.axis(weight) else np.array([full])
            ns, _ = timing.of_weight(form, weight, dims)
            assert (ns != UNKNOWN).all(), f"{form.name} of {weight.name}"
