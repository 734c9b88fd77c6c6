"""What each part of rounding gives: the error of the weights of a few layers, in the metric that plans are priced in.

    python tests/benchmarks/rotated.py smollm2 rotated-smollm2
    python tests/benchmarks/rounding.py --model rotated-smollm2 --output rounding.json

Weights are rounded for the first part of the windows. Every figure is ``tr(G E A E^T)`` of the rounding error E on the
others, over that of plain feedback (GPTQ): every number by itself; scales and numbers improved in turn after feedback;
feedback through A and G; and all there is for the weight, with other dampings than ``gac.schemes.feedback.order``'s.
Of ``fp8`` it is feedback over every number by itself.
"""

from unittest.mock import patch

from torch import Tensor

from gac.forms.curvature.methods import Kfac
from gac.forms.curvature.metric import Metric
from gac.measurement.text import calibration_windows
from gac.models.loading import load_model
from gac.models.sites import Weight
from gac.schemes import Scheme, scheme_named
from gac.schemes.feedback import order
from gac.schemes.feedback.order import Inputs
from tests.benchmarks.harness import markdown, options, seen_of_layers, write

SCHEMES = ("fp8", "w4a16:64", "w3a16:64", "w2a16:64")
ROUNDS = 0.6
"""The part of the windows that weights are rounded for."""
DAMPINGS = (0.1, 0.3, 3.0, 10.0)


def main() -> None:
    parser = options(__doc__, "--model", "--calibration", "--output")
    parser.set_defaults(calibration="wiki-sample:40x512")
    asked = parser.parse_args()
    loaded, method = load_model(asked.model), Kfac()
    windows = calibration_windows(asked.calibration, loaded.tokenizer).ids
    first, rows = round(ROUNDS * len(windows)), []
    for weight, seen in seen_of_layers(loaded.model, method, windows[:first], windows[first:]):
        matrix = loaded.model.get_submodule(weight.name).weight.detach()
        metric, check = map(method.metric, seen)
        for scheme in map(scheme_named, SCHEMES):
            rows.append({"weight": weight.name, "scheme": scheme.name} | errors(matrix, weight, scheme, metric, check))
    write(asked.output, calibration=asked.calibration, rounds=first, rows=rows)
    names = ("nearest", "improved", "both sides", *(f"damping x{times:g}" for times in DAMPINGS))
    table = [
        (row["weight"], row["scheme"], *(f"{row[one] / row['feedback']:.3f}" if one in row else "" for one in names))
        for row in rows
    ]
    print(markdown(("weight", "scheme", *names), table))


def errors(matrix: Tensor, weight: Weight, scheme: Scheme, own: Metric, check: Metric) -> dict[str, float]:
    """``tr(G E A E^T)`` on text that did not round, by what rounding knows and does."""

    def lost(inputs: Inputs | None, gradients: Tensor | None = None) -> float:
        return float(check.cost((scheme.quantised(matrix, inputs, gradients) - matrix).double()))

    def all_there_is() -> float:
        return lost(Inputs(own.inputs), own.gradients if weight.scores else None)

    found = {"nearest": lost(None), "feedback": lost(Inputs(own.inputs, thorough=False))}
    found["both sides" if weight.scores else "improved"] = all_there_is()
    for times in DAMPINGS:
        with patch.object(order, "DAMPING", times * order.DAMPING):
            found[f"damping x{times:g}"] = all_there_is()
    return found


if __name__ == "__main__":
    main()
