"""Perplexities that were measured of the model of a plan, from the document that ``gac eval --against`` writes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

from gac.core.display import Table
from gac.core.errors import PlanError
from gac.core.io import to_json
from gac.plan.plan import Plan, TextPrediction

_COMPARED = ("recipe", "measured", "limits", "prediction", "certificate")


@dataclass(frozen=True)
class MeasuredText:
    """Perplexities on a text, of the dense and of the compressed model, which may have been healed."""

    text: str
    dense: float
    compressed: float
    healed: bool = False


def mean_ratio(texts: tuple[MeasuredText, ...]) -> float:
    """The geometric mean over the texts of the compressed model's perplexity / the dense one's."""
    return exp(fmean(log(each.compressed / each.dense) for each in texts))


def read_measured(path: Path, plan: Plan) -> tuple[MeasuredText, ...]:
    """Read the perplexities of the plan's model and of its dense one.

    Raises:
        PlanError: the file is no such document, lacks the dense model, or has no model of this plan.
    """
    expected = "what gac eval MODEL --against DENSE -o FILE wrote, of a model made with this plan"
    remedy = f"Run gac eval small --against {plan.measured.model} -o eval.json."
    ours = _comparable(json.loads(to_json(plan)))
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        dense = _perplexities(document["against"])
        model = next(each for each in document["models"] if _comparable(each.get("plan", {})) == ours)
        healed = bool(model["plan"].get("healed"))
        return tuple(MeasuredText(text, dense[text], value, healed) for text, value in _perplexities(model).items())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as failure:
        raise PlanError(f"measurements {path}, which cannot be used: {failure!r}", expected, remedy) from failure
    except StopIteration as failure:
        raise PlanError(f"measurements {path} of models with other plans", expected, remedy) from failure


def texts_table(plan: Plan, measured: tuple[MeasuredText, ...]) -> Table | None:
    """Predicted and measured losses by text; None where neither is known."""
    predicted = {by.text: by for by in plan.prediction.by_text}
    if measured and not plan.measured.calibration.parts:
        name, total = plan.measured.calibration.text, plan.prediction
        predicted[name] = TextPrediction(name, total.loss, total.dense_perplexity, total.perplexity)
    by_name = {each.text: each for each in measured}
    rows = []
    for name in dict.fromkeys((*by_name, *predicted)):
        known, expected = by_name.get(name), predicted.get(name)
        dense = known.dense if known else expected.dense_perplexity if expected else 0.0
        rows.append(
            (
                Path(name).name,
                f"{dense:,.2f}",
                f"+{expected.loss:.4f}" if expected else "",
                f"+{log(known.compressed / known.dense):.4f}" if known else "",
                f"{known.compressed:,.2f}" if known else "",
                f"{known.compressed / known.dense:.3f}" if known else "",
            )
        )
    if len(measured) > 1:
        rows.append(("geometric mean", "", "", f"+{log(mean_ratio(measured)):.4f}", "", f"{mean_ratio(measured):.3f}"))
    heading = f"predicted loss{' before healing' if any(each.healed for each in measured) else ''}"
    columns = ("text", "<"), ("dense", ">"), (heading, ">"), ("loss", ">"), ("perplexity", ">"), ("ratio", ">")
    return Table(columns, rows) if rows else None


def _comparable(plan: Mapping[str, Any]) -> dict[str, Any]:
    return {name: plan.get(name) for name in _COMPARED}


def _perplexities(model: Mapping[str, Any]) -> dict[str, float]:
    results = (model["perplexity"], *(also["perplexity"] for also in model.get("also", ())))
    return {str(result["text"]): float(result["value"]) for result in results}
