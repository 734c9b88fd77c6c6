"""Write the loss curves that shapes without weights are planned with: SmolLM2's, measured.

    python tests/benchmarks/make_curves.py --calibration wiki-sample:64x1024
    python tests/benchmarks/make_curves.py --rounded rotated-smollm2 --calibration wiki-sample:16x1024
    python tests/benchmarks/make_curves.py --head rotated-smollm2 --calibration wiki-sample:16x1024
    python tests/benchmarks/make_curves.py --latents smollm2 --calibration wiki-sample:8x512

The second adds what rounding costs, on the model off its grid (``rotated.py``), and leaves the curves as they are; the
third likewise what rounding embedding and head costs, and the fourth what latents in the KV cache lose. On two CPU
cores the first takes about 3 minutes with ``wiki-sample:8x512``, the second 20 with ``wiki-sample:16x1024``, the third
one, the fourth 5. Statistics that are kept already are read.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from gac.allocation.problem import Problem
from gac.forms import form_named
from gac.forms.curvature.methods import Kfac
from gac.forms.loss_curves import LossCurve
from gac.measurement.calibration import CalibrationRun
from gac.measurement.curves import measure_curves
from gac.measurement.embeddings import measure_head
from gac.measurement.text import calibration_windows
from gac.models.families import family_of
from gac.models.loading import Loaded, load_model
from gac.schemes import scheme_named
from gac_extensions.lab.shapes.curve_library import HEAD, LATENTS, LIBRARY_FORMS, PRICE, CurveLibrary
from tests.benchmarks.harness import OPTIONS, options, problem_of

SHIPPED = Path(__file__).parents[2] / "gac_extensions" / "lab" / "shapes" / "smollm2_curves.npz"
POINTS = 257
FEW_POINTS = 17
LATENT = "latent"
"""What the names of their curves begin with."""
ROUNDED_HEAD = "w8a16"
ROUNDED = ("fp8", "w8a8", "w8a16", "w4a16", "w4a16:64", "w3a16", "w2a16")
LAYERS = 7
"""Layers of which prices are measured, in even steps."""


def main() -> None:
    parser = options(__doc__, "--calibration")
    parser.add_argument("--rounded", help="a model off its grid, of which prices of rounding are added")
    parser.add_argument("--head", help="a model off its grid, of which the price of a rounded head is added")
    parser.add_argument("--latents", help="a model of which the curves of latents are added")
    parser.add_argument("--output", type=Path, default=SHIPPED)
    asked = parser.parse_args()
    if asked.rounded:
        add_prices(load_model(asked.rounded), asked.calibration, asked.output)
    elif asked.head:
        add_head(load_model(asked.head), asked.calibration, asked.output)
    elif asked.latents:
        found, _ = rows_of(measured(asked.latents, asked.calibration, LATENTS), LATENTS)
        add(asked.output, LATENT, {key.removeprefix(LATENT): rows for key, rows in found.items()})
    else:
        write(measured("smollm2", asked.calibration, LIBRARY_FORMS), asked.output)
    print(f"{asked.output}: {asked.output.stat().st_size / 1e3:.0f} kB; {CurveLibrary.load(asked.output)}")


def measured(model: str, calibration: str, forms: Sequence[str]) -> Problem:
    """The curves of these forms; nothing is looked up in the table."""
    given = {"profile": OPTIONS["--profile"]["default"], "workloads": ["decode:1@1024"], "refit": "none"}
    return problem_of(load_model(model), calibration=calibration, forms=forms, **given)


def add_prices(loaded: Loaded, calibration: str, path: Path) -> None:
    """What rounding costs some layers: a dense weight, and a pair beyond what it loses, at few dims."""
    config = loaded.model.config
    layers = {round(at) for at in np.linspace(0, config.num_hidden_layers - 1, LAYERS)}
    sites = [site for site in family_of(config).sites(config) if site.layer in layers]
    windows = calibration_windows(calibration, loaded.tokenizer).ids
    curves = measure_curves(CalibrationRun(loaded.model, windows, Kfac()), sites, schemes=ROUNDED).curves
    dense, pair = form_named("dense"), form_named("low_rank")
    rows: dict[str, list[np.ndarray]] = {}
    for weight in (weight for site in sites for weight in site.weights):
        called, exact = weight.name.rpartition(".")[2], _loss(curves.of(pair, weight))
        dims = np.linspace(0, len(exact) - 1, FEW_POINTS)
        for scheme in ROUNDED:
            rows.setdefault(f"{scheme}/{called}", []).append(_loss(curves.of(dense, weight, scheme))[-1:])
            price = _loss(curves.of(pair, weight, scheme)) - exact
            by_dim = np.interp(dims, np.arange(len(exact)), price)
            rows.setdefault(f"{scheme}/{pair.name}/{called}", []).append(by_dim)
    add(path, PRICE, {key: np.stack(found) for key, found in rows.items()})


def add_head(loaded: Loaded, calibration: str, path: Path) -> None:
    """What rounding embedding and head costs the whole model."""
    run = CalibrationRun(loaded.model, calibration_windows(calibration, loaded.tokenizer).ids, Kfac())
    head = measure_head(run, loaded.model, scheme_named(ROUNDED_HEAD))
    add(path, HEAD, {ROUNDED_HEAD: np.array(head.loss)})


def add(path: Path, kind: str, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays into a library, in the place of those of their kind."""
    with np.load(path) as before:
        held = {key: before[key] for key in before.files if not key.startswith(kind)}
    np.savez_compressed(path, **held, **{kind + key: found.astype(np.float32) for key, found in arrays.items()})


def _loss(curve: LossCurve | None) -> np.ndarray:
    assert curve is not None
    return curve.loss


def rows_of(problem: Problem, forms: Sequence[str]) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Every curve at no more than ``POINTS`` dims in even steps, and the kept fraction of parameters at the last."""
    rows: dict[str, list[np.ndarray]] = {}
    fractions: dict[str, float] = {}
    for form in map(form_named, forms):
        for weight in (weight for site in problem.sites for weight in site.weights):
            if curve := problem.curves.of(form, weight):
                key = f"{form.name}/{weight.name.rpartition('.')[2]}"
                if form.cache.axis(weight) is None:
                    fractions[key] = form.params(weight, curve.full) / weight.params
                points = POINTS if form.cache.axis(weight) is None else min(POINTS, curve.full + 1)
                dims = np.linspace(0, curve.full, points)
                rows.setdefault(key, []).append(np.interp(dims, np.arange(curve.full + 1), curve.loss))
    return {key: np.stack(found) for key, found in rows.items()}, fractions


def write(problem: Problem, path: Path) -> None:
    """A library of them, as one compressed NumPy file."""
    rows, fractions = rows_of(problem, LIBRARY_FORMS)
    about = {"model": "SmolLM2-135M-Instruct", "method": "kfac", "fractions": fractions}
    about["calibration"] = asdict(problem.measured.calibration)
    arrays = {key: found.astype(np.float32) for key, found in rows.items()}
    np.savez_compressed(path, about=np.array(json.dumps(about)), **arrays)


if __name__ == "__main__":
    main()
