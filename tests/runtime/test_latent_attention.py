"""The kernels that attend over latents: what they find, where they run, and models that generate with them."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from gac.runtime.kernels import gpu
from gac.runtime.kernels.elementwise.rows import NORMS, plainly_rotated
from gac.runtime.kernels.latent_attention import launch as latent_attention
from gac.runtime.kernels.latent_attention.launch import Attention, in_registers
from gac.runtime.kernels.latent_attention.layout import turns_of, with_runs
from gac.runtime.latents import decode as latent_decoding
from gac.runtime.latents.attention import cache_latents
from gac.runtime.latents.quantise import QuantisedLatents, pack_latents
from tests.models.small import small_config
from tests.runtime.interpreted import DEVICE, OnGpu, operators, shapes
from tests.runtime.test_latents import LEFT, MakePlan, apart, changes, generated, latent_model, numbers, steps

Bits = tuple[int | None, int | None]


@pytest.fixture(autouse=True)
def an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few SMs, so that there are few parts."""
    monkeypatch.setattr(gpu, "processors", lambda device: 4)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Attention]]:
    """Kernels run on a CPU, in float16, as Triton interprets them; and what they attended to."""
    if DEVICE == "cuda":
        pytest.skip("beside a GPU Triton compiles, and these models are on the CPU")
    found: list[Attention] = []

    def run(*given: Any) -> Tensor:
        one = Attention(*given)
        found.append(one)
        wide = {name for name, held in vars(one).items() if isinstance(held, Tensor) and held.dtype == torch.float32}
        narrow = {name: getattr(one, name).half() for name in wide - {"frequencies", "turns", "mask"}}
        return replace(one, **narrow).run().float()

    monkeypatch.setattr(latent_decoding, "unsupported_reason", lambda device, dtype: None)
    with operators(latent_attention=run):
        yield found


@dataclass(frozen=True)
class Case:
    """Sizes of an attention; ranks are of a group, and 0 where there is no second factor."""

    heads: int = 2
    queries: int = 4
    size: int = 64
    k_rank: int = 16
    v_rank: int = 16
    k_group: int = 1
    v_group: int = 1
    tokens: int = 70
    batch: int = 1
    rotated: int | None = None
    bias: bool = False
    k_bits: int | None = None
    v_bits: int | None = None
    norm: str = ""

    def attention(self, dtype: torch.dtype = torch.float16, **changed: Any) -> Attention:
        """A random one, on the device."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(DEVICE, dtype)

        def factor(rank: int, group: int) -> tuple[Tensor | None, Tensor | None]:
            if not rank:
                return None, None
            made = normal(self.heads // group, group * self.size, rank) / rank**0.5
            return made, normal(self.heads * self.size) if self.bias else None

        rotated = self.size if self.rotated is None else self.rotated
        pairs = rotated // 2 if self.k_rank else 0
        frequencies = 1e4 ** -(torch.arange(pairs, device=DEVICE) / max(pairs, 1))
        held: list[tuple[Tensor, Tensor | None]] = []
        for rank, group, bits in ((self.k_rank, self.k_group, self.k_bits), (self.v_rank, self.v_group, self.v_bits)):
            groups = self.heads // group
            latents = normal(self.batch, self.tokens, groups * rank if rank else self.heads * self.size)
            if bits is None:
                held.append((latents, None))
            else:
                rounded = QuantisedLatents(pack_latents(latents, groups, bits)[0], groups, rank, bits)
                held.append((rounded.numbers, rounded.scales))
        found = Attention(
            normal(self.batch, self.heads * self.queries, 1, self.size),
            *(part for parts in zip(*held, strict=True) for part in parts),
            *factor(self.k_rank, self.k_group),
            *factor(self.v_rank, self.v_group),
            mask=None,
            frequencies=frequencies if pairs else None,
            turns=turns_of(frequencies, self.size) if pairs else None,
            positions=with_runs(torch.arange(self.tokens, device=DEVICE)[None]) if pairs else None,
            length=None,
            scale=self.size**-0.5,
            norm=normal(self.size) if self.norm else None,
            eps=1e-2,
            kind=self.norm,
        )
        return replace(found, **changed)


def expected(given: Attention) -> Tensor:
    """In float64: keys and values of all tokens are made, keys are rotated by the positions that they have."""
    tokens, wide = given.keys.shape[1], torch.float64
    there = tokens if given.length is None else int(given.length)

    def features(latents: Tensor, scales: Any, factor: Any, bias: Tensor | None, size: int) -> Tensor:
        if scales is not None:
            latents = values_of(latents, scales, len(factor), factor.shape[2], given.query.dtype)
        made = latents[:, :there].to(wide)
        if factor is not None:
            made = torch.einsum("btgr,gfr->btgf", made.unflatten(-1, (len(factor), -1)), factor.to(wide)).flatten(2)
            made = made if bias is None else made + bias
        return made.unflatten(-1, (-1, size)).transpose(1, 2)

    keys = features(given.keys, given.k_scales, given.k_factor, given.k_bias, given.size)
    values = features(given.values, given.v_scales, given.v_factor, given.v_bias, given.v_size)
    if given.norm is not None:
        keys = NORMS[given.kind](keys, given.norm.to(wide), given.eps)
    if given.frequencies is not None:
        assert given.positions is not None
        at = given.positions[:, :there, 0].to(wide)
        angles = (at[..., None] * given.frequencies.to(wide)).repeat(1, 1, 2)
        turned, rest = keys.split([angles.shape[-1], given.size - angles.shape[-1]], -1)
        keys = torch.cat((plainly_rotated(turned, turned, angles.cos(), angles.sin())[1], rest), -1)
    queries = given.query.shape[1] // given.heads
    scores = given.query.to(wide) @ keys.repeat_interleave(queries, 1).transpose(2, 3) * given.scale
    if given.mask is not None:
        mask = given.mask[..., :there]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return (scores.softmax(-1) @ values.repeat_interleave(queries, 1)).transpose(1, 2)


def values_of(numbers: Tensor, scales: Tensor, groups: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Latents of few bits, from what the kernels read of them."""
    words = torch.cat((numbers.contiguous().view(torch.int16), scales.contiguous().view(torch.int16)), -1)
    return QuantisedLatents(words, groups, rank, 8 * numbers.shape[-1] // (groups * rank)).values(dtype)


def off(given: Attention) -> float:
    """How far what the kernels find is off, over its size."""
    found, due = given.run(), expected(given)
    assert (found.shape, found.dtype) == (due.shape, given.query.dtype)
    return float((found - due).norm() / due.norm())


SMALL = Case(heads=1, tokens=20, size=32)
CASES = [
    Case(queries=1),
    Case(queries=4, tokens=1),
    Case(heads=1, queries=7, tokens=129),
    Case(queries=20, size=72),
    Case(batch=3, tokens=65),
    Case(k_rank=48, v_rank=16, size=128),
    Case(k_rank=16, v_rank=48, size=256, heads=1, tokens=40),
    Case(k_rank=144, v_rank=24),
    Case(k_rank=24, v_rank=144),
    Case(k_rank=8, v_rank=8),
    Case(heads=4, queries=2, k_group=2, v_group=4, k_rank=48, v_rank=80),
    Case(heads=4, queries=1, k_group=4, v_group=1, k_rank=16, v_rank=16, batch=3),
    Case(rotated=16, size=64),
    Case(rotated=0),
    Case(bias=True),
    Case(k_rank=0),
    Case(v_rank=0, size=96),
    Case(k_rank=0, v_rank=0),
    Case(k_rank=0, v_rank=112, size=80),
    Case(norm="llama", bias=True),
    Case(norm="gemma", size=72, rotated=16),
    Case(norm="llama", k_bits=8, batch=2, tokens=20),
]
FEW_BITS = [
    Case(k_bits=8, v_bits=8),
    Case(k_bits=4, v_bits=4, queries=7, tokens=129),
    Case(k_bits=8, v_bits=4, k_rank=48, v_rank=24, size=128, batch=3, tokens=65),
    Case(k_bits=4, v_bits=8, k_rank=144, v_rank=144),
    Case(k_bits=8, k_rank=24, v_rank=144),
    Case(v_bits=4, k_rank=8, v_rank=80, bias=True),
    Case(v_bits=8, k_rank=0, v_rank=8),
    Case(k_bits=4, k_rank=96, v_rank=0),
    Case(heads=4, queries=2, k_group=2, v_group=4, k_rank=48, v_rank=80, k_bits=4, v_bits=8),
]


IN_BFLOAT16 = [SMALL, CASES[2], CASES[5], CASES[8], CASES[10], *FEW_BITS[1:3]]


@pytest.mark.parametrize(
    ("case", "dtype", "tolerance"),
    [
        *((case, torch.float16, 1e-3) for case in shapes([*CASES, *FEW_BITS], [2, 10, 15, 21, 22])),
        *((case, torch.bfloat16, 8e-3) for case in shapes(IN_BFLOAT16, [0])),
    ],
)
def test_it_attends_as_over_keys_and_values_that_are_made(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    assert off(case.attention(dtype)) < tolerance


@pytest.mark.parametrize("bits", [8, 4])
def test_of_few_bits_what_is_not_there_may_be_anything(bits: int) -> None:
    given = Case(heads=1, tokens=130, k_bits=bits, v_bits=bits).attention(length=torch.tensor(70, device=DEVICE))
    for one in (given.keys, given.values, given.k_scales, given.v_scales):
        assert one is not None
        one[:, 70:] = -1 if one.dtype == torch.int8 else torch.nan
    assert off(given) < 1e-3


@pytest.mark.parametrize(("early", "held"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("case", shapes([SMALL, CASES[2], CASES[5], CASES[8], *FEW_BITS[1:3]], [0]))
def test_whatever_a_thread_has_registers_for(
    case: Case, early: bool, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent_attention, "in_registers", lambda sizes, biased: {"EARLY": early, "HELD": held})
    assert off(case.attention()) < 1e-3


@pytest.mark.parametrize("processors", [1, 32])
def test_parts_of_other_sizes(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "processors", lambda device: processors)
    assert off(Case(heads=1, queries=1, size=32, tokens=300).attention()) < 1e-3


@pytest.mark.parametrize("tokens", shapes([1, 5, 64, 100, 200], [0, 3]))
def test_of_a_static_cache_what_is_there(tokens: int) -> None:
    """Its other places hold anything, and there are more parts than tiles."""
    positions = with_runs(torch.arange(200, device=DEVICE) + torch.tensor([[5], [8]], device=DEVICE))
    positions[:, tokens:] = 0
    given = Case(heads=1, tokens=200, size=32, batch=2).attention(
        length=torch.tensor(tokens, device=DEVICE), positions=positions
    )
    given.keys[:, tokens:], given.values[:, tokens:] = torch.nan, torch.nan
    assert off(given) < 1e-3


@pytest.mark.parametrize(("rows", "added"), [(1, True), (3, False)])
def test_masks(rows: int, added: bool) -> None:
    """The first rows see nothing of the first tile."""
    case = Case(heads=1, batch=3, tokens=100, size=32)
    shown = torch.rand(rows, 1, 1, 100, generator=torch.Generator().manual_seed(1)) < 0.5
    shown[:1, ..., :70], shown[..., -1] = False, True
    mask = torch.where(shown, 0.0, torch.finfo(torch.float32).min) if added else shown
    assert off(case.attention(mask=mask.to(DEVICE))) < 1e-3


@pytest.mark.parametrize(
    "positions",
    [[[*range(9), *range(20, 81)], [*range(50), *range(20)]], [[7] * 6 + [*range(64)], [*range(66), 1, 1, 1, 66]]],
    ids=["jumps", "repeats"],
)
def test_positions_that_do_not_count_up(positions: list[list[int]]) -> None:
    case = Case(heads=1, tokens=70, batch=2, queries=1, size=32)
    assert off(case.attention(positions=with_runs(torch.tensor(positions, device=DEVICE)))) < 1e-3


def test_positions_of_padding_may_be_anything() -> None:
    """Padding on the left that fills a part, on the right of a prompt, and inside."""
    shown = torch.ones(3, 1, 1, 170, dtype=torch.bool)
    shown[0, ..., :140], shown[1, ..., 50:160], shown[2, ..., 30:130:9] = False, False, False
    ids = (shown.long().cumsum(-1) - 1).masked_fill(~shown, 1)[:, 0, 0]
    given: dict[str, Any] = {"positions": with_runs(ids).to(DEVICE), "mask": shown.to(DEVICE)}
    given |= {"length": torch.tensor(165, device=DEVICE)}
    assert off(Case(heads=1, tokens=170, batch=3, queries=1, size=32).attention(**given)) < 2e-3


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_captured_step_follows_positions() -> None:
    """A CUDA graph is replayed with positions that changed since it was captured."""
    given = Case(tokens=300, batch=2).attention()
    counted = given.positions
    assert counted is not None
    given = replace(given, positions=counted.expand(2, -1, 2).clone())
    given.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = given.run()
    jumps = torch.randint(0, 50, (2, 300), device=DEVICE).cumsum(1)
    for ids in (counted[..., 0].expand(2, -1), jumps):
        assert given.positions is not None
        given.positions.copy_(with_runs(ids))
        graph.replay()
        due = expected(given)
        assert (found - due).norm() < 1e-3 * due.norm()


def test_tensors_may_lie_apart() -> None:
    given = Case(heads=1, tokens=40, size=32, batch=2).attention()
    wide = given.keys.new_zeros(*given.keys.shape[:2], 3 * given.keys.shape[2])
    wide[..., : given.keys.shape[2]] = given.keys
    query = given.query.repeat(1, 1, 2, 1)[:, :, :1]
    assert torch.equal(replace(given, keys=wide[..., : given.keys.shape[2]], query=query).run(), given.run())


@pytest.mark.parametrize(
    ("case", "early", "held"),
    [
        (Case(size=128, k_rank=64, v_rank=64), True, True),
        (Case(size=64, k_rank=96, v_rank=48, queries=8), True, False),
        (Case(size=128, k_rank=96, v_rank=96), False, False),
        (Case(size=128, k_rank=64, v_rank=64, bias=True), True, False),
        (Case(size=128, k_rank=64, v_rank=64, k_bits=8, v_bits=8), True, False),
    ],
)
def test_what_a_thread_has_registers_for(case: Case, early: bool, held: bool) -> None:
    given = case.attention()
    assert in_registers(given._sizes(), given.k_bias is not None) == {"EARLY": early, "HELD": held}


# --- models -------------------------------------------------------------------------------------------------------


def ranks_of_16(config: Any, form: str = "latent:1") -> dict[str, tuple[str, int]]:
    return {name: (one, 8 * (1 + dim % 2)) for name, (one, dim) in changes(config, form).items()}


def sdpa_model(config: Any, make_plan: MakePlan, bits: Bits = (None, None)) -> Any:
    """With latents of keys and of values in so many bits."""
    forms = [f"latent:1:int{count}" if count else "latent:1" for count in bits]
    chosen = {name: (forms[name.endswith("v_proj")], dim) for name, (_, dim) in ranks_of_16(config).items()}
    model = latent_model(config, make_plan, chosen)
    model.set_attn_implementation("sdpa")
    return model.requires_grad_(False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "changed", "cache", "bits"),
    [
        ("llama", {"attention_bias": True}, "static", (None, None)),
        ("smollm3", {"no_rope_layers": [1, 0]}, None, (None, None)),
        ("gemma3_text", {"sliding_window": 8}, "static", (None, None)),
        ("llama", {"attention_bias": True}, "static", (8, 4)),
    ],
)
def test_generation_with_the_kernel_equals_generation_without_a_cache(
    model_type: str, changed: dict[str, Any], cache: str | None, bits: Bits, make_plan: MakePlan, ran: list[Attention]
) -> None:
    """In single precision some number of few bits may be rounded otherwise."""
    model = sdpa_model(small_config(model_type, **changed), make_plan, bits)
    without, found = generated(model, use_cache=False), generated(model, cache_implementation=cache)
    assert apart(without, found) < (5e-3 if bits[0] else 2e-3) * float(torch.stack(without.logits).abs().max())
    assert len(ran) == 4 * 2
    assert {one.bits for one in ran} == {bits}
    assert {one.length is None for one in ran} == {cache is None or "sliding_window" in changed}  # whose window is full
    assert sum(numbers(found.past_key_values)) == model.gac_plan.kv_numbers[0]


def test_a_text_in_parts_and_what_gradients_see_run_in_pytorch(make_plan: MakePlan, ran: list[Attention]) -> None:
    model = sdpa_model(small_config("llama"), make_plan)
    steps(model, DynamicCache(config=model.config), (4, 2, 3))
    with torch.enable_grad():
        model(torch.zeros(2, 1, dtype=torch.long), past_key_values=DynamicCache(config=model.config))
    assert not ran
    cache_latents(model)  # once more: hooks are put on once
    steps(model, StaticCache(model.config, max_cache_len=8), (4, 1))
    assert len(ran) == 2


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("olmo2", "keys have norms over all heads, or another norm than RMSNorm"),
        ("cohere", "keys are rotated in another way than by one angle a place, in halves"),
        ("llama", "latents have rank 7, no multiple of 8"),
    ],
)
def test_what_runs_in_pytorch_is_said_once(
    model_type: str,
    said: str,
    make_plan: MakePlan,
    ran: list[Attention],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = small_config(model_type)
    chosen = changes(config) if model_type == "llama" else ranks_of_16(config)
    model = latent_model(config, make_plan, chosen)
    monkeypatch.setattr(gpu, "_said", set())
    on_gpu: Any = OnGpu()
    monkeypatch.setattr(latent_decoding, "warn_slow_path_once", lambda _, *told: gpu.warn_slow_path_once(on_gpu, *told))
    with caplog.at_level(logging.WARNING, logger="gac"):
        generated(model, LEFT)
    assert not ran
    assert f"latents are multiplied out in plain PyTorch at every token, which is slow: {said}" in caplog.messages
    assert len(caplog.messages) == len(set(caplog.messages))
