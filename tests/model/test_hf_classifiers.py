"""transformers models with a new head: their scores, and their exports, which transformers' classifiers load."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
pytest.importorskip("tokenizers", reason="a model's tokenizer is read with the library `tokenizers`")

import torch
from transformers import AutoModelForSequenceClassification

from tests.helpers.cases import campaign_except, in_campaign
from tests.helpers.chats import CHATML, write_tokenizer
from tests.helpers.hf_models import folder_of
from tests.helpers.objectives import write_records
from trainer import load_config, load_weights, run
from trainer.export import export_checkpoint

OTHERS = ("llama", "qwen3", "gpt2", "qwen3_moe", "gemma3", "mistral", "phi3", "gpt_oss", "deepseek_v3")


def settings_of(folder: Path, kind: str, name: str) -> list[str]:
    """Return the settings of a classifier of three classes that starts from a model of `kind`."""
    model = write_tokenizer(folder_of(folder / "base", kind), CHATML, eos_token="<|im_end|>")
    records = [{"text": text, "label": label} for label, text in enumerate(["Hi there", "Bye", "Hello so"])]
    own = [f"model.name={name}", f"model.path={model}", f"data.path={write_records(folder / 'x.jsonl', records)}"]
    own += ["objective.num_labels=3", "data.seq_len=16", "train.epochs=null", "train.steps=2", "optim.lr=1e-2"]
    own += ["train.global_batch_size=2", "train.micro_batch_size=2", "schedule.warmup_steps=0", "run.threads=1"]
    return [*own, f"data.cache_dir={folder / 'cache'}", f"run.dir={folder / 'run'}", "data.holdout=0", "run.device=cpu"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gemma2", "hf"),
        *in_campaign(("deepseek_v3", "auto"), *((kind, "hf") for kind in OTHERS)),
    ],
)
def test_scores_are_those_of_the_export(kind: str, name: str, tmp_path: Path) -> None:
    """Includes models whose classifier omits what follows the output projection, such as Gemma's cap on logits, and a
    native one whose values are narrower than its keys.
    """
    settings = settings_of(tmp_path, kind, name)
    assert load_config("classify", settings).model.name == ("hf" if name == "hf" else kind)
    assert run.main(["recipe=classify", *settings]) == 0
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    tokens = torch.arange(2, 26).view(2, 12)
    theirs, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        ours = load_weights(tmp_path / "run")(tokens)
        assert ours.shape == (2, 12, 3)
        for last in (3, 12):
            found = torch.cat([theirs.eval()(tokens[row : row + 1, :last]).logits for row in range(2)])
            torch.testing.assert_close(found, ours[:, last - 1], rtol=1e-5, atol=1e-5 * float(ours.abs().max()))


@pytest.mark.parametrize("kind", campaign_except(["granite", "mamba"], ["granite"]))
def test_models_without_such_a_classifier_are_refused(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["recipe=classify", *settings_of(tmp_path, kind, "hf")]) == 2
    assert f"model_type={kind}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
