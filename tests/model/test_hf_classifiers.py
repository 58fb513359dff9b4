"""transformers models with a new head: their scores, and their exports, which transformers' classifiers load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the extra `transformers` is not installed")

import torch
from transformers import AutoModelForSequenceClassification

from tests.helpers.hf_models import folder_of
from tests.helpers.native_models import Memory
from trainer import UserError, load_config
from trainer.config.location import locate
from trainer.model.network import build_network
from trainer.weights.exporting import ModelFiles, export, read_model_files
from trainer.weights.loading import load_unsharded, open_weights
from trainer.weights.sources import fill

CLASSIFIER = ["model.name=hf", "data.path=x.jsonl", "objective.num_labels=3", "train.micro_batch_size=1"]


def classifier_of(folder: Path, name: str = "hf") -> tuple[Any, Any]:
    """Return the configuration and the model of a folder's weights with a head for three classes."""
    config = load_config("classify", [f"model.path={folder}", *CLASSIFIER, f"model.name={name}"])
    model = build_network(config)
    source = open_weights(locate(str(folder)), config.recipe, config.model, "path")
    load_unsharded(model, config.recipe, source, torch.device("cpu"))
    head = next(p for name, p in model.named_parameters() if name.endswith(".score"))
    head.data.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(0)))
    fill(model, source)  # does not need the head, which `source` lacks
    return config, model


@pytest.mark.parametrize(
    "kind",
    [
        "gemma2",
        *(
            pytest.param(kind, marks=pytest.mark.campaign)
            for kind in ("llama", "qwen3", "gpt2", "qwen3_moe", "gemma3", "mistral", "phi3", "gpt_oss", "deepseek_v3")
        ),
    ],
)
def test_scores_are_those_of_the_export(kind: str, tmp_path: Path) -> None:
    """Includes models whose classifier omits what follows the output projection, such as Gemma's cap on logits."""
    check_export(kind, "hf", tmp_path)


def test_scores_of_a_native_model_whose_values_are_narrower_than_its_keys(tmp_path: Path) -> None:
    assert check_export("deepseek_v3", "auto", tmp_path) == "deepseek_v3"


def check_export(kind: str, name: str, tmp_path: Path) -> str:
    """Compare our scores with those of transformers' classifier on the export; return the name of the recipe."""
    config, model = classifier_of(folder_of(tmp_path / "base", kind), name)
    tokens = torch.arange(2, 26).view(2, 12)
    with torch.no_grad():
        ours = model(tokens)
    assert ours.shape == (2, 12, 3)
    model_files = ModelFiles()
    model_files.files = read_model_files(tmp_path / "base")
    export(Memory(model.state_dict()), config.recipe, config.model, tmp_path / "out", model_files=model_files)
    theirs, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        for last in (3, 12):
            found = torch.cat([theirs.eval()(tokens[row : row + 1, :last]).logits for row in range(2)])
            torch.testing.assert_close(found, ours[:, last - 1], rtol=1e-5, atol=1e-5 * float(ours.abs().max()))
    return str(config.recipe.name)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("granite", "there is none"),
        ("mamba", "there is none"),
    ],
)
def test_models_without_such_a_classifier_are_refused(kind: str, reason: str, tmp_path: Path) -> None:
    config = load_config("classify", [f"model.path={folder_of(tmp_path / 'base', kind)}", *CLASSIFIER])
    with pytest.raises(UserError, match=f"a new head needs a sequence classifier .* for model_type={kind}; {reason}"):
        build_network(config)
