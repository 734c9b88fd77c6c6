"""Peers that round weights to few bits, on the same weights and text as GAC's plans: perplexity over dense.

    python tests/benchmarks/peers_rounding.py --model rotated --output peers-rounding.json

Every peer comes from its own package and rounds all decoder linears, in groups of columns with a scale and a zero
point. Embeddings and head stay as they are, and norms but for the factors that AWQ moves into them. What is not said
here is the package's default.

- ``llmcompressor RTN``, ``GPTQ``, ``AWQ``: ``oneshot`` with ``QuantizationModifier``, ``GPTQModifier``, and
  ``AWQModifier`` before the first. ``RTN mse`` and ``GPTQ mse`` search the scales (observer ``mse``);
- ``hqq HQQ``: ``HQQLinear``; it sees no text. Where groups do not fit a row, they go on in the next row;
- ``autoawq AWQ``: ``quantize`` of the model's class, which searches what to clip too, rounded by its quantizer.

Both AWQ need a GPU: on a CPU the one fails and the other returns wrong weights.
All but ``hqq`` refuse a weight whose columns are not a multiple of the group, as SmolLM2's 576 are not of 128.
``gptqmodel`` is not here: it has no wheel, and needs ``pypcre``, a C extension that has none either.

Calibrated peers see the windows that GAC sees. What a package gives is read back into the dense model and measured
there, in the model's dtype. Columns of a row:

- ``bits`` of a weight, with scales and zero points: 16 for a scale, as checkpoints in 16 bits hold it, and a zero point
  as long as the package's format has it (HQQ's: 16, others': like a number). llmcompressor and autoawq keep scales in
  the model's dtype here, which for float32 is finer than that;
- ``memory``: ``bits`` over 16, a limit for ``gac.allocate``; ``bytes``: of all rounded weights;
- ``levels``: how many values the fullest group has, no more than ``2 ** bits``; 0 where groups do not fit the rows;
- ``ratio``: perplexity over dense.

A peer that is not installed or refuses the model is a row with its ``error``. The same command goes on where it
stopped, and tries those rows again. The packaged SmolLM2's weights come from 4 bits, so rotated ones are to be given.
"""

import contextlib
import copy
import importlib.metadata
import io
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from gac.core.errors import first_line
from gac.measurement.text import calibration_windows
from gac.models.families import family_of
from gac.models.linears import linear_at
from tests.benchmarks.harness import OF_A_STUDY, Study, options

SCALE = 16
"""Bits of a scale."""
AT_ONCE = 10
"""Windows that llmcompressor runs at once."""


@dataclass(frozen=True, eq=False)
class Task:
    """What a package is given.

    Attributes:
        model: a copy of the dense model, which it may change; ``name_or_path`` is a directory with its files.
        names: of the weights that are rounded.
        tokenizer: of the model.
        ids: calibration windows, shape ``(windows, length)``.
        bits: of a number.
        group: columns of a group.
    """

    model: Any
    names: Sequence[str]
    tokenizer: Any
    ids: Tensor
    bits: int
    group: int


Values = dict[str, Tensor]
"""Parameters by name, rounded ones as their values: at least those that are no longer as they were."""


@dataclass(frozen=True)
class Peer:
    """A method of a package.

    Attributes:
        packages: whose versions count, the method's own first.
        values: does it.
        zero: bits of a zero point; None where they are a number's.
        across: whether a group goes on in the next row where it does not fit.
    """

    packages: tuple[str, ...]
    values: Callable[[Task], Values]
    zero: int | None = None
    across: bool = False

    def size(self, weight: Tensor, bits: int, group: int) -> int:
        """Bits of a weight with its scales and zero points."""
        groups = weight.numel() // group if self.across else len(weight) * -(-weight.shape[1] // group)
        return weight.numel() * bits + groups * (SCALE + (bits if self.zero is None else self.zero))


def main() -> None:
    parser = options(__doc__, *OF_A_STUDY)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--bits", type=int, nargs="*", default=[4, 3])
    parser.add_argument("--groups", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--seconds", type=float, default=math.inf, help="no row is begun after that")
    parser.set_defaults(calibration="wiki-sample:190x1024")
    begun, asked = time.monotonic(), parser.parse_args()
    study = Rounded(asked)
    with study.saved() as folder:
        for bits, group, name in product(asked.bits, asked.groups, asked.peers):
            if time.monotonic() - begun > asked.seconds:
                print(f"stopped before {name} with {bits} bits in groups of {group}: {asked.seconds:.0f} s are over")
                return
            study.rounded(name, bits, group, folder)


class Rounded(Study):
    """A study of the dense model with weights as peers round them."""

    def __init__(self, asked: Any) -> None:
        super().__init__(asked)
        self._ids = calibration_windows(asked.calibration, self.loaded.tokenizer).ids
        sites = family_of(self.loaded.model.config).sites(self.loaded.model.config)
        self._names = [weight.name for site in sites for weight in site.weights]

    @contextlib.contextmanager
    def saved(self) -> Iterator[str]:
        """A directory with the dense model, which packages read by themselves."""
        with TemporaryDirectory() as folder:
            with contextlib.redirect_stderr(io.StringIO()):  # the writer's progress bar knows no switch
                self.loaded.model.save_pretrained(folder)
            self.loaded.tokenizer.save_pretrained(folder)
            yield folder

    def rounded(self, name: str, bits: int, group: int, folder: str) -> None:
        """A row, unless there is one without an error."""
        labels, peer, begun = {"peer": name, "bits a number": bits, "group": group}, PEERS[name], time.monotonic()
        before = [row for row in self.rows if all(row[key] == value for key, value in labels.items())]
        if any("error" not in row for row in before):
            return
        self.rows[:] = [row for row in self.rows if row not in before]
        torch.manual_seed(0)
        model = copy.deepcopy(self.loaded.model)
        model.config.name_or_path = model.name_or_path = folder
        task = Task(model, self._names, self.loaded.tokenizer, self._ids, bits, group)
        try:
            labels["versions"] = {package: importlib.metadata.version(package) for package in peer.packages}
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                values = peer.values(task)
            found = self._of_values(values, task, peer)
        except Exception as failure:  # noqa: BLE001  # whatever a package raises is what the row says
            found = {"error": f"{type(failure).__name__}: {first_line(failure)}"}
        del model, task
        torch.cuda.empty_cache()
        self.keep(labels | found | {"seconds": time.monotonic() - begun})

    def _of_values(self, values: Values, task: Task, peer: Peer) -> dict[str, Any]:
        model = copy.deepcopy(self.loaded.model)
        own = dict(model.named_parameters())
        with torch.no_grad():
            for name in own.keys() & values.keys():  # a package may have added some
                own[name].copy_(values[name])
        weights = [linear_at(model, name).weight for name in task.names]
        params = sum(weight.numel() for weight in weights)
        size = sum(peer.size(weight, task.bits, task.group) for weight in weights)
        return {
            "bits": size / params,
            "memory": size / (16 * params),
            "bytes": -(-size // 8),
            "levels": max(fullest(weight, task.group) for weight in weights),
        } | self.quality(model)


def fullest(weight: Tensor, group: int) -> int:
    """How many values there are in the group that has most; 0 where groups do not fit the rows.

    Values are apart that differ by more than rounding in float32 or the weight's dtype does.
    """
    if weight.shape[1] % group:
        return 0
    ordered = weight.detach().float().reshape(-1, group).sort(dim=1).values
    least = (ordered[:, -1:] - ordered[:, :1]) * 1e-3
    return int(((ordered[:, 1:] - ordered[:, :-1]) > least).sum(1).max()) + 1


def llmcompressor(task: Task, kind: str, observer: str | None = None) -> Values:
    """``oneshot`` of a model in memory."""
    from compressed_tensors.quantization import forward_quantize
    from torch.utils.data import DataLoader

    package = importlib.import_module("llmcompressor")
    weights = {"num_bits": task.bits, "type": "int", "symmetric": False, "strategy": "group", "group_size": task.group}
    weights |= {"observer": observer} if observer else {}
    scheme = {"config_groups": {"all": {"targets": list(task.names), "weights": weights}}}
    quantization = importlib.import_module("llmcompressor.modifiers.quantization")
    recipes: dict[str, Callable[[], list[Any]]] = {
        "RTN": lambda: [quantization.QuantizationModifier(**scheme)],
        "GPTQ": lambda: [importlib.import_module("llmcompressor.modifiers.gptq").GPTQModifier(**scheme)],
        "AWQ": lambda: [
            importlib.import_module("llmcompressor.modifiers.transform.awq").AWQModifier(),
            quantization.QuantizationModifier(**scheme),
        ],
    }
    windows: Any = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in task.ids]
    text = None if kind == "RTN" else DataLoader[Any](windows, batch_size=AT_ONCE)
    package.oneshot(model=task.model, processor=task.tokenizer, dataset=text, recipe=recipes[kind]())
    values = dict(task.model.named_parameters())
    for name in task.names:
        module = task.model.get_submodule(name)
        values[f"{name}.weight"] = forward_quantize(module, module.weight, "weight", module.quantization_scheme.weights)
    return values


def autoawq(task: Task) -> Values:
    if task.model.device.type == "cpu":  # where ``.cpu()``, from which its search restores, is no copy
        raise RuntimeError("autoawq scales weights wrongly on a CPU")
    model_type = task.model.config.model_type
    of_type = importlib.import_module("awq.models.auto").AWQ_CAUSAL_LM_MODEL_MAP[model_type]
    awq = of_type(task.model, model_type, False, task.model.config, None, None)
    awq.quantize(
        task.tokenizer,
        {"zero_point": True, "q_group_size": task.group, "w_bit": task.bits, "version": "GEMM"},
        calib_data=task.ids.tolist(),
        export_compatible=True,
        max_calib_samples=len(task.ids),
        max_calib_seq_len=task.ids.shape[1],
    )
    values = dict(task.model.named_parameters())
    for name in task.names:
        weight = task.model.get_submodule(name).weight.data
        values[f"{name}.weight"] = awq.quantizer.pseudo_quantize_tensor(weight)[0]
    return values


def hqq(task: Task) -> Values:
    package = importlib.import_module("hqq.core.quantize")
    values: Values = {}
    for name in task.names:
        linear = task.model.get_submodule(name)
        config = package.BaseQuantizeConfig(nbits=task.bits, group_size=task.group)
        held = package.HQQLinear(linear, config, del_orig=False, device=str(linear.weight.device))
        values[f"{name}.weight"] = held.dequantize()
    return values


_LLMCOMPRESSOR = ("llmcompressor", "compressed-tensors")
PEERS: Mapping[str, Peer] = {
    "llmcompressor RTN": Peer(_LLMCOMPRESSOR, partial(llmcompressor, kind="RTN")),
    "llmcompressor RTN mse": Peer(_LLMCOMPRESSOR, partial(llmcompressor, kind="RTN", observer="mse")),
    "llmcompressor GPTQ": Peer(_LLMCOMPRESSOR, partial(llmcompressor, kind="GPTQ")),
    "llmcompressor GPTQ mse": Peer(_LLMCOMPRESSOR, partial(llmcompressor, kind="GPTQ", observer="mse")),
    "llmcompressor AWQ": Peer(_LLMCOMPRESSOR, partial(llmcompressor, kind="AWQ")),
    "hqq HQQ": Peer(("hqq",), hqq, zero=SCALE, across=True),
    "autoawq AWQ": Peer(("autoawq",), autoawq),
}


if __name__ == "__main__":
    main()
