"""Write the loss curves that shapes without weights are planned with: SmolLM2's, measured.

    python tests/benchmarks/make_curves.py --calibration wiki-sample:64x1024

With ``wiki-sample:8x512`` about 3 minutes on two CPU cores; statistics that are kept already are read.
"""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from gac.allocation.problem import Problem
from gac.forms import form_named
from gac.sensitivity.curve_library import LIBRARY_FORMS, CurveLibrary
from tests.benchmarks.harness import OPTIONS, options, problem_of, read

SHIPPED = Path(__file__).parents[2] / "gac" / "sensitivity" / "smollm2_curves.npz"
POINTS = 257


def main() -> None:
    parser = options(__doc__, "--calibration")
    parser.add_argument("--output", type=Path, default=SHIPPED)
    asked = parser.parse_args()
    table = {"profile": OPTIONS["--profile"]["default"], "workloads": ["decode:1@1024"], "forms": LIBRARY_FORMS}
    write(problem_of(read("smollm2"), calibration=asked.calibration, refit="none", **table), asked.output)
    print(f"{asked.output}: {asked.output.stat().st_size / 1e3:.0f} kB; {CurveLibrary.load(asked.output)}")


def write(problem: Problem, path: Path) -> None:
    """Every curve at ``POINTS`` dims in even steps, as one compressed NumPy file."""
    rows: dict[str, list[np.ndarray]] = {}
    fractions: dict[str, float] = {}
    for form in map(form_named, LIBRARY_FORMS):
        for weight in (weight for site in problem.sites for weight in site.weights):
            if curve := problem.curves.of(form, weight):
                key = f"{form.name}/{weight.name.rpartition('.')[2]}"
                fractions[key] = form.params(weight, curve.full) / weight.params
                dims = np.linspace(0, curve.full, POINTS)
                rows.setdefault(key, []).append(np.interp(dims, np.arange(curve.full + 1), curve.loss))
    about = {"model": "SmolLM2-135M-Instruct", "method": "kfac", "fractions": fractions}
    about["calibration"] = asdict(problem.measured.calibration)
    arrays = {key: np.stack(found).astype(np.float32) for key, found in rows.items()}
    np.savez_compressed(path, about=np.array(json.dumps(about)), **arrays)


if __name__ == "__main__":
    main()
