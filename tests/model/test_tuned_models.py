"""Fine-tuning of models built by transformers: adapters, preferences and chats work as in native models."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra `transformers` is not installed")

from safetensors.torch import load_file

from tests.commands.test_generate import written_here, written_there
from tests.helpers.hf_models import folder_of, load_with_transformers
from tests.helpers.ranks import run_command, run_python_module, run_ranks
from tests.model.test_hf import LR, TRAINED, WHOLE_LOGITS, overrides
from tests.model.test_lora import plain_loop
from tests.trainer.test_dpo import SEQ_LEN, OnPairs, Pairs, log_probabilities
from tests.trainer.test_sft import OneByOne, write_chats
from trainer import Trainer, TrainLoader, evaluate, load_config, load_weights
from trainer.export import command_line as export
from trainer.model.lora import parse_adapter
from trainer.model.parameters import local

NUM_STEPS = 10
ADAPTED = ["lora.rank=4", "lora.alpha=8", "optim.lr=1e-2", f"train.steps={NUM_STEPS}", "optim.max_grad_norm=1.0"]


def adapt(source: Path, folder: Path, name: str, more: list[str]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train adapters on a folder to the end; return the losses, and on one rank the adapters that it began with."""
    settings = [*ADAPTED, "train.micro_batch_size=4", f"run.dir={folder}", *more]
    trainer = Trainer(load_config("llama_small", overrides(source, *settings, name=name)))
    first = {name: local(p.detach()).clone() for name, p in trainer.model.named_parameters() if parse_adapter(name)}
    assert trainer.fit() == 0
    trainer.close()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"], first


def batches_of(source: Path, name: str) -> tuple[list[dict[str, torch.Tensor]], Any]:
    settings = [*ADAPTED, "train.micro_batch_size=8", "run.dir=unused"]
    trainer = Trainer(load_config("llama_small", overrides(source, *settings, name=name)))
    found = list(islice(iter(trainer.loader), NUM_STEPS))
    trainer.close()
    return found, trainer.config


def everyday(kinds: list[str], *chosen: str) -> list[Any]:
    return [pytest.param(kind, marks=() if kind in chosen else pytest.mark.campaign) for kind in kinds]


NATIVE = ["auto qwen3", "auto qwen3_moe"]


@pytest.mark.campaign
@pytest.mark.parametrize("kind", everyday([*TRAINED, *NATIVE], "gemma3"))
def test_adapters_of_any_model_equal_pefts(kind: str, tmp_path: Path) -> None:
    """On one rank and two; peft loads the export bit for bit."""
    pytest.importorskip("peft", reason="the library that adapters are for: pip install peft")
    from peft import LoraConfig, PeftModel, get_peft_model

    name, _, of_folder = kind.rpartition(" ")
    source = folder_of(tmp_path / "source", of_folder)
    losses, first = adapt(source, tmp_path / "one", name or "hf", [])
    two, _ = run_ranks(2, adapt, source, tmp_path / "two", name or "hf", [])[0]
    torch.testing.assert_close(two, losses, rtol=1e-6, atol=0)
    for out, *how in (("adapter",), ("merged", "--merged")):
        assert export([str(tmp_path / "one"), str(tmp_path / out), *how]) == 0

    loaded = PeftModel.from_pretrained(load_with_transformers(source)[0], tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    theirs = {key.replace(".default", ""): w for key, w in loaded.state_dict().items() if "lora_" in key}
    assert set(theirs) == set(tensors)
    assert all(torch.equal(weight, tensors[key]) for key, weight in theirs.items())
    tokens = torch.randint(3, 257, (2, 24), generator=torch.Generator().manual_seed(1))
    logits, ours = loaded(tokens).logits, load_weights(tmp_path / "one")(tokens)
    torch.testing.assert_close(ours, logits, rtol=0, atol=2e-6 * float(logits.detach().abs().max()))
    merged, report = load_with_transformers(tmp_path / "merged")
    assert not any(report.values()), report
    for key, weight in loaded.merge_and_unload().state_dict().items():
        assert torch.equal(weight, merged.state_dict()[key]), key

    settings = LoraConfig.from_pretrained(tmp_path / "adapter")
    settings.inference_mode = False
    model = get_peft_model(load_with_transformers(source)[0].train(), settings)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter, weight in zip(trained, first.values(), strict=True):
            parameter.copy_(weight)
    batches, config = batches_of(source, name or "hf")
    expected = plain_loop(model, trained, batches, [1e-2] * NUM_STEPS, config)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    assert any(bool(weight.any()) for key, weight in tensors.items() if "lora_B" in key)


# ---------------------------------------------------------------------------------------------------------------
# Preferences

BETA = 0.1


def prefer(source: Path, folder: Path, name: str, more: list[str]) -> tuple[list[dict[str, Any]], Any]:
    """Train on pairs to the end; return the lines of metrics, and on one rank the adapters that it began with."""
    settings = ["train.objective=dpo", f"dpo.beta={BETA}", f"data.seq_len={SEQ_LEN}", f"run.dir={folder}"]
    settings += [f"train.steps={NUM_STEPS}", "train.global_batch_size=4", "train.micro_batch_size=2", *more]
    trainer = OnPairs(load_config("llama_small", overrides(source, *settings, name=name)))
    first = {name: local(p.detach()).clone() for name, p in trainer.model.named_parameters() if parse_adapter(name)}
    assert trainer.fit() == 0
    trainer.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()], first


def plain_preferences(source: Path, adapters: dict[str, torch.Tensor], exported: Path) -> list[float]:
    """Return the losses of the formula, by transformers and peft.

    In fp64, since in fp32 they are off by 5e-7 themselves; but for experts, whose product has no kernel for it.
    """
    from peft import LoraConfig, get_peft_model

    dtype = torch.float32 if "moe" in (source / "config.json").read_text() else torch.float64
    model, reference = (load_with_transformers(source)[0].to(dtype).train() for _ in range(2))
    if adapters:
        settings = LoraConfig.from_pretrained(exported)
        settings.inference_mode = False
        model = get_peft_model(model, settings).to(dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter, weight in zip(trained, adapters.values(), strict=False):
            parameter.copy_(weight)
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses = []
    config = load_config("llama_small", overrides(source, "train.objective=dpo", f"data.seq_len={SEQ_LEN}"))
    config = replace(config, train=replace(config.train, global_batch_size=4, micro_batch_size=4))
    for batch in islice(iter(TrainLoader.from_config(Pairs(), config, 0, 1, torch.device("cpu"))), NUM_STEPS):
        found, expected = (log_probabilities(m(batch["tokens"]).logits, batch["targets"]) for m in (model, reference))
        rewards = BETA * (found - expected.detach())
        loss = -torch.nn.functional.logsigmoid(rewards[0::2] - rewards[1::2]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.campaign
@pytest.mark.parametrize("adapted", [True, False])
@pytest.mark.parametrize("kind", everyday(["llama", "qwen3", "gemma3", "gpt2", "qwen3_moe", "auto qwen3"], "qwen3"))
def test_preferences_of_any_model_follow_the_formula(
    kind: str, adapted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one rank and two; an evaluation of the run uses the run's reference."""
    pytest.importorskip("peft", reason="the library that adapters are for: pip install peft")
    name, _, of_folder = kind.rpartition(" ")
    source = folder_of(tmp_path / "source", of_folder, vocab_size=263)
    own = ["lora.rank=4", "lora.alpha=8"] if adapted else []
    found, first = prefer(source, tmp_path / "one", name or "hf", [*own, f"eval.every={NUM_STEPS}", "eval.steps=2"])
    losses = [line["loss"] for line in found if line["kind"] == "train"]
    two, _ = run_ranks(2, prefer, source, tmp_path / "two", name or "hf", own)[0]
    torch.testing.assert_close([line["loss"] for line in two if line["kind"] == "train"], losses, rtol=1e-6, atol=0)
    assert export([str(tmp_path / "one"), str(tmp_path / "out")]) == 0
    torch.testing.assert_close(losses, plain_preferences(source, first, tmp_path / "out"), rtol=1e-6, atol=0)
    (of_run,) = [line for line in found if line["kind"] == "eval"]
    assert of_run["margin"] > 0

    subject = evaluate.find_subject(str(tmp_path / "one"), [])
    trainer = evaluate.for_evaluation(OnPairs)(subject.config)
    record = evaluate.evaluate(trainer, subject)
    trainer.close()
    assert record is not None
    assert (record.loss, record["margin"]) == (of_run["loss"], of_run["margin"])


# ---------------------------------------------------------------------------------------------------------------
# Chats


@pytest.mark.slow
@pytest.mark.parametrize("kind", everyday([kind for kind in TRAINED if kind not in WHOLE_LOGITS], "mistral"))
def test_packed_chats_of_any_model_equal_separate_conversations(kind: str, tmp_path: Path) -> None:
    """Attention windows and positions restart with each conversation."""
    pytest.importorskip("tokenizers", reason="a chat model's tokenizer is read with the library `tokenizers`")
    chats = [item for item in write_chats(tmp_path) if not item.startswith("model.")]
    source = folder_of(tmp_path / "source", kind)
    found = []
    for trainer_class, name in ((Trainer, "packed"), (OneByOne, "alone")):
        own = [*chats, "train.steps=6", "train.global_batch_size=2", "train.micro_batch_size=2"]
        trainer = trainer_class(load_config("llama_small", overrides(source, *own, f"run.dir={tmp_path / name}")))
        found.append([record.loss for record in trainer.steps()])
        trainer.close()
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_packed_chats_of_any_model_train_the_same_on_any_mesh(kind: str, tmp_path: Path) -> None:
    """As commands on 1, 2 and 2x2 ranks, resumed on a different mesh within an epoch, evaluated packed and unpacked."""
    pytest.importorskip("tokenizers", reason="a chat model's tokenizer is read with the library `tokenizers`")
    chats = [item for item in write_chats(tmp_path) if not item.startswith("model.")]
    settings = ["recipe=sft", "model.name=hf", f"model.path={folder_of(tmp_path / 'source', kind)}", *chats]
    settings += ["train.epochs=2", "train.global_batch_size=4", "train.micro_batch_size=1", "run.threads=1"]
    settings += ["optim.lr=1e-3", "data.holdout=0.2", "eval.every=4", "eval.steps=0"]
    settings += ["checkpoint.every=3", "checkpoint.keep_last=0", "log.sample_tokens=0"]

    def run(name: str, *further: str) -> tuple[list[float], list[float]]:
        ran = run_command(tmp_path / name, *settings, *further)
        assert ran.exit_code == 0, ran.stderr + ran.stdout
        evaluated = [line["loss"] for line in ran.metrics if line["kind"] == "eval"]
        return ran.train("loss"), evaluated

    def resumed(name: str, *further: str) -> tuple[list[float], list[float]]:
        shutil.copytree(tmp_path / "two", tmp_path / name)
        for saved in sorted((tmp_path / name / "checkpoints").iterdir())[1:]:
            shutil.rmtree(saved)
        return run(name, *further)

    two = run("two", "nproc=2")
    assert len(two[0]) > 4
    assert len(two[1]) > 0
    assert resumed("again", "nproc=2") == two
    assert_as(run("one", "train.micro_batch_size=4"), two)
    assert_as(run("four", "nproc=4", "mesh.replicate=2"), two)
    assert_as(resumed("elsewhere", "nproc=4", "mesh.replicate=2"), two)
    assert_as(resumed("alone", "train.micro_batch_size=2"), two)
    packed, apart = (
        json.loads(run_python_module("trainer.evaluate", tmp_path / "two", f"data.documents={how}", "--json").stdout)
        for how in ("masked", "apart")
    )
    assert apart["loss"] == pytest.approx(packed["loss"], rel=1e-6)


def assert_as(found: tuple[list[float], list[float]], expected: tuple[list[float], list[float]]) -> None:
    for losses, right in zip(found, expected, strict=True):
        assert losses == pytest.approx(right, rel=1e-5)


# ---------------------------------------------------------------------------------------------------------------
# Text


@pytest.mark.campaign
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in TRAINED if kind not in WHOLE_LOGITS])
def test_greedy_text_of_tuned_models_equals_transformers(kind: str, adapted: bool, tmp_path: Path) -> None:
    """For runs with adapters, from the merged export; for models with a window, past that window."""
    source = folder_of(tmp_path / "source", kind)
    own = ["train.steps=3", "optim.lr=1e-2", f"run.dir={tmp_path / 'run'}", *(["lora.rank=4"] if adapted else [])]
    trainer = Trainer(load_config("llama_small", overrides(source, *own)))
    assert trainer.fit() == 0
    trainer.close()
    assert export([str(tmp_path / "run"), str(tmp_path / "out"), *(["--merged"] if adapted else [])]) == 0
    expected = written_there(tmp_path / "out", 40)
    assert written_here(tmp_path / "run", 40) == written_here(tmp_path / "out", 40) == expected
