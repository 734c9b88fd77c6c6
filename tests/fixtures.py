"""Shared fixtures: a tiny random Llama, a byte-level tokenizer, text, and plans for the model."""

import copy
import gc
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gc.set_threshold(100_000, 50, 50)  # what is imported, and most of what tests make, is no garbage
INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, so before GAC and transformers

from hypothesis import HealthCheck, settings
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import gac
from gac.allocation import dense, resolve
from gac.allocation.latencies import Timing, unnamed
from gac.forms import FORMS, form_named
from gac.forms.planned_sites import as_planned, targeted_sites
from gac.models.families import text_config
from gac.models.sites import Site, Weight
from gac.plan.plan import (
    SCHEMA,
    Calibration,
    Certificate,
    Limit,
    Measured,
    Plan,
    Prediction,
    ProfileUsed,
    SiteChoice,
    WeightChoice,
)
from gac.plan.recipe import Recipe
from gac.profiling import table as table_module
from gac.profiling.folders import find_profile, shipped_profiles
from gac.profiling.modelled.model import GpuModel
from gac.profiling.table import Profile
from gac.schemes import SCHEMES
from gac.schemes.feedback import order, rounding
from gac.testing import models
from tests.small_pipeline import Small
from tests.without_gac import WithoutGac

USUAL_ROWS, USUAL_COLUMNS = rounding.ROWS, order.COLUMNS
Changes = Mapping[str, tuple[str, int]]
SLOW = (
    "test_smollm2.py",
    "test_notebooks.py",
    "test_many_processes.py",
    "_browser.py",
    "test_latent_positions.py",
    "test_python.py",
    "tests/stress/",
    "tests/fuzz/",
    "tests/serving/",
)
"""Files and folders whose tests are all slow: whole processes, notebooks, a browser, searches."""

# The same examples every time, whatever the machine and its load. `--hypothesis-profile search` draws others, more of
# them, and prints how to draw a failing one again.
TIMELESS = settings(database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", TIMELESS, derandomize=True, max_examples=60)
settings.register_profile("search", TIMELESS, max_examples=1000, print_blob=True)
settings.load_profile("same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(part in item.path.as_posix() for part in SLOW):
            item.add_marker(pytest.mark.slow)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files whose tests are all slow need not be imported where none of them runs."""
    path = collection_path.as_posix() + "/" * collection_path.is_dir()
    return True if config.option.markexpr == "not slow" and any(part in path for part in SLOW) else None


def pytest_collection_finish() -> None:
    """What is imported and collected stays: the collector of garbage need not look at it again and again."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests keep what they measure to themselves, and ask no hub."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setenv("GAC_HOME", str(tmp_path_factory.mktemp("gac-home")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _shipped_tables_once() -> Iterator[Mapping[Path, Profile]]:
    """A shipped table is read once, and what follows from its rows is worked out once: it never changes."""
    load, tables = Profile.load, dict[Path, Profile]()

    def loaded(path_or_name: Any) -> Profile:
        path = find_profile(path_or_name) if isinstance(path_or_name, str | Path) else None
        if path not in shipped_profiles():
            return load(path_or_name)
        if path not in tables:
            tables[path] = load(path)
        return tables[path]

    def remembering(look_up: Callable[..., Any]) -> Callable[..., Any]:
        answers: dict[Any, Any] = {}

        def latencies(
            table: Profile, operator: str, fixed: Mapping[str, int], axis: str, dims: Any, dtype: str = "bf16"
        ) -> Any:
            if tables.get(table.path) is not table or not isinstance(dims, np.ndarray):
                return look_up(table, operator, fixed, axis, dims, dtype)
            key = (table.path, operator, *sorted(fixed.items()), axis, dims.shape, dims.tobytes(), dtype)
            if key not in answers:
                answers[key] = look_up(table, operator, fixed, axis, dims, dtype)
            return copy.deepcopy(answers[key])

        return latencies

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Profile, "load", loaded)
        patch.setattr(table_module, "_loaded", loaded)
        patch.setattr(Profile, "latency", remembering(Profile.latency))
        patch.setattr(Profile, "modelled", remembering(Profile.modelled))
        patch.setattr(GpuModel, "error", cache(GpuModel.error))
        yield tables


@pytest.fixture(scope="session", autouse=True)
def _shipped_latencies_once(_shipped_tables_once: Mapping[Path, Profile]) -> Iterator[None]:
    """What is looked up in a shipped table for GAC's own forms and schemes is looked up once for all tests."""
    own_once, looked_up = Timing.once, dict[Any, Any]()
    shipped = {*FORMS._shipped, *SCHEMES._shipped, "divided", "sound", "run", "attention"}
    search, others = dense.shipped_table, dict[Any, str]()

    def shipped_table(sites: Sequence[Site], profile: Profile | None, recipe: Recipe | None) -> str:
        if recipe is None or profile is None or _shipped_tables_once.get(profile.path) is not profile:
            return search(sites, profile, recipe)
        space = recipe.space
        if not {name.partition(":")[0] for name in (*space.forms, *space.schemes)} <= shipped:
            return search(sites, profile, recipe)
        tables = tuple(table_module.shipped_profiles())
        key = (tuple(sites), profile.path, space.forms, space.schemes, recipe.deployment, tables)
        if key not in others:
            others[key] = search(sites, profile, recipe)
        return others[key]

    def once(timing: Timing, key: Any, weight: Weight, look_up: Callable[[], Any]) -> Any:
        table, names = timing.profile, {part.partition(":")[0] for part in key if isinstance(part, str)}
        if table is None or _shipped_tables_once.get(table.path) is not table or not names <= shipped:
            return own_once(timing, key, weight, look_up)
        full_key = (table.path, timing.workloads, timing.gpus, timing.engine.name, key, unnamed(weight))
        if full_key not in looked_up:
            looked_up[full_key] = look_up()
        return looked_up[full_key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Timing, "once", once)
        for module in (dense, resolve):
            patch.setattr(module, "shipped_table", shipped_table)
        yield


@pytest.fixture(scope="session", autouse=True)
def _triton_patched_once() -> Iterator[None]:
    """Triton's interpreter patches its language once, not at every call of a function, and works out once what follows
    from the type of a block: kernels run in a fifth of the time."""
    if not INTERPRETED or find_spec("triton") is None:
        yield
        return
    interpreter, core = import_module("triton.runtime.interpreter"), import_module("triton.language.core")
    patch_language, find_dtype = interpreter._patch_lang, interpreter._get_np_dtype
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    types: dict[Any, dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    dtypes: dict[str, Any] = {}
    patched_modules = set[frozenset[int]]()

    @cache
    def patched(function: Callable[..., Any]) -> Any:
        # What is patched depends on which of the two modules the function sees.
        seen = frozenset(map(id, function.__globals__.values())) & {id(core), id(import_module("triton.language"))}
        if seen not in patched_modules:
            patched_modules.add(seen)
            patch_language(function)
        return interpreter._LangPatchScope()  # with nothing to restore

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = {**vars(self)}
        vars(self).update(types[key], element_ty=element_ty)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            make_tensor(self, handle, type)
            tensors[type.name] = {**vars(self)}
        vars(self).update(tensors[type.name], handle=handle, type=type, dtype=type.scalar)

    def np_dtype(dtype: Any) -> Any:
        if (name := dtype.scalar.name) not in dtypes:
            dtypes[name] = find_dtype(dtype)
        return dtypes[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patched)
        patch.setattr(interpreter, "_get_np_dtype", np_dtype)
        patch.setattr(core.block_type, "__init__", block_type)
        patch.setattr(core.tensor, "__init__", tensor)
        yield


@pytest.fixture(scope="session", autouse=True)
def _small_blocks() -> Iterator[None]:
    """Tiny matrices are quantised in several blocks of rows and pieces of columns, as large ones are: that takes a
    seventh of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounding, "ROWS", 16)
        patch.setattr(order, "COLUMNS", 32)
        yield


@pytest.fixture
def usual_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of blocks and pieces outside these tests, where what they gain is measured."""
    monkeypatch.setattr(rounding, "ROWS", USUAL_ROWS)
    monkeypatch.setattr(order, "COLUMNS", USUAL_COLUMNS)


@pytest.fixture
def tiny_config() -> LlamaConfig:
    return models.tiny_config()


@pytest.fixture
def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)  # of what the test draws itself
    return models.tiny_model()


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return models.tiny_tokenizer()


@pytest.fixture
def directory(tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    """The tiny model's directory, with its tokenizer."""
    tiny_model.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="session")
def prose() -> str:
    """5,000 seeded words of ASCII text, more than 20,000 tokens."""
    draw = random.Random(0)
    words = ["the", "rank", "of", "a", "weight", "is", "small", "where", "curvature", "falls", "off", "quickly"]
    return " ".join(draw.choice(words) for _ in range(5000))


@pytest.fixture
def text_file(tmp_path: Path, prose: str) -> Path:
    path = tmp_path / "prose.txt"
    path.write_text(prose, encoding="utf-8")
    return path


@pytest.fixture
def small(tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, text_file: Path) -> Small:
    return Small(tiny_model, tiny_tokenizer, text_file)


@pytest.fixture(scope="session")
def without_gac() -> Iterator[WithoutGac]:
    process = WithoutGac()
    yield process
    process.close()


@pytest.fixture(scope="session")
def make_plan() -> Callable[[LlamaConfig, Changes], Plan]:
    """``make_plan(config, {"model.layers.0.self_attn.q_proj": ("low_rank", 16)})``: the rest stays dense."""
    return _make_plan


def _make_plan(config: LlamaConfig, changes: Changes) -> Plan:
    forms = tuple(dict.fromkeys(("low_rank", "narrow", *(form for form, _ in changes.values() if form != "dense"))))
    planned = as_planned(targeted_sites(config, forms), forms, fused=False)
    sites = tuple(_site_choice(site, changes) for site in planned)
    used, total = sum(site.params for site in sites), sum(site.dense_params for site in sites)
    text = text_config(config)
    return Plan(
        schema_version=SCHEMA,
        gac_version=gac.__version__,
        recipe=Recipe.of(min(1.0, used / total), forms=forms, workloads=(), refit="none"),
        measured=Measured(
            model="tiny",
            digest="0" * 64,
            params=total + 2 * text.vocab_size * text.hidden_size,
            family="llama",
            calibration=Calibration("wiki-sample", 64, 1024, "1" * 64, 5.5),
            profile=ProfileUsed("NVIDIA H100 80GB HBM3", "2" * 64, ""),
            factor=0.8,
        ),
        limits=(Limit("params", min(1.0, used / total), used, used, total),),
        workloads=(),
        prediction=Prediction(0.1, 245.0, 271.0),
        certificate=Certificate("optimal", 0.1, 0.1, 0.0, (0.0,), "by hand"),
        sites=sites,
    )


def _site_choice(site: Site, changes: Changes) -> SiteChoice:
    full = form_named("dense").full
    weights = tuple(WeightChoice(one, *changes.get(one.name, ("dense", full(one)))) for one in site.weights)
    return SiteChoice(
        site.name, site.layer, site.kind, weights, sum(one.params for one in weights), site.params, 0.0, ()
    )
