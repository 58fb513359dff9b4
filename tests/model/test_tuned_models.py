"""Fine-tuning of models built by transformers: adapters, preferences and texts are those of peft and transformers."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra `transformers` is not installed")

from safetensors.torch import load_file

from tests.helpers.adapters import plain_loop
from tests.helpers.hf_models import KINDS, folder_of, load_with_transformers, overrides
from tests.helpers.objectives import SEQ_LEN, Pairs, global_batches, log_probabilities, trainer_on
from trainer import Trainer, generate_batch, load_config, load_weights
from trainer.export import command_line as export
from trainer.model.lora import parse_adapter
from trainer.model.parameters import local

pytestmark = pytest.mark.campaign

NUM_STEPS = 3
ADAPTED = ["lora.rank=4", "lora.alpha=8", "optim.lr=1e-2", f"train.steps={NUM_STEPS}"]
TRAINED = [kind for kind in KINDS if kind != "mamba"]
WHOLE_LOGITS = ("gemma2", "granite")
"""Models that change the output of their head."""


def adapters_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: local(p.detach()).clone() for name, p in trainer.model.named_parameters() if parse_adapter(name)}


def exported(run: Path, out: Path, *how: str) -> Path:
    assert export([str(run), str(out), *how]) == 0
    return out


def with_adapters(source: Path, adapter: Path, first: dict[str, torch.Tensor]) -> tuple[Any, list[Any]]:
    """Return peft's model with these adapters, in the order of the layers, and what it trains."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig.from_pretrained(adapter)
    settings.inference_mode = False
    model = get_peft_model(load_with_transformers(source)[0].train(), settings)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter, weight in zip(trained, first.values(), strict=True):
            parameter.copy_(weight)
    return model, trained


@pytest.mark.parametrize("kind", [*TRAINED, "auto qwen3", "auto qwen3_moe"])
def test_adapters_of_any_model_equal_pefts(kind: str, tmp_path: Path) -> None:
    """Losses, tensors of the export, logits, and merged weights bit for bit."""
    pytest.importorskip("peft", reason="the library that adapters are for: pip install peft")
    from peft import PeftModel

    name, _, of_folder = kind.rpartition(" ")
    source = folder_of(tmp_path / "source", of_folder)
    config = load_config("llama_small", overrides(source, *ADAPTED, f"run.dir={tmp_path / 'run'}", name=name or "hf"))
    trainer = Trainer(config)
    batches = list(islice(iter(trainer.build_loader()), NUM_STEPS * trainer.num_micro_batches))
    first = adapters_of(trainer)
    losses = [record.loss for record in trainer.steps()]
    trainer.save_checkpoint(wait=True)
    trainer.close()
    adapter = exported(tmp_path / "run", tmp_path / "adapter")
    merged, report = load_with_transformers(exported(tmp_path / "run", tmp_path / "merged", "--merged"))
    assert not any(report.values()), report

    loaded = PeftModel.from_pretrained(load_with_transformers(source)[0], adapter)
    tensors = load_file(adapter / "adapter_model.safetensors")
    theirs = {key.replace(".default", ""): w for key, w in loaded.state_dict().items() if "lora_" in key}
    assert theirs.keys() == tensors.keys()
    assert all(torch.equal(weight, tensors[key]) for key, weight in theirs.items())
    assert any(bool(weight.any()) for key, weight in tensors.items() if "lora_B" in key)
    tokens = torch.randint(3, 257, (2, 24), generator=torch.Generator().manual_seed(1))
    logits, ours = loaded(tokens).logits, load_weights(tmp_path / "run")(tokens)
    torch.testing.assert_close(ours, logits, rtol=0, atol=2e-6 * float(logits.detach().abs().max()))
    for key, weight in loaded.merge_and_unload().state_dict().items():
        assert torch.equal(weight, merged.state_dict()[key]), key

    model, trained = with_adapters(source, adapter, first)
    expected = plain_loop(model, trained, batches, [config.optim.lr] * NUM_STEPS, config)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)


BETA = 0.1


@pytest.mark.parametrize("adapted", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gpt2", "auto qwen3"])
def test_preferences_of_any_model_follow_the_formula(kind: str, adapted: bool, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the library that adapters are for: pip install peft")
    name, _, of_folder = kind.rpartition(" ")
    source = folder_of(tmp_path / "source", of_folder, vocab_size=263)
    own = ["train.objective=dpo", f"objective.beta={BETA}", f"data.seq_len={SEQ_LEN}", "train.global_batch_size=4"]
    own += ["lora.rank=4", "lora.alpha=8"] if adapted else []
    config = load_config("llama_small", overrides(source, *own, f"run.dir={tmp_path / 'run'}", name=name or "hf"))
    trainer = trainer_on(Pairs(), config)
    batches, first = [batch for _, batch in global_batches(trainer)], adapters_of(trainer)
    trainer.close()
    trainer = trainer_on(Pairs(), config)
    losses = [record.loss for record in trainer.steps()]
    trainer.save_checkpoint(wait=True)
    trainer.close()

    reference, _ = load_with_transformers(source)
    model, trained = load_with_transformers(source)[0], None
    if adapted:
        model, trained = with_adapters(source, exported(tmp_path / "run", tmp_path / "out"), first)
    # In fp64, since in fp32 they are off by 5e-7 themselves.
    model, reference = model.double().train(), reference.double()
    parameters = trained or [*model.parameters()]
    optimizer = torch.optim.AdamW(parameters, config.optim.lr, (0.9, 0.95), 1e-8, weight_decay=0.0)
    expected = []
    for batch in batches:
        ours, before = (log_probabilities(m(batch["tokens"]).logits, batch["targets"]) for m in (model, reference))
        rewards = BETA * (ours - before.detach())
        loss = -torch.nn.functional.logsigmoid(rewards[0::2] - rewards[1::2]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in TRAINED if kind not in WHOLE_LOGITS])
def test_greedy_text_of_tuned_models_equals_transformers(kind: str, adapted: bool, tmp_path: Path) -> None:
    """For runs with adapters, from the merged export; for models with a window, past that window."""
    source = folder_of(tmp_path / "source", kind)
    own = ["optim.lr=1e-2", f"run.dir={tmp_path / 'run'}", *(["lora.rank=4"] if adapted else [])]
    trainer = Trainer(load_config("llama_small", overrides(source, *own)))
    assert trainer.fit() == 0
    trainer.close()
    out = exported(tmp_path / "run", tmp_path / "out", *(["--merged"] if adapted else []))
    prompt = [5, 99, 17, 3, 140]
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = load_with_transformers(out)[0].generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
    for folder in (tmp_path / "run", out):
        assert generate_batch(load_weights(folder), [prompt], 40)[0].tokens == expected
