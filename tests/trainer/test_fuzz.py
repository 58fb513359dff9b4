"""Random tasks on random meshes, killed and resumed: see tests/fuzz.py, which also runs single seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="some of the drawn models are transformers models")

from tests.fuzz import CONTEXT_MESHES, EXPERT_MESHES, MESHES, draw, parse_seeds, run_case, write_inputs

SEEDS = range(40)
"""Those of the campaign."""


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("material"))


def test_seeds_are_deterministic_and_cover_all_options(tmp_path: Path) -> None:
    cases = [draw(seed, tmp_path) for seed in range(200)]
    assert cases == [draw(seed, tmp_path) for seed in range(200)]
    assert {case.mesh for case in cases} == {*MESHES, *CONTEXT_MESHES, *EXPERT_MESHES}
    text = " ".join(str(case) for case in cases)
    models, data = ["llama", "gpt2", "qwen3", "moe", "hf"], ["chat", "dpo", "mixture", "masked", "apart"]
    for word in [*models, *data, "sgd", "muon", "lora", "dropout", "ema", "bf16"]:
        assert word in text, word
    for kind in ("kill one", "kill all", "stop"):
        assert kind in text
    assert 60 < sum(case.stays_on_its_mesh for case in cases) < 160


def test_parsing_of_seeds() -> None:
    assert parse_seeds("3,8,20-22") == [3, 8, 20, 21, 22]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [10])
def test_disturbed_run_equals_the_undisturbed_one(seed: int, material: Path, tmp_path: Path) -> None:
    run_case(draw(seed, material), tmp_path)


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", SEEDS)
def test_disturbed_runs_equal_the_undisturbed_ones(seed: int, material: Path, tmp_path: Path) -> None:
    run_case(draw(seed, material), tmp_path)
