"""Configs of published models: taken, with the weights and the parameters that each has, or refused with its reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from gac.models.config_fields import check_config, check_content
from gac.models.families import family_of
from gac.runtime.architectures import generating_class
from tests.models.small import linear_weights, weights_of
from tests.refused import assert_refused

CONFIGS = Path(__file__).parents[1] / "data" / "configs"

TAKEN = {  # sites, their parameters, and the parameters of the published model (tied ones once)
    "aya-expanse-8b": (160, 6_979_321_856, 8_028_033_024),
    "bamba-9b": (102, 8_727_822_336, 9_780_235_392),
    "bloom-560m": (72, 301_989_888, 559_214_592),
    "command-r7b": (160, 6_979_321_856, 8_028_033_024),
    "deepseek-v2-lite": (135, 888_668_160, 15_706_484_224),
    "deepseek-v3": (366, 15_156_838_400, 671_026_404_352),
    "exaone-4.0-1.2b": (150, 1_069_547_520, 1_279_391_488),
    "falcon-7b": (96, 6_625_951_744, 6_921_720_704),
    "falcon-h1-0.5b": (252, 453_869_568, 521_411_104),
    "falcon3-7b": (140, 6_650_068_992, 7_455_550_464),
    "gemma-2-2b": (130, 2_024_275_968, 2_614_341_888),
    "gemma-2-9b": (210, 8_323_596_288, 9_241_705_984),
    "gemma-3-12b": (240, 10_758_389_760, 12_187_325_040),
    "gemma-3-1b": (130, 697_761_792, 999_885_952),
    "gemma-3-270m": (90, 100_270_080, 268_098_176),
    "gemma-3-27b": (310, 25_598_361_600, 27_432_406_640),
    "gemma-3-4b": (170, 3_208_642_560, 4_300_079_472),
    "gemma-4-31b-text": (290, 29_286_727_680, 30_697_345_280),
    "glm-4-9b-0414": (200, 8_157_921_280, 9_400_279_040),
    "glm-4.5-air": (230, 5_929_435_136, 106_852_245_504),
    "gpt-j-6b": (140, 5_637_144_576, 6_050_882_784),
    "gpt-oss-20b": (96, 637_009_920, 20_914_757_184),
    "gpt2": (36, 84_934_656, 124_439_808),
    "granite-3.3-2b": (200, 2_432_696_320, 2_533_539_840),
    "granite-3.3-8b": (200, 7_969_177_600, 8_170_864_640),
    "granite-4.0-h-350m": (104, 262_914_048, 340_332_224),
    "granite-4.0-h-micro": (128, 2_984_771_584, 3_191_396_096),
    "granite-4.0-h-tiny": (128, 740_327_424, 6_939_037_248),
    "granite-4.0-micro": (200, 3_145_728_000, 3_402_836_480),
    "idefics3-8b-llama3": (160, 6_979_321_856, 8_462_086_384),
    "internvl3-8b": (140, 6_525_288_448, 7_944_373_760),
    "lfm2-1.2b": (60, 1_035_993_088, 1_170_340_608),
    "llama-3.1-8b": (160, 6_979_321_856, 8_030_261_248),
    "llama-3.2-1b": (80, 973_078_528, 1_235_814_400),
    "llama-3.2-3b": (140, 2_818_572_288, 3_212_749_824),
    "llama-3.3-70b": (400, 68_451_041_280, 70_553_706_496),
    "llava-1.5-7b": (160, 6_476_005_376, 7_063_427_072),
    "ministral-3-14b": (200, 12_163_481_600, 13_945_031_680),
    "ministral-3-3b": (130, 3_026_190_336, 3_849_090_048),
    "ministral-3-8b": (170, 7_415_529_472, 8_918_026_240),
    "ministral-8b-2410": (180, 6_945_767_424, 8_019_808_256),
    "mistral-7b-v0.3": (160, 6_979_321_856, 7_248_023_552),
    "mistral-nemo-12b": (200, 10_905_190_400, 12_247_782_400),
    "mistral-small-24b-2501": (200, 22_229_811_200, 23_572_403_200),
    "mistral-small-3.1-24b": (200, 22_229_811_200, 24_011_361_280),
    "mixtral-8x7b": (128, 1_342_177_280, 46_702_792_704),
    "mpt-7b": (96, 6_442_450_944, 6_649_286_656),
    "nemotron-h-8b": (88, 7_025_459_200, 8_100_852_736),
    "olmo-2-1124-7b": (160, 6_476_005_376, 7_298_617_344),
    "olmo-3-7b": (160, 6_476_005_376, 7_298_011_136),
    "olmoe-1b-7b": (64, 268_435_456, 6_919_161_856),
    "opt-1.3b": (120, 1_207_959_552, 1_315_758_080),
    "paligemma2-3b": (130, 2_024_275_968, 3_032_242_416),
    "phi-3-mini-4k": (96, 3_623_878_656, 3_821_079_552),
    "phi-3.5-moe": (128, 1_342_177_280, 41_873_153_344),
    "phi-4": (120, 13_631_488_000, 14_659_507_200),
    "phi-4-mini": (96, 3_221_225_472, 3_836_021_760),
    "pythia-1.4b": (72, 1_207_959_552, 1_414_647_808),
    "qwen1.5-moe-a2.7b": (120, 1_233_125_376, 14_315_784_192),
    "qwen2.5-0.5b": (120, 357_826_560, 494_032_768),
    "qwen2.5-32b": (320, 31_205_621_760, 32_763_876_352),
    "qwen2.5-7b": (140, 6_525_288_448, 7_615_616_512),
    "qwen2.5-vl-7b": (140, 6_525_288_448, 8_292_166_656),
    "qwen3-0.6b": (140, 440_401_920, 596_049_920),
    "qwen3-1.7b": (140, 1_409_286_144, 1_720_574_976),
    "qwen3-14b": (200, 13_212_057_600, 14_768_307_200),
    "qwen3-30b-a3b": (192, 905_969_664, 30_532_122_624),
    "qwen3-32b": (320, 31_205_621_760, 32_762_123_264),
    "qwen3-4b": (180, 3_633_315_840, 4_022_468_096),
    "qwen3-8b": (180, 6_945_767_424, 8_190_735_360),
    "qwen3-next-80b-a3b": (204, 1_690_828_800, 79_674_391_296),
    "qwen3-vl-2b": (140, 1_409_286_144, 2_127_532_032),
    "qwen3-vl-8b": (180, 6_945_767_424, 8_767_123_696),
    "qwen3.5-27b": (368, 24_350_556_160, 27_356_728_560),
    "smollm2-1.7b": (120, 1_610_612_736, 1_711_376_384),
    "smollm2-135m": (150, 106_168_320, 134_515_008),
    "smollm3-3b": (180, 2_812_280_832, 3_075_098_624),
    "smolvlm2-2.2b": (120, 1_610_612_736, 2_246_784_880),
    "stablelm-2-1.6b": (120, 1_233_125_376, 1_644_515_328),
    "starcoder2-3b": (150, 2_878_341_120, 3_030_371_328),
}

ROUTED = {  # parameters of the routed experts, and those that are active for a token
    "deepseek-v2-lite": (14_394_851_328, 1_349_517_312),
    "deepseek-v3": (653_908_770_816, 20_434_649_088),
    "glm-4.5-air": (99_656_663_040, 6_228_541_440),
    "gpt-oss-20b": (19_116_933_120, 2_389_616_640),
    "granite-4.0-h-tiny": (6_039_797_760, 566_231_040),
    "mixtral-8x7b": (45_097_156_608, 11_274_289_152),
    "olmoe-1b-7b": (6_442_450_944, 805_306_368),
    "phi-3.5-moe": (40_265_318_400, 5_033_164_800),
    "qwen1.5-moe-a2.7b": (12_457_082_880, 830_472_192),
    "qwen3-30b-a3b": (28_991_029_248, 1_811_939_328),
    "qwen3-next-80b-a3b": (77_309_411_328, 1_509_949_440),
}

_LINEAR_ATTENTION = "with layers of state spaces, convolutions or linear attention"
REFUSED = {
    "bert-base": "an encoder;",
    "bitnet-b1.58-2b": "expected a supported architecture",
    "gemma-3n-e2b": "a multimodal model around a gemma3n_text",
    "gemma-4-e2b-text": "that also take keys and values of other layers (num_kv_shared_layers 20) and embeddings",
    "gpt-neo-1.3b": "expected a supported architecture",
    "llama-3.2-11b-vision": "a multimodal model around a mllama_text_model",
    "mamba-130m": _LINEAR_ATTENTION,
    "t5-small": "an encoder-decoder;",
    "whisper-large-v3": "an encoder-decoder;",
}


def read_config(name: str) -> Any:
    return AutoConfig.from_pretrained(CONFIGS / f"{name}.json")


def parameters(model: nn.Module, besides: type[nn.Module] | tuple[()] = ()) -> int:
    """Count the parameters of a model, but those of some modules; shared ones once."""
    left_out = {id(each) for module in model.modules() if isinstance(module, besides) for each in module.parameters()}
    return sum(each.numel() for each in model.parameters() if id(each) not in left_out)


def test_every_config_is_expected_to_be_taken_or_refused() -> None:
    assert len(TAKEN) + len(REFUSED) >= 64
    assert sorted([*TAKEN, *REFUSED]) == sorted(path.stem for path in CONFIGS.glob("*.json"))


@pytest.mark.parametrize("name", TAKEN)
def test_a_published_model_is_taken_with_all_of_its_linear_weights(name: str) -> None:
    config = read_config(name)
    count, params, published = TAKEN[name]
    sites = family_of(config).sites(config)
    assert (len(sites), sum(site.params for site in sites)) == (count, params)

    with torch.device("meta"):
        model = generating_class(type(config))._from_config(config, dtype=torch.bfloat16)
    model.tie_weights()
    assert parameters(model) == published

    decoder, family = model.get_decoder(), family_of(config)
    sizes = {weight.name: (weight.out_features, weight.in_features) for weight in weights_of(config)}
    assert sizes == linear_weights(model)
    routed = family.routed_params(config)
    assert (None if routed is None else (routed.params, routed.active)) == ROUTED.get(name)
    known, whole = params + (routed.params if routed else 0), parameters(decoder, besides=nn.Embedding)
    assert 0.98 * whole <= known <= whole


@pytest.mark.parametrize("name", TAKEN)
def test_no_field_of_a_published_config_is_refused(name: str) -> None:
    check_content(json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8")))
    check_config(read_config(name))


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_model_is_refused_with_its_reason(name: str) -> None:
    config = read_config(name)
    assert_refused(lambda: family_of(config), f"model type '{config.model_type}'", REFUSED[name])
