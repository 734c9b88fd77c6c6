"""Rotation of the residual stream and of the values of heads, which removes outlier features.

A model's function stays the same when orthogonal matrices are multiplied into its weights (QuaRot, arXiv 2404.00456;
SpinQuant, arXiv 2405.16406): the residual stream x becomes x R1, the values v of a head become v R2. The gains of the
norms that read the stream are first folded into the weights behind them, for R1 does not commute with gains. Outliers
are then spread over all features, and weights lose less when they are quantised. Nothing is added at run time.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gac.core.errors import ModelError
from gac.core.linalg import orthogonal
from gac.models.attentions import heads_of
from gac.models.basis import Rotation
from gac.models.families import Family, family_of, text_config
from gac.models.plain import check_in_memory
from gac.runtime.storage.embeddings import embeddings_of, unusual

logger = logging.getLogger("gac")

SEED = 0
_ROWS = 2**14  # of an embedding that are in float64 at a time
_NEAR = 0.02  # what a norm in bfloat16 may be off


def rotate(model: PreTrainedModel, seed: int = SEED) -> Rotation:
    """Rotate the residual stream of a dense model (R1) and the values of its heads (R2), in place.

    It is computed in float64, and every weight is stored in its own dtype: the outputs change by no more than that
    rounds. Parameters are replaced and not overwritten. A head that is tied to the embedding becomes a weight of its
    own, for the last norm's gain is folded into it alone; ``config.tie_word_embeddings`` is then False.

    Where a norm with gains lies between o_proj or down_proj and the stream (Gemma 2 and 3, OLMo 2 and 3, EXAONE 4,
    GLM 4), no matrix can pass it: only the values of heads are rotated, and no norm is changed. So it is in multimodal
    models, whose images enter the stream in its own basis. The matrices of one seed are the same on every device.

    Raises:
        ModelError: its norms are no RMSNorm, a weight is offloaded or no plain linear weight, or the embedding is no
            plain one. Nothing is changed.
    """
    rotation = _checked(model)
    generator = torch.Generator().manual_seed(seed)
    config = text_config(model.config)
    basis = orthogonal(config.hidden_size, generator) if rotation.stream else None
    for layer in range(config.num_hidden_layers):
        _rotate_layer(model, layer, basis, orthogonal(heads_of(config).length, generator))
    if basis is not None:
        _rotate_ends(model, basis)
    if rotation.untied:
        model.config.tie_word_embeddings = False
        _tied_names(model).clear()
    logger.info("rotated: %s", rotation)
    return rotation


def untied_by_rotation(model: PreTrainedModel) -> int:
    """Parameters that ``rotate`` adds: those of a tied head, where it turns the residual stream."""
    return _untied(model) if _turns_stream(family_of(model.config)) else 0


def rotates_freely(model: PreTrainedModel) -> bool:
    """True if ``rotate`` accepts the model and adds no parameters."""
    try:
        return not _checked(model).untied
    except ModelError:
        return False


@contextmanager
def rotated(model: PreTrainedModel, keep: bool = False, owned: bool = False) -> Iterator[Rotation]:
    """With a model rotated; it then gets back the very parameters that it had, which are kept in memory meanwhile.

    With ``keep`` it stays rotated, unless something raises. One that is ``owned``, so that nobody else has it, just
    stays rotated, without a second copy of its weights.
    """
    if owned:
        yield rotate(model)
        return
    config: Any = model.config
    before = list(model.named_parameters(remove_duplicate=False))
    tied, names, done = config.tie_word_embeddings, dict(_tied_names(model)), False
    try:
        yield rotate(model)
        done = keep
    finally:
        if not done:
            for name, parameter in before:
                owner, _, last = name.rpartition(".")
                setattr(model.get_submodule(owner), last, parameter)
            config.tie_word_embeddings = tied
            _tied_names(model).update(names)


def _checked(model: PreTrainedModel) -> Rotation:
    """The rotation of a model; nothing is changed yet, and errors are those of ``rotate``."""
    check_in_memory(model, ", with rotate=True", "where it is rotated", ", or leave rotate out")
    family = family_of(model.config)
    if family.experts:
        problem = f"a {type(model).__name__}, a mixture of experts, rotated"
        raise ModelError(
            problem, "one MLP a layer: what routed experts read and write is not turned", "Leave rotate out."
        )
    if not family.is_plain:
        problem = f"a {type(model).__name__}, whose attention has a gate, a norm of values or another kind beside it"
        problem += ", rotated"
        raise ModelError(problem, "attention alone, whose values reach its output as they are", "Leave rotate out.")
    _offset(model, family.last_norm)
    stream = _turns_stream(family)
    for layer in range(text_config(model.config).num_hidden_layers):
        prefix = f"{family.layers}.{layer}."
        for name in (*family.qkv, family.output, *family.up, family.down):
            _plain(model, prefix + name)
        for norm in family.before if stream else ():
            _offset(model, prefix + norm)
    return Rotation(stream, untied_by_rotation(model))


def _turns_stream(family: Family) -> bool:
    return family.norms is None and all(family.before) and not family.inside  # images enter the stream as they are


def _rotate_layer(model: PreTrainedModel, layer: int, basis: Tensor | None, of_values: Tensor) -> None:
    """Multiply R1, where there is one, and R2 into the weights of a decoder layer; each is rounded once."""
    family, heads = family_of(model.config), heads_of(text_config(model.config))
    prefix = f"{family.layers}.{layer}."
    blocks = [*zip(family.before, (family.qkv, family.up), (family.output, family.down), strict=True)]
    names = (*family.qkv, family.output, *family.up, family.down)
    wide = {name: _Wide(_plain(model, prefix + name)) for name in names}
    wide[family.qkv[-1]].turn_outputs(of_values, heads.cached * heads.length)
    wide[family.output].turn_inputs(of_values)
    if basis is not None:
        basis = basis.to(_plain(model, prefix + family.output).weight.device)
        for norm, readers, writer in blocks:
            gain = _folded(model, prefix + norm)
            for name in readers:
                wide[name].turn_inputs(basis, gain)
            wide[writer].turn_outputs(basis)
    for weight in wide.values():
        weight.store()


class _Wide:
    """A linear weight in float64, until it is stored in its own dtype."""

    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear
        self._weight = linear.weight.detach().double()
        self._bias = None if linear.bias is None else linear.bias.detach().double()

    def turn_inputs(self, basis: Tensor, gain: Tensor | None = None) -> None:
        """W diag(gain) R: what it reads comes without the gain, and in the basis; block by block of its size."""
        weight = self._weight if gain is None else self._weight * gain.to(self._weight)
        self._weight = _in_basis(weight, basis)

    def turn_outputs(self, basis: Tensor, last: int | None = None) -> None:
        """R^T W and R^T b: what it writes is in the basis; the last outputs alone where their number is given."""
        first = len(self._weight) - (last or len(self._weight))
        self._weight = torch.cat([self._weight[:first], _in_basis(self._weight[first:].T, basis).T])
        if self._bias is not None:
            self._bias = torch.cat([self._bias[:first], _in_basis(self._bias[first:], basis)])

    def store(self) -> None:
        _store(self._linear, "weight", self._weight)
        if self._bias is not None:
            _store(self._linear, "bias", self._bias)


def _in_basis(values: Tensor, basis: Tensor) -> Tensor:
    blocks = values.reshape(*values.shape[:-1], -1, len(basis))
    return (blocks @ basis.to(values)).flatten(-2)


def _store(module: nn.Module, name: str, values: Tensor) -> None:
    before: Any = getattr(module, name)
    setattr(module, name, nn.Parameter(values.to(before.dtype).contiguous(), before.requires_grad))


def _untied(model: PreTrainedModel) -> int:
    """Parameters of the head where it is tied to the embedding, and rotated is a weight of its own; else 0."""
    for name, module in embeddings_of(model).items():
        if said := unusual(module):
            problem = f"{name} is {said}, with rotate=True"
            raise ModelError(problem, "a plain embedding and a linear head", "Leave rotate out for this model.")
    causal_lm: Any = model
    matrix: Tensor = causal_lm.get_output_embeddings().weight
    return matrix.numel() if matrix is causal_lm.get_input_embeddings().weight else 0


def _rotate_ends(model: PreTrainedModel, basis: Tensor) -> None:
    causal_lm: Any = model
    embedding, head = causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()
    gain = _folded(model, family_of(model.config).last_norm)
    _store(head, "weight", _by_rows(head.weight, lambda rows: _in_basis(rows * gain.to(rows), basis)))
    _store(embedding, "weight", _by_rows(embedding.weight, lambda rows: _in_basis(rows, basis)))


def _by_rows(weight: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.cat([change(rows.double()).to(weight.dtype) for rows in torch.split(weight.detach(), _ROWS)])


def _plain(model: PreTrainedModel, name: str) -> nn.Linear:
    module = model.get_submodule(name)
    if type(module) is not nn.Linear or not module.weight.is_floating_point():
        problem = f"{name} is a {type(module).__name__}, with rotate=True"
        raise ModelError(problem, "plain linear weights", "Merge adapters and dequantise first, or leave rotate out.")
    return module


def _offset(model: PreTrainedModel, norm: str) -> float:
    """The offset between the weight of an RMSNorm and its gain: 0, or 1 (Gemma). Found by running it."""
    module: Any = attrgetter(norm)(model)  # None in an OPT that was made without its last norm
    weight = getattr(module, "weight", None)
    if weight is not None and getattr(module, "bias", None) is None:
        x = torch.linspace(0.5, 1.5, len(weight), device=weight.device, dtype=weight.dtype)
        with torch.no_grad():
            y = module(x[None]).double()[0]
        normed = x.double() / x.double().square().mean().sqrt()
        for offset in (0.0, 1.0):
            if torch.allclose(y, normed * (offset + weight.detach().double()), rtol=_NEAR, atol=_NEAR):
                return offset
    raise ModelError(
        f"{norm} is a {type(module).__name__}, with rotate=True",
        "an RMSNorm: one that takes away the mean of the features depends on their basis",
        "Leave rotate out for this model.",
    )


def _folded(model: PreTrainedModel, norm: str) -> Tensor:
    module, offset = model.get_submodule(norm), _offset(model, norm)
    weight: Any = module.weight
    gain: Tensor = offset + weight.detach().double()
    _store(module, "weight", torch.full_like(gain, 1 - offset))
    return gain


def _tied_names(model: PreTrainedModel) -> dict[str, str]:
    names: dict[str, str] = model.all_tied_weights_keys
    return names
