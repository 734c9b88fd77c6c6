"""Calibration on text about images: the statistics are those of the model's own forward, text alone is predicted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoProcessor

import gac
from gac.core.errors import TextError
from gac.forms.curvature.metric import Halves
from gac.forms.curvature.registry import METHODS
from gac.measurement import layerwise
from gac.measurement.calibration import decoder_layers, group_by_layer, stream_moments
from gac.measurement.images import BY_TOKEN, digest_of_examples, holds_messages, read_examples
from gac.measurement.runs import ModelRuns, drawn_loss, window_loss
from gac.measurement.texts import Texts
from gac.models.examples import Example, Examples, next_tokens, predicted_tokens
from gac.models.layer_stack import LayerStack
from gac.models.processors import load_processor
from tests.measurement.runs import run_of, sites_of
from tests.models.messages import IMAGE_ID, SmallProcessor, llava_directory, messages_file
from tests.models.wrappers import IMAGE_TOKEN, WITH_IMAGES, wrapper_config, wrapper_model
from tests.refused import assert_refused

ANSWERS = ("A cat.", "Two dogs, and a ball behind them.", "Nothing.", "A dog that sleeps.")
IMAGES = (1, 1, 0, 1)
LENGTH = 128
OPTIONS: dict[str, Any] = {"workloads": (), "progress": False}
READ = [name for name in WITH_IMAGES if name != "paligemma"]
FEW = ("gemma3", "llava", "qwen3_vl")
"""Images that are read in both directions; as tokens; with rotary embeddings of their own, and added behind layers."""
every_reader = pytest.mark.parametrize(
    "model_type", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in READ]
)


def small(model_type: str) -> Any:
    more = {"vision_config": {"deepstack_visual_indexes": [0, 1]}} if model_type == "qwen3_vl" else {}
    return wrapper_model(wrapper_config(model_type, **more))


@pytest.fixture
def messages(tmp_path: Path) -> Path:
    return messages_file(tmp_path / "messages", ANSWERS, IMAGES)


def examples_of(model: Any, messages: Path, length: int | None = LENGTH) -> Examples:
    return Examples(tuple(read_examples(str(messages), SmallProcessor(model), model.config, None, length)[0]))


def unpadded(example: Example) -> dict[str, Tensor]:
    """What a processor gives, without padding."""
    cut = {name: each[:, : example.length] if name in BY_TOKEN else each for name, each in example.inputs.items()}
    return {"input_ids": example.ids[None, : example.length], **cut}


def by_hand(model: Any, examples: Examples, power: float) -> dict[str, dict[str, Tensor]]:
    """Second moments of every weight by hooks on the plain model, whose labels of images are ignored."""
    sums: dict[str, dict[str, Any]] = {}
    read: dict[str, Tensor] = {}

    def listen(name: str, x: Tensor, g: Tensor) -> None:
        x, g = x[0].double(), g[0].double()
        x_p, g_p = x.norm(dim=1) ** power, g.norm(dim=1) ** power
        values = {"tokens": g_p.sum(), "both": (x_p * g_p).sum()}
        values |= {"inputs": (x * g_p[:, None]).T @ x, "gradients": (g * x_p[:, None]).T @ g}
        for what, value in values.items():
            of = sums.setdefault(name, {})
            of[what] = of.get(what, 0) + value

    def hook(name: str, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda g: listen(name, inputs[0].detach(), g))

    names = [weight.name for site in sites_of(model) for weight in site.weights]
    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda _m, inputs, output, name=name: hook(name, inputs, output)
        )
        for name in names
    ]
    count = total = 0.0
    for example in examples:
        inputs = unpadded(example)
        labels = inputs["input_ids"][0].masked_fill(inputs["input_ids"][0] == IMAGE_TOKEN, -100)[1:]
        loss = cross_entropy(model(**inputs, use_cache=False).logits[0, :-1], labels, reduction="sum")
        loss.backward()
        total, count = total + loss.item(), count + int((labels != -100).sum())
    for handle in hooks:
        handle.remove()
    full = count * LENGTH / (LENGTH - 1)  # a window of text counts with all of its tokens
    read = {"loss": torch.tensor(total / count)}
    return {"": read} | {
        name: {
            "inputs": of["inputs"] / of["tokens"],
            "gradients": of["gradients"] / (full * of["both"] / of["tokens"]),
        }
        for name, of in sums.items()
    }


@pytest.fixture
def labels_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are those of the text's own tokens, not of labels that the model draws."""

    def of_the_text(model: Any, window: Any, what: str, seed: int) -> tuple[Tensor, Tensor]:
        loss = window_loss(model, window, what)
        return loss.detach(), loss

    monkeypatch.setattr(layerwise, "drawn_loss", of_the_text)


@every_reader
@pytest.mark.parametrize("method", ["kfac", "svd-llm"])
def test_statistics_are_those_of_the_models_own_forward(
    model_type: str, method: str, messages: Path, labels_of_the_text: None
) -> None:
    model = small(model_type)
    examples = examples_of(model, messages)
    expected = by_hand(model, examples, METHODS.get(method).power)
    run, weights = run_of(model, method=method, windows=examples), group_by_layer(sites_of(model))
    for layer, moments in stream_moments(run, sites_of(model)):
        assert moments is not None
        assert moments.loss == pytest.approx(float(expected[""]["loss"]), rel=1e-5)
        for weight in weights[layer]:
            pooled = moments.of(weight, Halves.mean)
            for result, what in ((pooled.inputs, "inputs"), (pooled.gradients, "gradients")):
                theirs = expected[weight.name][what]
                assert (result - theirs).norm() < 1e-4 * theirs.norm(), (weight.name, what)
            padding = [moments.tokens(weight)[row, each.length :] for row, each in enumerate(examples)]
            assert not torch.cat(padding).any()


@every_reader
def test_layers_that_run_one_by_one_give_the_models_own_logits(model_type: str, messages: Path) -> None:
    model = small(model_type)
    examples = examples_of(model, messages)
    layers = decoder_layers(model, group_by_layer(sites_of(model)))
    stack = LayerStack(model, layers)
    with torch.no_grad():
        hidden = stack.entered(examples)
        for row, example in enumerate(examples):
            state = hidden[row : row + 1]
            for layer in range(len(layers)):
                state = stack.run(layer, state, example)
            result = stack.logits(example, state)[: example.length]
            torch.testing.assert_close(result, model(**unpadded(example), use_cache=False).logits[0])


def test_features_of_images_are_added_behind_layers(messages: Path) -> None:
    model = small("qwen3_vl")
    first, _, text, _ = examples_of(model, messages)
    stack = LayerStack(model, list(model.model.language_model.layers))
    with torch.no_grad():
        stack.entered(Examples((first, text)))
        states = torch.randn(1, LENGTH, 64)
        stack.run(0, states, first), stack.run(0, states, text)
    added = stack.added(0, first)
    assert added is not None
    assert added[0].any(dim=1).tolist() == (first.ids == IMAGE_TOKEN).tolist()
    assert stack.added(0, text) is None


def test_labels_are_drawn_for_text_alone(messages: Path) -> None:
    model = small("llava")
    example = examples_of(model, messages)[0]
    heard: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _m, _i, output: output.register_hook(heard.append) and None)
    observed, drawn = drawn_loss(model, example, "an example", seed=3)
    drawn.backward()
    (gradient,) = heard
    assert gradient[0].any(dim=1).nonzero().flatten().tolist() == example.predicting.tolist()
    assert (example.ids[example.predicting + 1] != IMAGE_TOKEN).all()
    assert observed.item() == pytest.approx(window_loss(model, example).item())
    assert len(next_tokens(example)) == int(example.text[1:].sum()) == predicted_tokens(Examples((example,)))


def test_runs_of_the_model_look_at_text_alone(messages: Path) -> None:
    model = small("gemma3")
    examples, layers = examples_of(model, messages), decoder_layers(model, group_by_layer(sites_of(model)))
    runs = ModelRuns(model, layers, examples, [], every=True)
    name = sites_of(model)[0].weights[0].name
    other = torch.nn.Linear(*reversed(model.get_submodule(name).weight.shape), bias=False)
    with torch.no_grad():
        dense = [model(**unpadded(each)).logits[0, each.predicting].log_softmax(-1) for each in examples]
        expected_dense = model.get_submodule(name)
        model.set_submodule(name, other)
        changed = [model(**unpadded(each)).logits[0, each.predicting].log_softmax(-1) for each in examples]
        model.set_submodule(name, expected_dense)
    each = [(p.exp() * (p - q)).sum(-1).mean() for p, q in zip(dense, changed, strict=True)]
    assert runs.divergence({name: other}) == pytest.approx(float(torch.stack(each).mean()), rel=1e-3)


@pytest.mark.parametrize("model_type", FEW)
def test_a_model_is_planned_compressed_saved_and_measured_on_images(
    model_type: str, messages: Path, tmp_path: Path
) -> None:
    dense = small(model_type)
    processor, text = SmallProcessor(dense), f"{messages}:4x{LENGTH}"
    plan = gac.allocate(dense, 0.7, calibration=text, tokenizer=processor, **OPTIONS)
    on_text = gac.allocate(dense, 0.7, calibration=f"wiki-sample:4x{LENGTH}", tokenizer=processor, **OPTIONS)
    assert plan.measured.calibration.text == str(messages)
    assert plan.measured.calibration.digest != on_text.measured.calibration.digest
    model: Any = gac.compress(small(model_type), plan, tokenizer=processor, progress=False)
    gac.save(model, tmp_path / "saved")
    loaded: Any = gac.load(tmp_path / "saved")
    before, after = (gac.perplexity(each, processor, str(messages), progress=False) for each in (model, loaded))
    assert before == after
    assert before.tokens == predicted_tokens(examples_of(dense, messages))
    alone = gac.perplexity(loaded, processor, str(messages), windows=1, progress=False)
    assert "1 examples of at most" in alone.protocol
    distance = gac.divergence(loaded, dense, processor, str(messages), progress=False)
    assert 0 < distance.kl < 1


def test_perplexity_is_of_text_given_the_images(messages: Path) -> None:
    model = small("llava")
    losses = by_hand(model, examples_of(model, messages), 2.0)
    result = gac.perplexity(model, SmallProcessor(model), str(messages), progress=False)
    assert result.value == pytest.approx(float(losses[""]["loss"].exp()), rel=1e-5)


def test_beside_images_the_statistics_of_a_text_are_those_of_the_text_alone(messages: Path, prose: str) -> None:
    model = small("llava")
    (messages.parent / "prose.txt").write_text(prose)
    parts = f"{messages}:4x{LENGTH}", f"{messages.parent / 'prose.txt'}:4x{LENGTH}"
    plan = gac.allocate(model, 0.7, calibration=parts, tokenizer=SmallProcessor(model), **OPTIONS)
    assert [part.text for part in plan.measured.calibration.parts] == [part.rpartition(":")[0] for part in parts]
    alone = gac.allocate(model, 0.7, calibration=parts[1], tokenizer=SmallProcessor(model), **OPTIONS)
    assert plan.measured.calibration.parts[1].loss == alone.measured.calibration.loss
    compressed: Any = gac.compress(model, plan, tokenizer=SmallProcessor(model), progress=False)
    assert compressed.gac_plan.weights == plan.weights


def test_latents_are_not_measured_where_tokens_of_an_image_see_later_ones(messages: Path) -> None:
    model = wrapper_model(wrapper_config("gemma3", mm_tokens_per_image=4))
    run = run_of(model, windows=examples_of(model, messages), attended=True)
    assert_refused(
        lambda: list(stream_moments(run, sites_of(model))), "attention model.language_model.layers.1", "later ones"
    )


# From a directory, with the processor that transformers has for the model.


@pytest.fixture
def llava(tmp_path: Path) -> Path:
    return llava_directory(tmp_path / "llava")


def test_a_processor_is_read_from_the_models_directory(llava: Path, messages: Path, tmp_path: Path) -> None:
    plan = gac.allocate(llava, 0.7, calibration=f"{messages}:4x{LENGTH}", **OPTIONS)
    gac.save(gac.compress(llava, plan, progress=False), tmp_path / "saved")
    result = gac.evaluate(
        [tmp_path / "saved"], against=llava, text=str(messages), also="wiki-sample", windows=2, length=LENGTH
    )
    (small_one,), dense = result.models, result.against
    assert small_one.perplexity is not None
    assert dense is not None
    assert dense.perplexity is not None
    assert small_one.perplexity.text == str(messages)
    assert small_one.perplexity.value != dense.perplexity.value
    assert small_one.divergence is not None


def test_what_transformers_itself_makes_of_messages_is_what_the_model_is_given(llava: Path, messages: Path) -> None:
    processor = AutoProcessor.from_pretrained(llava)
    config = wrapper_config("llava", image_token_index=IMAGE_ID)
    first = read_examples(str(messages), processor, config, 1, 80)[0][0]
    content = [{"type": "image", "path": str(messages.parent / "0-0.png")}, {"type": "text", "text": "What is it?"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": ANSWERS[0]}]}
    theirs = processor.apply_chat_template(
        [{"role": "user", "content": content}, answer], tokenize=True, return_dict=True, return_tensors="pt"
    )
    assert torch.equal(first.inputs["pixel_values"], theirs["pixel_values"])
    assert first.ids[: first.length].tolist() == theirs["input_ids"][0].tolist()
    assert (first.ids[: first.length] == IMAGE_ID).sum() == 4
    assert not first.text[first.length :].any()


def test_examples_are_told_apart_by_their_pixels(messages: Path) -> None:
    model = small("llava")
    before = examples_of(model, messages)
    (messages.parent / "0-0.png").write_bytes((messages.parent / "1-0.png").read_bytes())
    after = examples_of(model, messages)
    assert torch.equal(before.ids, after.ids)
    assert digest_of_examples(before.windows) != digest_of_examples(after.windows)


def test_what_is_longer_is_cut_behind_its_image(messages: Path) -> None:
    model = small("llava")
    processor, config = SmallProcessor(model), model.config
    cut, uncut = (read_examples(str(messages), processor, config, None, length)[0] for length in (15, LENGTH))
    assert all(torch.equal(short.ids, long.ids[:15]) for short, long in zip(cut, uncut, strict=True))
    result, complete = read_examples(str(messages), processor, config, 2, LENGTH, seed=1)
    assert len(result) == 2
    assert not complete


def refused(messages: Path, *parts: str, lines: Sequence[str] = (), model_type: str = "llava", **kinds: Any) -> None:
    if lines:
        messages.write_text("\n".join(lines) + "\n")
    model = small(model_type)
    how = SmallProcessor(model), model.config, kinds.get("windows"), kinds.get("length")
    assert_refused(lambda: read_examples(str(messages), *how), *parts, error=TextError)


LINE = (
    '{"messages": [{"role": "user", "content": [{"type": "image", "path": "0-0.png"}, {"type": "text", "text": "x"}]}]}'
)


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("{}", ("line 2 of ", "is no object with messages", '"type": "image", "path"')),
        ("[1", ("line 2 of ", "is no object with messages")),
        ('{"messages": [{"role": "user", "content": 3}]}', ("line 2 of ", "is no object with messages")),
        (LINE.replace("0-0.png", "absent.png"), ("image ", "absent.png, in line 2", "cannot be read", "No such file")),
        (LINE.replace("0-0.png", "messages.jsonl"), ("image ", "cannot identify image file")),
        (LINE.replace('"text": "x"', '"text": " "'), ("line 2 of ", "has messages without text", "Add text")),
        (LINE.replace('"image"', '"video"'), ("line 2 of ", "has a part of type 'video'", "an image by its path")),
        (LINE.replace('"path": "0', '"url": "0'), ("line 2 of ", "has a part of type 'image' with type, url")),
    ],
)
def test_lines_that_cannot_be_read(messages: Path, line: str, parts: tuple[str, ...]) -> None:
    refused(messages, *parts, lines=[LINE, line])


def test_files_that_cannot_be_used(messages: Path) -> None:
    refused(messages, f"{messages} has 4 examples", "the 5 asked for", "Ask for at most 4", windows=5)
    refused(messages, "line 1 of ", "has an image behind token 3", length=3)
    refused(
        messages, f"{messages} without an image", "text file", lines=['{"messages": [{"role": "u", "content": "xy"}]}']
    )


def test_models_that_take_no_images(messages: Path, tiny_model: Any, tiny_tokenizer: Any, llava: Path) -> None:
    text = f"{messages}:4x{LENGTH}"
    assert_refused(
        lambda: gac.allocate(tiny_model, 0.7, calibration=text, tokenizer=tiny_tokenizer, progress=False),
        f"messages of {messages} for a llama, a language model without vision",
        "Give it text without images",
    )
    assert_refused(
        lambda: gac.perplexity(tiny_model, tiny_tokenizer, str(messages)), f"messages of {messages} for a llama"
    )
    paligemma = small("paligemma")
    assert_refused(
        lambda: gac.perplexity(paligemma, tiny_tokenizer, str(messages)),
        f"messages of {messages} for a paligemma, which reads its whole prompt in both directions",
    )


def test_processors_that_are_missing_or_read_no_images(
    llava: Path, messages: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"{messages}:4x{LENGTH}"
    assert_refused(
        lambda: gac.allocate(llava, 0.7, calibration=text, tokenizer=tiny_tokenizer, progress=False),
        "a TokenizersBackend for text with images",
        "AutoProcessor.from_pretrained",
    )
    with monkeypatch.context() as patched:
        without = Mock(
            side_effect=ImportError("PixtralProcessor requires the Torchvision library but it was not result")
        )
        patched.setattr(AutoProcessor, "from_pretrained", without)
        assert_refused(
            lambda: load_processor(llava),
            f"the processor of {llava} without the package torchvision",
            "pip install torchvision",
        )
    (llava / "preprocessor_config.json").write_text('{"image_processor_type": "NoSuchImageProcessor"}')
    assert_refused(lambda: load_processor(llava), f"the processor of {llava} cannot be read", "AutoProcessor")
    (llava / "processor_config.json").unlink()
    (llava / "preprocessor_config.json").unlink()
    assert_refused(
        lambda: gac.allocate(llava, 0.7, calibration=text, progress=False),
        f"the model '{llava}' came without a processor",
        "Copy the processor's files beside the weights",
    )


def test_a_template_that_leaves_images_out(llava: Path, messages: Path) -> None:
    (llava / "chat_template.jinja").write_text("{{ messages[-1].content[0].text }}")
    text = f"{messages}:4x{LENGTH}"
    assert_refused(lambda: gac.allocate(llava, 0.7, calibration=text, progress=False), "line 1 of ", "LlavaProcessor")
    (llava / "chat_template.jinja").unlink()
    assert_refused(lambda: gac.allocate(llava, 0.7, calibration=text, progress=False), "line 1 of ", "chat template")


def test_messages_are_no_text_to_compare_with_or_to_heal_on(messages: Path, llava: Path) -> None:
    text = f"{messages}:4x{LENGTH}"
    plan = gac.allocate(llava, 0.7, calibration=text, **OPTIONS)
    for call in (
        lambda: gac.allocate(llava, 0.7, calibration=text, check_text="wiki-sample", progress=False),
        lambda: gac.compress(llava, plan, heal=1000, progress=False),
        lambda: gac.allocate(
            llava, 0.7, calibration=f"wiki-sample:4x{LENGTH}", check_text=str(messages), progress=False
        ),
    ):
        with pytest.raises(TextError, match="messages"):
            call()


def test_a_file_of_lines_without_messages_is_text(tmp_path: Path) -> None:
    for line, is_messages in (
        ('{"text": "x"}', False),
        ("plain", False),
        ('"messages"', False),
        (LINE, True),
        ("", False),
    ):
        (tmp_path / "file.jsonl").write_text(line)
        assert holds_messages(str(tmp_path / "file.jsonl")) is is_messages
    assert not holds_messages("wiki-sample")
    assert len(Texts.of(f"{tmp_path / 'file.jsonl'}:2x8").parts) == 1
