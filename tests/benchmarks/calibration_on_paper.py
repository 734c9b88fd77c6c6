"""What calibration takes on many GPUs, on paper: time, memory and traffic from one measured run, by counted work.

    python tests/benchmarks/calibration_on_paper.py --output calibration-on-paper.json

The measured run is one GPU's (``results/scale-llama-3-8b-h100.json``, or another file that ``scale.py`` wrote).
Statistics grow as the multiplications of forward and backward passes and of second moments, decompositions as the third
powers of the sides of all weights, files as their squares. Both are divided over the GPUs; of decompositions each takes
whole layers. Traffic is what the sums of all layers take to their owners, at the rate of the slowest link.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gac.measurement.calibration import moment_bytes
from gac.models.families import family_of
from gac.models.shapes import SHAPES, Shapes
from gac.models.sites import Weight
from tests.benchmarks.harness import markdown, options, write

MEASURED = Path(__file__).parent / "results" / "scale-llama-3-8b-h100.json"
MODELS = {
    "llama-3-8b": SHAPES["llama-3-8b"],
    "llama-3-70b": SHAPES["llama-3-70b"],
    "llama-3.1-405b": Shapes("llama", 16384, 53248, 126, 128, 8, 128, 128_256),
}
STATISTICS = ("forward, loss", "layers backward, moments")
CURVES = ("fit of the layers",)
STORING = "storing (to the host; waiting for the disk)"
NVLINK, NETWORK = 300e9, 45e9
"""Bytes a second between the GPUs of a node, and between nodes of 8 GPUs with 400 Gbit/s each."""
NODE = 8
COLUMNS = ("model", "GPUs", "statistics (min)", "curves, factors (min)", "sums to owners (min)", "all (min)")


@dataclass(frozen=True)
class Counted:
    """What a model's calibration takes, counted.

    Attributes:
        products: multiplications of the passes and the second moments, for a token.
        cubes: of the sides of all weights.
        squares: likewise.
        weights: bytes of all decoder weights in 16 bits.
        moments: bytes of the largest layer's, on two halves of the text.
        travels: bytes of all layers' sums.
    """

    layers: int
    products: int
    cubes: int
    squares: int
    weights: int
    moments: int
    travels: int

    @classmethod
    def of(cls, shapes: Shapes) -> "Counted":
        sites = family_of(shapes).sites(shapes)
        weights = [weight for site in sites for weight in site.weights]
        layers = shapes.num_hidden_layers
        sums = moment_bytes(sites)
        return cls(
            layers,
            sum(3 * weight.params + _squares(weight) for weight in weights),
            sum(weight.in_features**3 + weight.out_features**3 for weight in weights),
            sum(map(_squares, weights)),
            2 * sum(weight.params for weight in weights),
            sums // layers,
            sums,
        )


def _squares(weight: Weight) -> int:
    return weight.in_features**2 + weight.out_features**2


def main() -> None:
    parser = options(__doc__, "--output")
    parser.add_argument("--measured", type=Path, default=MEASURED)
    parser.add_argument("--gpus", type=int, nargs="*", default=[1, 2, 4, 8, 16, 64])
    asked = parser.parse_args()
    run = json.loads(asked.measured.read_text(encoding="utf-8"))
    rows = [row for name, shapes in MODELS.items() for row in on_paper(name, Counted.of(shapes), run, asked.gpus)]
    write(asked.output, measured=asked.measured.name, rows=rows)
    shown = [[row["model"], str(row["gpus"]), *(f"{row[name]:.1f}" for name in COLUMNS[2:])] for row in rows]
    print(markdown(COLUMNS, shown))
    for name, shapes in MODELS.items():
        found = Counted.of(shapes)
        kept = run["kept_gb"] * found.squares / base(run).squares
        held = f"weights {found.weights / 1e9:.0f} GB, moments of a layer {found.moments / 1e9:.1f} GB"
        print(f"{name}: {held}, all sums {found.travels / 1e9:,.0f} GB, files {kept:,.0f} GB")


def base(run: dict[str, Any]) -> Counted:
    """Of the model that was measured."""
    return Counted.of(SHAPES[run["asked"]["model"]])


def on_paper(name: str, model: Counted, run: dict[str, Any], gpus: list[int]) -> Iterator[dict[str, Any]]:
    """A row for each number of GPUs."""
    measured, seconds = base(run), run["seconds"]
    statistics = sum(seconds[part] for part in STATISTICS) * model.products / measured.products
    curves = sum(seconds[part] for part in CURVES) * model.cubes / measured.cubes
    storing = seconds[STORING] * model.squares / measured.squares
    for count in gpus:
        turns = -(-model.layers // count)
        rate = NVLINK if count <= NODE else NETWORK
        parts = (statistics / count, (curves + storing) * turns / model.layers, (count > 1) * model.travels / rate)
        minutes = [part / 60 for part in (*parts, sum(parts))]
        yield {"model": name, "gpus": count} | dict(zip(COLUMNS[2:], minutes, strict=True))


if __name__ == "__main__":
    main()
