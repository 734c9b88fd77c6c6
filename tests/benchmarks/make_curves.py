"""Write the loss curves that shapes without weights are planned with: SmolLM2's, measured.

    python tests/benchmarks/make_curves.py --calibration wiki-sample:64x1024

With ``wiki-sample:8x512`` about 3 minutes on two CPU cores; statistics that are kept already are read.
"""

import argparse
from pathlib import Path

from reading import measured, read

from gac.sensitivity.curve_library import CurveLibrary

SHIPPED = Path(__file__).parents[2] / "gac" / "sensitivity" / "smollm2_curves.npz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", default="wiki-sample:64x1024")
    parser.add_argument("--output", type=Path, default=SHIPPED)
    asked = parser.parse_args()
    problem = measured(read("smollm2"), asked.calibration, "nvidia-h100-80gb-hbm3", "decode:1@1024")
    library = CurveLibrary.of(
        "SmolLM2-135M-Instruct", "kfac", problem.measured.calibration, problem.sites, problem.curves
    )
    library.save(asked.output)
    print(f"{asked.output}: {asked.output.stat().st_size / 1e3:.0f} kB; {library}")


if __name__ == "__main__":
    main()
