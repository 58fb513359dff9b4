"""Preference training from a model folder and a file of pairs: one command, its plan, and what is refused.

Its loss is tested with those of the other objectives (test_objectives.py).
"""

from __future__ import annotations

import json
import shutil
from math import log
from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="a model's tokenizer is read with the library `tokenizers`")
pytest.importorskip("transformers", reason="the base models are those of transformers")

from safetensors.torch import load_file, save_file

from tests.helpers import hf_models
from tests.helpers.chats import CHATML, conversation, write_tokenizer
from tests.helpers.launch import command, run
from tests.helpers.objectives import Pairs, config_of, trainer_on
from trainer import Trainer, UserError
from trainer.config.parallel import MeshShape
from trainer.plan.machine import find_machine
from trainer.plan.plan import make_plan

ADAPTERS = ["train.objective=dpo", "objective.beta=0.5", "lora.rank=4", "lora.alpha=8"]
SECOND_MODEL = ["train.objective=dpo", "objective.beta=0.5", "lora.rank=0"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.folder_of(tmp_path_factory.mktemp("dpo") / "base", "llama")


def test_plan_includes_the_reference(base: Path, tmp_path: Path) -> None:
    machine, shape = find_machine("h100", None, 1), MeshShape(1, 1)
    pairs, tokens, adapted = (
        make_plan(config_of(base, tmp_path, *own), shape, machine) for own in (SECOND_MODEL, ["lora.rank=0"], ADAPTERS)
    )
    weights = 4 * pairs.num_parameters
    assert pairs.memory.peak.by_kind["parameters"] == 2 * weights == 2 * tokens.memory.peak.by_kind["parameters"]
    assert pairs.tokens == 2 * tokens.tokens, "of a pair both"
    assert pairs.flops == pytest.approx(2 * 4 / 3 * tokens.flops)
    assert adapted.memory.peak.by_kind["parameters"] < 1.2 * weights


def test_different_reference_is_rejected(base: Path, tmp_path: Path) -> None:
    trainer = trainer_on(Pairs(), config_of(base, tmp_path / "run", *SECOND_MODEL, "train.steps=1"))
    assert trainer.fit() == 0
    trainer.close()
    other = shutil.copytree(base, tmp_path / "other") / "model.safetensors"
    save_file({name: 1.01 * tensor for name, tensor in load_file(other).items()}, other, {"format": "pt"})
    trainer = trainer_on(Pairs(), config_of(other.parent, tmp_path / "run", *SECOND_MODEL, "train.steps=2"))
    with pytest.raises(UserError, match=rf"train\.init_from={other.parent}"):
        trainer.fit()
    trainer.close()


def test_only_a_trainer_of_objectives_accepts_pairs(base: Path, tmp_path: Path) -> None:
    config = config_of(base, tmp_path / "run", *ADAPTERS)
    kind = config.trainer_class(Trainer)
    assert kind is not Trainer
    with pytest.raises(UserError, match=r"^train\.objective=dpo"):
        Trainer(config)
    with pytest.raises(UserError, match=r"^train\.objective=tokens"):
        kind(config_of(base, tmp_path / "run", "lora.rank=4"))


@pytest.mark.campaign
def test_one_command_trains_a_model_folder_on_a_file_of_pairs(tmp_path: Path) -> None:
    folder = hf_models.folder_of(tmp_path / "model", "llama", vocab_size=128)
    write_tokenizer(folder, CHATML, eos_token="<|im_end|>")
    pairs = tmp_path / "pairs.jsonl"
    lines = [
        {"prompt": conversation(asked)}
        | {kind: [{"role": "assistant", "content": text}] for kind, text in (("chosen", good), ("rejected", bad))}
        for asked, good, bad in (("Hi", "Yes", "No"), ("Bye", "No", "Yes"), ("two and two", "four", "two"))
    ]
    pairs.write_text("".join(json.dumps(line) + "\n" for line in lines * 4))
    settings = ["recipe=dpo", f"model.path={folder}", f"data.path={pairs}", f"data.cache_dir={tmp_path / 'cache'}"]
    settings += ["data.seq_len=64", "train.epochs=6", "train.global_batch_size=4", "optim.lr=1e-2", "run.threads=1"]
    ran = run(tmp_path / "run", *settings, "lora.rank=4")
    assert ran.train("accuracy")[-1] == 1.0 > ran.train("accuracy")[0]
    assert ran.train("loss")[0] == pytest.approx(log(2)), "at first the model is its reference"
    assert ran.train("loss")[-1] < 0.5 * log(2)
    shown = [line for line in ran.out.splitlines() if line.startswith("step ")]
    for name in ("accuracy", "margin", "reward_chosen", "reward_rejected"):
        assert all(f" {name} " in line for line in shown)
    evaluated = command("trainer.evaluate", tmp_path / "run", f"data.eval_path={pairs}", "--json")
    assert json.loads(evaluated.out)["accuracy"] == 1.0
    wrong = run(tmp_path / "other", *settings, "train.objective=tokens", code=2)
    assert "train.objective" in wrong.err
    assert not (tmp_path / "other").exists()
