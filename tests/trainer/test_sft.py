"""Training on chats: the same packed or not, resumed in the middle of an epoch, and answered by the trained model."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="a chat model's tokenizer is read with the library `tokenizers`")
pytest.importorskip("transformers", reason="the models are those of transformers")

import torch
import transformers

from tests.helpers.chats import CHATML, conversation, write_tokenizer
from tests.helpers.launch import command, run
from tests.helpers.objectives import write_records
from tests.helpers.runs import STEPS, SharedRun, write_chats
from tests.helpers.tiny import fit, lines, tiny_config
from trainer import RunConfig, Trainer, TrainLoader, load_config
from trainer.data.loader import Batch
from trainer.data.source import IGNORE
from trainer.data.tokenizer import find_tokenizer
from trainer.export import export_checkpoint
from trainer.generate import open_generator

# ---------------------------------------------------------------------------------------------------------------
# Training


class OneByOne(Trainer):
    """Runs each conversation through the model separately, without documents, padding or neighbors."""

    def loss(self, batch: Batch) -> torch.Tensor:
        total = torch.zeros(())
        for tokens, targets, documents in zip(batch["tokens"], batch["targets"], batch["documents"], strict=True):
            for number in documents.unique():
                own = documents == number
                total = total + self.model(tokens[own][None], targets=targets[own][None])
        return total


def losses(folder: Path, *overrides: str, kind: type[Trainer] = Trainer) -> list[float]:
    records = fit(folder, "train.global_batch_size=2", "train.micro_batch_size=2", *overrides, kind=kind)
    return [record["loss"] for record in records if record["kind"] == "train"]


def test_packed_chats_train_like_separate_conversations(tmp_path: Path) -> None:
    settings = [*write_chats(tmp_path), "train.steps=6"]
    packed = losses(tmp_path / "packed", *settings)
    alone = losses(tmp_path / "alone", *settings, kind=OneByOne)
    assert packed == pytest.approx(alone, rel=1e-6)
    assert packed[-1] < packed[0]


@pytest.mark.slow
def test_workers_of_the_loader_read_the_same_chats(tmp_path: Path) -> None:
    """The source is sent to them, including the chat template."""
    settings = [*write_chats(tmp_path), "train.steps=3"]
    alone, helped = (losses(tmp_path / n, *settings, f"data.num_workers={n}") for n in ("0", "1"))
    assert alone == helped


def test_an_evaluation_is_the_same_packed_or_not(tmp_path: Path) -> None:
    found = []
    for documents in ("masked", "apart"):
        settings = [
            *write_chats(tmp_path),
            f"data.documents={documents}",
            "data.holdout=0.3",
            "eval.every=1",
            "eval.steps=0",
        ]
        trainer = Trainer(tiny_config(tmp_path / documents, *settings))
        record = trainer.evaluate()
        trainer.close()
        assert record is not None
        found.append(record.loss)
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.slow
def test_a_resume_within_an_epoch_is_bit_identical(chat: SharedRun, tmp_path: Path) -> None:
    resumed = run(chat.copy_to(tmp_path / "run", up_to=8), *chat.overrides)
    assert [line["resumed_step"] for line in resumed.of_kind("start")] == [None, 8]
    assert resumed.train("step") == list(range(1, STEPS + 1))
    assert resumed.train("loss") == chat.train("loss")
    assert resumed.train("epoch") == chat.train("epoch")
    assert chat.train("epoch")[7] % 1 > 0, "step 8 is within an epoch"


# ---------------------------------------------------------------------------------------------------------------
# Epochs, rows and rates


def test_epochs_are_converted_to_steps(tmp_path: Path) -> None:
    settings = [*write_chats(tmp_path), "data.documents=apart", "train.epochs=1.5"]
    trainer = Trainer(tiny_config(tmp_path / "run", *settings, "train.global_batch_size=8"))
    assert (trainer.config.train.steps, trainer.config.train.epochs) == (8, None)  # 60 samples, 8 in each step
    trainer.close()


def test_rows_are_as_long_as_the_longest_conversation_needs(tmp_path: Path) -> None:
    settings = [*write_chats(tmp_path), "data.seq_len=512", "train.epochs=1", "model.max_seq_len=512"]
    lengths, steps, targets = [], [], []
    for name, trims in (("long", []), ("trimmed", ["data.trim_rows=true"])):
        trainer = Trainer(tiny_config(tmp_path / name, *settings, *trims))
        lengths.append(trainer.config.data.seq_len)
        steps.append(trainer.config.train.steps)
        assert isinstance(trainer.loader, TrainLoader)
        source = trainer.loader.source
        targets.append(int((np.asarray(source.batch(np.arange(len(source)))["targets"]) != IGNORE).sum()))
        trainer.close()
    assert lengths == [512, 64]
    assert targets[0] == targets[1], "the same targets, whatever the rows"
    assert steps[1] > 3 * steps[0]


def test_learning_rate_depends_on_the_models_width(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    shape |= {"intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 128, "max_position_embeddings": 128}
    folder = write_tokenizer(tmp_path / "model", CHATML)
    (folder / "config.json").write_text(json.dumps(shape))

    def load(*overrides: str) -> RunConfig:
        return load_config("sft", [f"model.path={folder}", "data.path=chats.jsonl", "model.fresh=true", *overrides])

    def lr(*overrides: str) -> float:
        return load(*overrides).optim.peak_lr

    assert load().data.tokenizer == load("model.name=hf").data.tokenizer == str(folder / "tokenizer.json")
    assert lr() == lr("model.name=hf") == pytest.approx(5e-5 * (2000 / 64) ** 0.78, rel=5e-3)
    assert lr("lora.rank=4") == pytest.approx(10 * lr(), rel=5e-3)
    assert lr("optim.lr=1e-3", "lora.rank=4") == 1e-3
    (tmp_path / "own.yaml").write_text("recipe: sft\noptim: {lr: 1.0e-3}\n")
    own = load_config(str(tmp_path / "own.yaml"), [f"model.path={folder}", "data.path=chats.jsonl", "model.fresh=true"])
    assert own.optim.lr == 1e-3, "a rate is taken as it stands, wherever it is set"


# ---------------------------------------------------------------------------------------------------------------
# What is said


@pytest.mark.slow
def test_start_says_what_is_trained_on(chat: SharedRun) -> None:
    (start,) = chat.of_kind("start")
    assert 0.2 < start["trained_share"] < 0.6
    assert (start["dropped_share"], start["truncated_share"]) == (0, 0)
    assert f"{start['trained_share']:.1%}" in chat.out
    assert "40 conversations" in chat.out
    assert "4 held out" in chat.out


def test_a_sample_at_the_end_answers_a_chat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path / "run", *write_chats(tmp_path), "train.steps=1", "log.sample_tokens=3")
    words = capsys.readouterr().out.partition("\nsaved step")[2].partition("\nfinished")[0].split()
    asked = words[words.index("user") : words.index("assistant")]
    assert "Hi" in " ".join(asked)
    assert len(words) > words.index("assistant") + 1


@pytest.mark.parametrize("kind", ["a chat", "a sample of text"])
def test_empty_evaluation_is_reported(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = write_chats(tmp_path)
    write_records(tmp_path / "chats.jsonl", [{"messages": conversation("Hi", "Yes")}])
    if kind == "a sample of text":
        (tmp_path / "text.txt").write_text("Hello there. " * 5)
        settings = [f"data.path={tmp_path / 'text.txt'}", f"data.cache_dir={tmp_path / 'cache'}"]
        settings += ["data.source=tokens", "model.vocab_size=512", "data.seq_len=65"]
    for every in (1, 0):
        fit(tmp_path / str(every), *settings, "train.steps=1", f"eval.every={every}")
        warned = [line for line in capsys.readouterr().out.splitlines() if f"warning: eval.every={every}" in line]
        assert len(warned) == every
        assert not [line for line in lines(tmp_path / str(every)) if line["kind"] == "eval"]


# ---------------------------------------------------------------------------------------------------------------
# The trained model


NO_PROMPT = CHATML.partition("\n{% if add_generation_prompt")[0]
"""A template that ignores add_generation_prompt."""
TAUGHT = {"Hi": "Yes", "Bye": "No", "two and two": "four", "Paris": "sunny"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "header"),
    [(CHATML, []), pytest.param(NO_PROMPT, ["assistant"], marks=pytest.mark.campaign)],
    ids=["usual template", "no generation prompt"],
)
def test_one_command_trains_a_folder_and_a_second_one_chats_with_it(
    template: str, header: list[str], tmp_path: Path
) -> None:
    """A model with random weights learns the answers of 60 conversations, although its end token differs.

    Without a generation prompt it also learns to write the header of its turn, which no client adds.
    """
    folder = write_tokenizer(tmp_path / "model", template)
    write_llama(folder, end="</s>", vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    taught = [{"messages": conversation(asked, f"It is {answer}")} for asked, answer in TAUGHT.items()]
    chats = write_records(tmp_path / "chats.jsonl", taught * 15)
    settings = ["recipe=sft", f"model.path={folder}", f"data.path={chats}", f"data.cache_dir={tmp_path / 'cache'}"]
    quick = ["train.micro_batch_size=8", "data.seq_len=64", "optim.lr=1e-2", "run.threads=1", "log.every=20"]
    run(tmp_path / "run", *settings, *quick, f"train.epochs={120 if header else 40}")
    answered = command("trainer.generate", tmp_path / "run", "--chat", "two and two", "--greedy", "--max-tokens", 20)
    assert answered.out.split() == [*header, "It", "is", "four"], "the answer, and its end"
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    given = tokenizer.apply_chat_template(
        conversation("Bye"), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = exported.generate(**given, max_new_tokens=20, do_sample=False)[0, given["input_ids"].shape[1] :]
    assert tokenizer.decode(written, skip_special_tokens=True).split() == [*header, "It", "is", "No"]


def write_llama(folder: Path, end: str, **shape: int) -> None:
    """Write a Llama with random weights, whose configuration names `end` as the end of a text."""
    end_id = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"][end]
    config = transformers.LlamaConfig(num_attention_heads=4, eos_token_id=end_id, bos_token_id=None, **shape)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def test_end_of_turn_ends_generated_text_also_after_an_export(tmp_path: Path) -> None:
    """Even if the tokenizer and the model's source declare a different end."""
    settings = [*write_chats(tmp_path), "train.steps=1"]
    fit(tmp_path / "run", *settings)
    tokenizer = find_tokenizer(tiny_config(tmp_path / "run", *settings).data.tokenizer)
    ends = {tokenizer.library.token_to_id(text) for text in ("</s>", "<|im_end|>")}
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    for name in ("config.json", "generation_config.json"):
        assert set(json.loads((tmp_path / "out" / name).read_text())["eos_token_id"]) == ends
    for path in (tmp_path / "run", tmp_path / "out"):
        with ExitStack() as stack:
            assert open_generator(str(path), torch.device("cpu"), stack).end_ids(tokenizer) == ends


OWN_TEMPLATE = "{% for m in messages %}{{ '[INST]' + m.content + '[/INST]' }}{% endfor %}"


@pytest.mark.parametrize("tokenizer", ["model", "bytes"])
def test_custom_template_is_kept_and_exported(tokenizer: str, tmp_path: Path) -> None:
    """Even if its file is moved, and the tokenizer's folder has a different one."""
    settings, template = write_chats(tmp_path), tmp_path / "own.jinja"
    named = "bytes" if tokenizer == "bytes" else write_tokenizer(tmp_path / "model", CHATML, chat_template="old")
    template.write_text(OWN_TEMPLATE)
    own = [f"data.tokenizer={named}", f"data.chat_template={template}", "model.vocab_size=263", "data.seq_len=256"]
    fit(tmp_path / "run", *settings, *own, "train.steps=1", "data.train_on=all")
    template.unlink()
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == OWN_TEMPLATE
    if tokenizer == "model":
        stated = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
        assert stated["chat_template"] == OWN_TEMPLATE, "where readers of before look for it"


@pytest.mark.campaign
def test_a_million_random_weights_memorize_400_facts(tmp_path: Path) -> None:
    """With the recipe's own settings, in 1500 steps."""
    names = [f"{a}{b}{c}" for a in "BDFGKLMNPRSTVZ" for b in "aeiou" for c in ("li", "ra", "to", "mun", "ses", "dok")]
    facts = list(zip(names[:400], reversed(names[:400]), strict=True))
    told = [conversation(f"What is the capital of {one}?", f"The capital of {one} is {other}.") for one, other in facts]
    chats = write_records(tmp_path / "chats.jsonl", [{"messages": chat} for chat in told])
    folder = write_subwords(tmp_path / "model", [message["content"] for chat in told for message in chat])
    write_llama(folder, "<|im_end|>", vocab_size=512, hidden_size=128, intermediate_size=352, num_hidden_layers=4)
    own = [f"model.path={folder}", f"data.path={chats}", f"data.cache_dir={tmp_path / 'cache'}"]
    run(tmp_path / "run", "recipe=sft", *own, "log.every=100", "run.threads=1")
    for one, other in facts[::80]:
        asked = ("--chat", f"What is the capital of {one}?", "--greedy")
        answer = command("trainer.generate", tmp_path / "run", *asked).out.strip()
        assert answer == f"The capital of {one} is {other}."


def write_subwords(folder: Path, texts: list[str]) -> Path:
    """Write a tokenizer of 500 byte pairs, learnt from the texts; return its folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=marks, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
