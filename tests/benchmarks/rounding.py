"""What each part of rounding gives: the error of the weights of a few layers, in the metric that plans are priced in.

    python tests/benchmarks/rotated.py smollm2 rotated-smollm2
    python tests/benchmarks/rounding.py --model rotated-smollm2 --calibration wiki-sample:6x512 --output rounding.json

Every figure is ``tr(G E A E^T)`` of a weight's rounding error E over that of plain feedback (GPTQ): every number by
itself; feedback; scales and numbers improved in turn after it; feedback through A and G.
"""

from torch import Tensor

from gac.forms.metric import Metric
from gac.models.families import family_of
from gac.schemes.inputs import Inputs
from gac.schemes.integers.torch import round_matrix
from gac.sensitivity.calibration import CalibrationRun, stream_moments
from gac.sensitivity.methods import Kfac
from gac.sensitivity.text import calibration_windows
from tests.benchmarks.harness import markdown, options, read, write

GROUP = 64
LAYERS = (4, 14, 26)


def main() -> None:
    parser = options(__doc__, "--model", "--calibration", "--output")
    parser.add_argument("--bits", type=int, nargs="*", default=[4, 3, 2])
    asked = parser.parse_args()
    loaded, method = read(asked.model), Kfac()
    windows = calibration_windows(asked.calibration, loaded.tokenizer)
    sites = [site for site in family_of(loaded.model.config).sites(loaded.model.config) if site.layer >= min(LAYERS)]
    run = CalibrationRun(loaded.model, windows.ids, method)
    rows = []
    for layer, moments in stream_moments(run, sites):
        for weight in (one for site in sites if site.layer == layer and layer in LAYERS for one in site.weights):
            matrix = loaded.model.get_submodule(weight.name).weight.detach()
            metric = method.metric(moments.of(weight, method.pooled))
            for bits in asked.bits:
                rows.append({"weight": weight.name, "bits": bits} | errors(matrix, metric, bits, weight.scores))
    write(asked.output, calibration=asked.calibration, group=GROUP, rows=rows)
    names = ("nearest", "improved", "both sides")
    table = [
        (row["weight"], str(row["bits"]), *(f"{row[one] / row['feedback']:.3f}" if one in row else "" for one in names))
        for row in rows
    ]
    print(markdown(("weight", "bits", *names), table))


def errors(matrix: Tensor, metric: Metric, bits: int, both: bool) -> dict[str, float]:
    """``tr(G E A E^T)`` by what rounding knows and does."""

    def lost(inputs: Inputs | None, gradients: Tensor | None = None) -> float:
        rounded = round_matrix(matrix, inputs, bits, GROUP, True, gradients).values(matrix.dtype)
        error = (rounded - matrix).double()
        return float(((metric.gradients @ error @ metric.inputs) * error).sum())

    inputs = Inputs(metric.inputs)
    found = {"nearest": lost(None), "feedback": lost(Inputs(metric.inputs, thorough=False)), "improved": lost(inputs)}
    return found | ({"both sides": lost(inputs, metric.gradients)} if both else {})


if __name__ == "__main__":
    main()
