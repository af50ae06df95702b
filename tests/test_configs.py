"""Every file under configs/ composes into the typed config, and presets carry the published numbers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from launch.config_errors import HYDRA_KEYS, known_keys, typed
from trainers.config import RunConfig, register_schema
from trainers.config_rules import check
from trainers.transformer.architecture import architecture

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
TASK_GROUPS = ("comm", "model", "data", "optim", "engine", "trainer", "logger", "experiment", "sweep")
TASK_FILES = [(group, path.stem) for group in TASK_GROUPS for path in sorted((CONFIGS / group).glob("*.yaml"))]

KAGGLE_ROWS = (
    "1460,583,10131227,2202608,305,24,12517,633,3,93145,5683,8351593,3194,27,14992,5461306,10,5652,2173,4,7046547,18,15,"
    "286181,105,142572"
)
TERABYTE_ROWS = (
    "9980333,36084,17217,7378,20134,3,7112,1442,61,9758201,1333352,313829,10,2208,11156,122,4,970,14,9994222,7267859,"
    "9946608,415421,12420,101,36"
)
MLPERF_ROWS = (
    "40000000,39060,17295,7424,20265,3,7122,1543,63,40000000,3067956,405282,10,2209,11938,155,4,976,14,40000000,"
    "40000000,40000000,590152,12973,108,36"
)
MLPERF_MULTI_HOT = "3,2,1,2,6,1,1,1,1,7,3,8,1,6,9,5,1,1,1,12,100,27,10,3,1,1"
# name: rows, ids a feature, dim, bottom with its input, top, interaction, batch, optimizer, learning rate
PUBLISHED = {
    "dlrm_kaggle": (KAGGLE_ROWS, None, 16, "13-512-256-64-16", "512-256-1", "dot", 128, "sgd", 0.1),
    "dlrm_terabyte": (TERABYTE_ROWS, None, 64, "13-512-256-64", "512-512-256-1", "dot", 2048, "sgd", 0.1),
    "dlrm_mlperf_dcnv2": (
        *(MLPERF_ROWS, MLPERF_MULTI_HOT, 128, "13-512-256-128", "1024-1024-512-256-1"),
        *("dcnv2", 65536, "rowwise_adagrad", 0.005),
    ),
    "dlrm_operator_benchmark": (
        *(",".join(["1000000"] * 8), ",".join(["100"] * 8), 64, "512-512-64", "1024-1024-1024-1"),
        *("dot", 2048, "sgd", 0.1),
    ),
}


# layers, width, heads, KV heads, FFN, vocabulary, length
TRANSFORMERS = {
    "gpt2": (12, 768, 12, 12, 3072, 50257, 1024),
    "gpt2_medium": (24, 1024, 16, 16, 4096, 50257, 1024),
    "gpt2_large": (36, 1280, 20, 20, 5120, 50257, 1024),
    "gpt2_xl": (48, 1600, 25, 25, 6400, 50257, 1024),
    "megatron_1_7b": (24, 2304, 24, 24, 9216, 51200, 2048),
    "megatron_3_6b": (30, 3072, 32, 32, 12288, 51200, 2048),
    "megatron_7_5b": (36, 4096, 32, 32, 16384, 51200, 2048),
    "megatron_18b": (40, 6144, 48, 48, 24576, 51200, 2048),
    "megatron_39b": (48, 8192, 64, 64, 32768, 51200, 2048),
    "gpt3_175b": (96, 12288, 96, 96, 49152, 51200, 2048),
    "llama3_8b": (32, 4096, 32, 8, 14336, 128256, 8192),
}
# What the publishers count: GPT-2's checkpoints and Llama 3 8B to the last one, Megatron in billions.
COUNTS = {
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "llama3_8b": 8_030_261_248,
}
BILLIONS = {
    "megatron_1_7b": 1.7,
    "megatron_3_6b": 3.6,
    "megatron_7_5b": 7.5,
    "megatron_18b": 18.4,
    "megatron_39b": 39.1,
}


def composed(*overrides: str) -> RunConfig:
    register_schema()
    sys.path.insert(0, str(ROOT / "launch" / "plugins"))
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("config", overrides=list(overrides))
    config.run_dir = ""
    return typed(config)


@pytest.mark.parametrize(("group", "option"), TASK_FILES)
def test_every_file_composes_and_passes_the_rules(group: str, option: str, tmp_path: Path) -> None:
    overrides = [f"{group}={option}"]
    if (group, option) in {("model", "dlrm_operator_benchmark"), ("model", "dlrm_mlperf_dcnv2")}:
        overrides.append("data=random")
    if option == "adam":
        overrides.append("trainer.device=cuda")
    if (group, option) in {("data", "text"), ("engine", "deepspeed"), ("optim", "adamw")}:
        overrides.insert(0, "model=transformer_tiny")
    config = composed(*overrides)
    if config.data.kind == "criteo":
        config.data.path = str(tmp_path)
    check(config)


def test_no_group_was_forgotten() -> None:
    assert {path.name for path in CONFIGS.iterdir() if path.is_dir()} == {*TASK_GROUPS, "hydra"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_carry_the_published_numbers(name: str) -> None:
    rows, multi_hot, dim, bottom, top, interaction, batch, optimizer, lr = PUBLISHED[name]
    config = composed(f"model={name}", "data=random")
    model = config.model
    assert ",".join(map(str, model.table_rows)) == rows
    assert (model.multi_hot_sizes and ",".join(map(str, model.multi_hot_sizes))) == multi_hot
    assert model.embedding_dim == dim
    assert "-".join(map(str, [model.num_dense, *model.bottom_mlp])) == bottom
    assert "-".join(map(str, model.top_mlp)) == top
    assert model.interaction == interaction
    assert (config.data.batch_size, config.optim.name, config.optim.lr) == (batch, optimizer, lr)


def test_mlperf_has_three_cross_layers_of_rank_512_and_its_eps() -> None:
    config = composed("model=dlrm_mlperf_dcnv2", "data=random")
    assert (config.model.dcn_layers, config.model.dcn_low_rank, config.optim.eps) == (3, 512, 1e-8)


@pytest.mark.parametrize(
    ("name", "rows"), [("dlrm_kaggle", 33_762_577), ("dlrm_terabyte", 49_126_297), ("dlrm_mlperf_dcnv2", 204_184_588)]
)
def test_total_rows_are_the_published_totals(name: str, rows: int) -> None:
    assert sum(composed(f"model={name}").model.table_rows) == rows


def test_what_is_set_by_hand_wins_over_the_recipe() -> None:
    config = composed("model=dlrm_kaggle", "data.batch_size=64", "optim=adagrad", "optim.lr=0.3")
    assert (config.data.batch_size, config.optim.name, config.optim.lr) == (64, "adagrad", 0.3)


def test_the_operator_switch_follows_the_mode_unless_set() -> None:
    assert composed("comm=baseline").comm.embedding_all_to_all == "baseline"
    assert composed("comm=fused").comm.embedding_all_to_all == "fused"
    assert composed("comm=fused", "comm.embedding_all_to_all=baseline").comm.embedding_all_to_all == "baseline"


def test_help_names_keys_that_exist() -> None:
    template = OmegaConf.load(CONFIGS / "config.yaml").hydra.help.template
    named = set(re.findall(r"\b(?:trainer|data|optim|comm|model|hydra)\.\w+(?:\.\w+)*", template))
    assert len(named) > 10
    assert named <= {*known_keys(), *HYDRA_KEYS}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_carry_the_published_numbers(name: str) -> None:
    config = composed(f"model={name}")
    shape = architecture(config.model)
    found = (
        shape.layers,
        shape.width,
        shape.heads,
        shape.num_kv_heads,
        shape.ffn_width,
        shape.vocabulary,
        shape.max_length,
    )
    assert found == TRANSFORMERS[name]
    assert (config.optim.name, config.optim.betas, config.optim.weight_decay) == ("adamw", [0.9, 0.95], 0.1)
    assert (config.optim.clip_norm, config.optim.decay, config.optim.warmup_steps) == (1.0, "cosine", 2000)
    if name in COUNTS:
        assert shape.parameter_count() == COUNTS[name]
    if name in BILLIONS:
        assert round(shape.parameter_count() / 1e9, 1) == pytest.approx(BILLIONS[name], abs=0.06)


def test_gpt2_has_the_published_learning_rates() -> None:
    assert (composed("model=gpt2").optim.lr, composed("model=gpt2").optim.min_lr) == (6e-4, 6e-5)


def test_a_model_brings_its_data_unless_other_data_is_asked_for() -> None:
    assert composed("model=gpt2").data.kind == "text"
    assert composed("model=gpt2", "data=random").data.kind == "random"
    assert composed().data.kind == "synthetic"


def test_help_lists_every_option_of_every_group() -> None:
    text = str(OmegaConf.load(CONFIGS / "config.yaml").hydra.help.template)
    groups = text[text.index("Groups (") : text.index("Keys used most")]
    listed: dict[str, set[str]] = {}
    group = ""
    for line in filter(str.strip, groups.splitlines()[1:]):
        group = group if line.startswith(" " * 12) else line.split()[0]
        listed.setdefault(group, set()).update(re.findall(r"\w+", line))
    for name, option in TASK_FILES:
        assert option in listed[name], (name, option)
