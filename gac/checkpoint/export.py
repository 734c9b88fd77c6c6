"""A compressed model as one of its stock architecture, for tools that know nothing of GAC."""

import copy
import logging
from collections import defaultdict
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.pytorch_utils import Conv1D

from gac.checkpoint.card import export_card
from gac.checkpoint.layout import layout_of, without
from gac.checkpoint.load import load
from gac.checkpoint.planned import planned
from gac.checkpoint.target import check_free, complete_directory, save_tokenizer
from gac.compression.apply import merged
from gac.core.errors import CheckpointError
from gac.forms import form_named
from gac.forms.planned_sites import targeted_sites
from gac.models.families import family_of, text_config
from gac.models.linears import as_linear
from gac.models.plain import check_in_memory
from gac.models.threads import entry_point
from gac.plan.plan import Plan, WeightChoice
from gac.runtime.contract import COMPRESSED, LAYOUT, QUANTIZATION
from gac.runtime.storage.embeddings import embeddings_of
from gac.runtime.storage.modules import Stored, plain_state
from gac.schemes import scheme_named

logger = logging.getLogger("gac")
_REMEDY = "Export it without compressed_tensors, in the model's dtype; or open the checkpoint as it is."


@entry_point()
def export(
    model: PreTrainedModel | str | Path,
    directory: str | Path,
    *,
    merge: bool = False,
    compressed_tensors: bool = False,
    deci: bool = False,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
) -> None:
    """Write a compressed model as one of its stock architecture, which needs no GAC and no code.

    The directory appears whole or not at all.

    Args:
        model: from ``compress`` or ``load``, or the directory of one.
        merge: multiply low-rank pairs out and fill with zeros what was shortened, up to the dense dims: the same
            function up to rounding, neither smaller nor faster than the dense model. False keeps the dims, which a
            stock config can say only where MLPs alone are narrower, by as much in every layer, and every layer has as
            many experts, as wide.
        compressed_tensors: leave weights of few bits as they are, with a ``quantization_config`` that transformers
            reads where compressed-tensors is installed, and vLLM; embedding and head are written in the model's dtype
            all the same. False writes all in the model's dtype.
        deci: write a Llama, Mistral or Qwen2 with narrower MLPs, fewer key-value heads or skipped blocks as DeciLM,
            whose layers may differ. vLLM has the model, and needs a class for its config (docs/checkpoints.md);
            transformers does not open it. Of ``merge``, ``compressed_tensors`` and ``deci`` at most one.
        tokenizer: None looks for the model's own.

    Raises:
        CheckpointError: there is no such model, the config cannot say its dims, a stock layer has no bias for what
            a skipped block adds, compressed-tensors has no format for a weight, or the directory cannot be written or
            is in use.
        ModelError: a weight is not in memory.
    """
    (loaded, plan), target = opened(model), Path(directory)
    options = {"merge": merge, "compressed_tensors": compressed_tensors, "deci": deci}
    ways = [name for name, value in options.items() if value]
    if len(ways) > 1:
        raise CheckpointError(
            " and ".join(ways), "one of them: each writes the weights in another way", "Leave one out."
        )
    multimodal = bool(family_of(loaded.config).inside)
    if deci and multimodal:
        remedy = "Export it merged (--merge, merge=True)."
        raise CheckpointError(f"a {type(loaded).__name__} as DeciLM", "a language model alone", remedy)
    if deci:
        decilm = resolve_name("gac_extensions.deci:deci_model")(loaded, plan)
        plain, state = decilm.empty(), decilm.state
    else:
        plain = stock_model(loaded, plan, merge)
        if compressed_tensors:
            setattr(plain.config, QUANTIZATION, _layout(loaded, plain, plan))
        state = _state(loaded, plain, plan, merge, compressed_tensors)
    check_free(target)
    with complete_directory(target) as part:
        plain.generation_config = loaded.generation_config
        plain.save_pretrained(part, state_dict=state)
        save_tokenizer(part, tokenizer, str(loaded.config.name_or_path), multimodal)
        (part / "README.md").write_text(export_card(plan, *ways), encoding="utf-8")


def opened(model: PreTrainedModel | str | Path) -> tuple[Any, Plan]:
    """A compressed model in memory, with its plan."""
    loaded: Any = load(model) if isinstance(model, str | Path) else model
    plan = planned(loaded)
    check_in_memory(loaded)
    return loaded, plan


def _fewer_experts(stock: Any, plan: Plan, merge: bool) -> None:
    """Make the experts of a stock config as many, and as wide, as the plan's; a CheckpointError if it cannot say so."""
    changed = [choice for choice in plan.weights if choice.weight.is_routed and choice.changed]
    if not changed:
        return
    stacks = [choice for choice in plan.weights if choice.weight.experts]
    sizes = [choice.expert_sizes for choice in stacks]
    if merge or len({*sizes}) > 1:
        least, most = min(sizes), max(sizes)
        differ = f"{stacks[sizes.index(least)].name} has {least[0]} experts of {least[1]} neurons, "
        differ += f"{stacks[sizes.index(most)].name} {most[0]} of {most[1]}"
        problem = f"{changed[0].description}, to be merged" if merge else differ
        expected = "a plan that a stock config can say: as many experts, as wide, in every layer"
        remedy = "Open the checkpoint as it is, or plan with same_count=True (--same-count)."
        raise CheckpointError(problem, expected, remedy)
    experts, config = family_of(stock).experts, text_config(stock)
    assert experts is not None, "the plan has weights of experts"
    for key, size in zip((experts.count, experts.width), sizes[0], strict=True):
        setattr(config, key, size)


def stock_model(model: Any, plan: Plan, merge: bool) -> Any:
    """The stock model that a compressed one is written as: its config, its names and its shapes, without values."""
    config = copy.deepcopy(model.config)
    config.model_type = config.model_type.removeprefix(COMPRESSED)
    config.__class__ = CONFIG_MAPPING[config.model_type]
    del config.gac, config.auto_map
    vars(config).pop(LAYOUT, None)
    _fewer_experts(config, plan, merge)
    if merge:
        logger.warning("a merged model has the dense model's dims: it is neither smaller nor faster")
    else:
        _narrow_neurons(config, plan)
    dense = next(base for base in type(model).__mro__ if base.__module__.startswith("transformers."))
    with torch.device("meta"):
        config.dtype = model.dtype  # transformers writes its name there when it saves, and then cannot read it
        return dense(config).to(model.dtype)


def unchanged_state(model: PreTrainedModel, plan: Plan) -> dict[str, Tensor]:
    """Parameters, by name, of all but the weights that the plan changes; embedding and head in the model's dtype."""
    changed = tuple(f"{choice.name}." for choice in plan.weights if choice.changed)
    return plain_state(model, model.dtype, changed)


def weight_state(model: PreTrainedModel, plain: nn.Module, choice: WeightChoice, merge: bool) -> dict[str, Tensor]:
    """Parameters, by name, of one weight that the plan changes, in the stock model's layout and the model's dtype."""
    stock = plain.get_submodule(choice.name)
    local = plain_state(model.get_submodule(choice.name), model.dtype)
    if merge:
        local = _as_stock(choice, merged(choice, local), as_linear(stock))
    if isinstance(stock, Conv1D):
        local["weight"] = local["weight"].T
    return {f"{choice.name}.{name}": value.contiguous() for name, value in local.items()}


def _state(model: Any, plain: Any, plan: Plan, merge: bool, as_stored: bool) -> dict[str, Tensor]:
    state = unchanged_state(model, plan) | (_stored_state(model, plan) if as_stored else {})
    for choice in filter(attrgetter("changed"), plan.weights):
        if not (as_stored and isinstance(model.get_submodule(choice.name), Stored)):
            state |= weight_state(model, plain, choice, merge)
    return state


def _stored_state(model: Any, plan: Plan) -> dict[str, Tensor]:
    """Tensors, by name, of weights of few bits; those of one block together, since engines join some of them."""
    blocks: dict[tuple[str, str], dict[str, Stored]] = defaultdict(dict)  # by name and scheme
    state: dict[str, Tensor] = {}
    for choice in plan.weights:
        if isinstance(module := model.get_submodule(choice.name), Stored):
            blocks[choice.name.rpartition(".")[0], choice.scheme][choice.name] = module
    for (block, _), modules in blocks.items():
        storage = next(iter(modules.values())).storage
        try:
            exported = storage.exported([module.tensors for module in modules.values()])
        except ValueError as failure:
            raise CheckpointError(f"{block}: {failure}", "scales that are nearer", _REMEDY) from failure
        for (name, module), tensors in zip(modules.items(), exported, strict=True):
            tensors_of = module.state_dict() | tensors
            state |= {f"{name}.{key}": value.detach() for key, value in tensors_of.items()}
    return state


def _layout(model: Any, plain: nn.Module, plan: Plan) -> dict[str, Any]:
    layout = layout_of(model, plan, exported=True) or {"config_groups": {}}
    readable = {target for group in layout["config_groups"].values() for target in group["targets"]}
    stored = [weight for weight in plan.weights if isinstance(model.get_submodule(weight.name), Stored)]
    if not stored:
        value = f"a plan in {', '.join(sorted({weight.scheme for weight in plan.weights}))}"
        raise CheckpointError(value, "weights of few bits", "Export it without compressed_tensors.")
    for choice in stored:
        kind, columns = type(plain.get_submodule(choice.name)), choice.weight.in_features
        if choice.name in readable and kind is nn.Linear:
            continue
        expected = "an nn.Linear" if choice.name in readable else "a scheme that compressed-tensors has"
        if scheme_named(choice.scheme).ragged(columns):
            expected = "groups that divide the columns"
        raise CheckpointError(
            f"{choice.name} in {choice.scheme}, a {kind.__name__} of {columns} columns", expected, _REMEDY
        )
    return without(layout, embeddings_of(model))


def _narrow_neurons(stock: Any, plan: Plan) -> None:
    """Make the MLPs of a stock config as wide as the plan's; a CheckpointError if it cannot say the plan's dims."""
    family = family_of(stock)
    widths = [choice.module.sizes["in_features"] for choice in plan.weights if choice.weight.neurons == "in"]
    if family.neurons and not family.experts:
        setattr(text_config(stock), family.neurons, widths[0])
    sites = targeted_sites(stock, plan.recipe.space.forms)
    dense = {weight.name: weight for site in sites for weight in site.weights}
    for choice in (choice for choice in plan.weights if not choice.weight.is_routed):
        expected = form_named("dense").module(dense[choice.name], 0)
        if choice.module != expected:
            uneven = choice.weight.neurons and choice.module.module == expected.module and len({*widths}) > 1
            raise CheckpointError(
                f"MLPs of {min(widths)} to {max(widths)} neurons" if uneven else choice.description,
                "a plan that a stock config can say: fewer neurons, as many in every layer, and no more",
                "Export it merged (--merge, merge=True), with the dense dims; or open the checkpoint as it is.",
            )


def _as_stock(choice: WeightChoice, local: Mapping[str, Tensor], stock: nn.Module) -> dict[str, Tensor]:
    zeros = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in stock.state_dict().items()}
    if not local.keys() <= zeros.keys():
        raise CheckpointError(
            f"{choice.name} is {choice.form} with dim {choice.dim}, which adds a constant",
            f"what a {type(stock).__name__} with {', '.join(stock.state_dict())} can say",
            f"Open the checkpoint as it is, or compress without the form {choice.form}.",
        )
    return zeros | dict(local)
