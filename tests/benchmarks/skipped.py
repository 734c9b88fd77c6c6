"""What the cheapest skipped blocks lose: the divergence beside what text loses, and what a scaled copy would add.

    python tests/benchmarks/skipped.py --windows 48 --output skipped.json

Each block is left out by itself, a constant in its place, on calibration windows and on others. ``explained`` is the
part of what the block writes that its input says feature by feature, by least squares on the calibration windows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gac.forms import form_named
from gac.forms.tensors import RunForm, joint_weights, tensors_of
from gac.measurement import runs
from gac.measurement.calibration import decoder_layers
from gac.measurement.runs import ModelRuns
from gac.measurement.text import calibration_windows, evaluation_windows
from gac.models.families import family_of
from gac.models.loading import load_model
from gac.models.modules import input_device, listening
from gac.models.sites import Weight
from tests.benchmarks.harness import options, write

SKIP = form_named("skip")


def main() -> None:
    parser = options(__doc__, "--model", "--windows", "--output")
    parser.add_argument("--blocks", type=int, default=6, help="the cheapest; what they lose is found on 4 windows")
    parser.set_defaults(windows=48)
    asked = parser.parse_args()
    loaded = load_model(asked.model)
    layers: dict[int, list[Weight]] = {}
    for site in family_of(loaded.model.config).sites(loaded.model.config):
        layers.setdefault(site.layer, []).extend(site.weights)
    texts = {
        "calibration": calibration_windows(f"wiki-sample:{asked.windows}x1024", loaded.tokenizer).ids,
        "other text": evaluation_windows("wiki-sample", loaded.tokenizer, asked.windows).ids,
    }
    blocks = [together for of_layer in layers.values() for together in joint_weights(SKIP, of_layer)]
    few = measured(loaded.model, layers, texts["calibration"], blocks)
    blocks.sort(key=lambda block: few[block[-1].name]["divergence"])
    del blocks[asked.blocks :]
    runs.TOKENS = asked.windows * 1024
    found = {name: measured(loaded.model, layers, ids, blocks) for name, ids in texts.items()}
    rows: list[dict[str, Any]] = []
    for block in blocks:
        row = {"block": block[-1].name, "explained": explained(loaded.model, texts["calibration"], block)}
        rows.append(row | {name: losses[block[-1].name] for name, losses in found.items()})
        print(rows[-1], flush=True)
    write(asked.output, rows=rows)


def measured(
    model: Any, layers: Mapping[int, Sequence[Weight]], ids: Tensor, blocks: Sequence[Sequence[Weight]]
) -> dict[str, dict[str, float]]:
    """Of each block, by the weight through which it writes: the divergence, what text loses, and its standard error."""
    seen = ModelRuns(model, decoder_layers(model, layers), ids, [weight for block in blocks for weight in block])
    tensors, found = tensors_of(SKIP), {}
    assert isinstance(tensors, RunForm)
    for block in blocks:
        of_windows = seen.measured(tensors.modules(seen, block)).double()
        mean, error = of_windows.mean(0).tolist(), (of_windows.std(0) / len(of_windows) ** 0.5).tolist()
        found[block[-1].name] = {"divergence": mean[0], "text": mean[1], "error": error[1]}
    return found


def explained(model: Any, ids: Tensor, block: Sequence[Weight]) -> float:
    """The part of the variance of what it writes that lies on its input, each feature by itself."""
    sums: dict[str, Tensor] = {}

    def hear_input(_module: Any, given: Any, _found: Any) -> None:
        sums["last"] = given[0].double().flatten(0, -2)

    def hear_output(_module: Any, _given: Any, found: Tensor) -> None:
        x, y = sums["last"], found.double().flatten(0, -2)
        for name, value in {"x": x, "y": y, "xx": x * x, "xy": x * y, "yy": y * y}.items():
            sums[name] = sums.get(name, 0) + value.mean(0) / len(ids)

    with torch.no_grad(), listening(model, {block[0].name: hear_input, block[-1].name: hear_output}):
        for window in ids:
            model(input_ids=window.to(input_device(model))[None], use_cache=False)
    spread = {pair: sums[pair] - sums[pair[0]] * sums[pair[1]] for pair in ("xx", "xy", "yy")}
    return float((spread["xy"] ** 2 / spread["xx"]).sum() / spread["yy"].sum())


if __name__ == "__main__":
    main()
