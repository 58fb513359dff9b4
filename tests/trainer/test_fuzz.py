"""Random tasks on random meshes, killed and resumed: see tests/fuzz.py, which also runs single seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="some of the drawn models are transformers models")

from tests.fuzz import CONTEXT_MESHES, EXPERT_MESHES, MESHES, TENSOR_MESHES, draw, parse_seeds, run_case, write_inputs

SEEDS = range(29)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def test_seeds_are_deterministic_and_cover_all_options(tmp_path: Path) -> None:
    cases = [draw(seed, tmp_path) for seed in range(200)]
    assert cases == [draw(seed, tmp_path) for seed in range(200)]
    assert {case.mesh for case in cases} == {*MESHES, *CONTEXT_MESHES, *EXPERT_MESHES, *TENSOR_MESHES}
    text = " ".join(str(case) for case in cases)
    models, data = ["llama", "gpt2", "qwen3", "moe", "hf"], ["chat", "dpo", "mixture", "masked", "apart"]
    features = ["sgd", "muon", "lora", "dropout", "ema", "bf16"]
    missing = [word for word in (*models, *data, *features, "kill one", "kill all", "stop") if word not in text]
    assert missing == []
    assert 60 < sum(case.stays_on_its_mesh for case in cases) < 160
    assert parse_seeds("3,8,20-22") == [3, 8, 20, 21, 22]


@pytest.mark.campaign
@pytest.mark.parametrize("seed", SEEDS)
def test_disturbed_run_equals_the_undisturbed_one(seed: int, inputs: Path, tmp_path: Path) -> None:
    run_case(draw(seed, inputs), tmp_path)
