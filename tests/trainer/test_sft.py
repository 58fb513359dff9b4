"""Training on chats is the same packed or not, on any mesh, and resumed in the middle of an epoch."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="a chat model's tokenizer is read with the library `tokenizers`")

import numpy as np
import torch

from tests.helpers.chats import CHATML, conversation, write_tokenizer
from tests.helpers.ranks import CommandResult, run_command, run_python_module, run_tiny
from tests.helpers.tiny import fit, tiny_config
from tests.project.test_docs import check_fields
from trainer import Trainer, TrainLoader, load_config
from trainer.config import RunConfig
from trainer.data.chat.masking import ChatTokenizer
from trainer.data.loader import Batch
from trainer.data.opening import open_source, resolve_from_data
from trainer.data.prompts import chat_prompt_tokens
from trainer.data.source import IGNORE
from trainer.data.tokenizer import find_tokenizer
from trainer.export import export_checkpoint
from trainer.generate import open_generator
from trainer.metrics.callbacks import Samples

NUM_CHATS = 40


def write_chats(folder: Path) -> list[str]:
    """Write conversations of many lengths, and a tokenizer; return the settings that train on them."""
    words = ["Hi", "Yes", "No", "two", "four", "Bye"]
    chats = [
        conversation(
            *(" ".join(words[(number + turn + k) % 6] for k in range(1 + (7 * number + turn) % 5)) for turn in range(4))
        )
        for number in range(NUM_CHATS)
    ]
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return [
        "data.source=chat",
        f"data.path={path}",
        f"data.tokenizer={write_tokenizer(folder / 'model', CHATML)}",
        f"data.cache_dir={folder / 'cache'}",
        "data.seq_len=96",
        "model.vocab_size=128",
    ]


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
    trainer = kind(tiny_config(folder, "train.global_batch_size=2", "train.micro_batch_size=2", *overrides))
    found = [record.loss for record in trainer.steps()]
    trainer.close()
    return found


@pytest.mark.slow
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
    for pack in ("true", "false"):
        settings = [*write_chats(tmp_path), f"data.pack={pack}", "data.holdout=0.3", "eval.every=1", "eval.steps=0"]
        trainer = Trainer(tiny_config(tmp_path / pack, *settings))
        record = trainer.evaluate()
        assert record is not None
        found.append(record.loss)
        trainer.close()
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_epochs_are_converted_to_steps(tmp_path: Path) -> None:
    settings = [*write_chats(tmp_path), "data.pack=false", "train.epochs=1.5"]
    trainer = Trainer(tiny_config(tmp_path / "run", *settings, "train.global_batch_size=8"))
    assert (trainer.config.train.steps, trainer.config.train.epochs) == (8, None)  # 60 samples, 8 in each step
    trainer.close()
    more = resolve_from_data(tiny_config(tmp_path / "more", *settings, "train.small_model_steps=30")).train
    assert (more.steps, more.epochs, more.small_model_steps) == (30, None, 0)


def test_rows_are_as_long_as_the_longest_conversation_needs(tmp_path: Path) -> None:
    settings = [*write_chats(tmp_path), "data.seq_len=512", "train.epochs=1", "model.max_seq_len=512"]
    lengths, steps = [], []
    for name, trims in (("long", []), ("trimmed", ["data.trim_rows=true"])):
        trainer = Trainer(tiny_config(tmp_path / name, *settings, *trims))
        lengths.append(trainer.config.data.seq_len)
        steps.append(trainer.config.train.steps)
        assert isinstance(trainer.loader, TrainLoader)
        source = trainer.loader.source
        lengths.append(int((np.asarray(source.batch(np.arange(len(source)))["targets"]) != IGNORE).sum()))
        trainer.close()
    assert (lengths[0], lengths[2]) == (512, 64)
    assert lengths[1] == lengths[3], "the same targets, whatever the rows"
    assert steps[1] > 3 * steps[0]


def test_learning_rate_and_minimum_steps_depend_on_the_models_width(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    config |= {"intermediate_size": 64} | {"num_hidden_layers": 1, "vocab_size": 128, "max_position_embeddings": 128}
    folder = write_tokenizer(tmp_path / "model", CHATML)
    (folder / "config.json").write_text(json.dumps(config))

    def load(*overrides: str) -> RunConfig:
        return load_config("sft", [f"model.path={folder}", "data.path=chats.jsonl", "model.fresh=true", *overrides])

    def lr(*overrides: str) -> float:
        return load(*overrides).optim.lr

    def least(*overrides: str) -> int:
        return load(*overrides).train.small_model_steps

    assert load("data.documents=apart", "data.fit=cut").data == load("data.documents=apart").data
    assert load().data.tokenizer == load("model.name=hf").data.tokenizer == str(folder / "tokenizer.json")
    assert lr() == lr("model.name=hf") == pytest.approx(5e-5 * (2000 / 64) ** 0.78, rel=5e-3)
    assert lr("lora.rank=4") == pytest.approx(10 * lr(), rel=5e-3)
    assert lr("optim.lr=1e-3", "lora.rank=4") == 1e-3
    assert lr("optim.lr=1e-3", "optim.lr_by_width=true") == pytest.approx(20 * lr(), rel=5e-3)
    assert least() == least("model.name=hf") == least("train.epochs=9", "train.small_model_steps=1500") == 1500
    assert least("train.epochs=3") == least("train.steps=3") == 0, "given ones are taken as they stand"
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 512}))
    assert least() == 0, "a model of this width has three epochs, whatever the steps"


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [(1, 1), pytest.param((4, 2), marks=pytest.mark.campaign)])
def test_chats_train_the_same_on_any_mesh_and_resumed_within_an_epoch(
    elsewhere: tuple[int, int], tmp_path: Path
) -> None:
    settings = [*write_chats(tmp_path), "train.epochs=3", "checkpoint.every=3", "checkpoint.keep_last=0"]

    def run(name: str, *further: str) -> list[float]:
        return run_tiny(tmp_path / name, *settings, "train.global_batch_size=4", *further).train("loss")

    def resumed(name: str, *further: str) -> list[float]:
        shutil.copytree(tmp_path / "two", tmp_path / name)
        for saved in sorted((tmp_path / name / "checkpoints").iterdir())[1:]:
            shutil.rmtree(saved)
        return run(name, *further)

    two = run("two", "nproc=2")
    steps = len(two)
    assert steps > 6, "there are several epochs"
    assert run("one", "train.micro_batch_size=4") == pytest.approx(two, rel=1e-5)
    assert resumed("again", "nproc=2") == two
    ranks, mesh = elsewhere
    assert resumed("other", f"nproc={ranks}", f"mesh.replicate={mesh}") == pytest.approx(two, rel=1e-5)


@pytest.mark.slow
def test_start_block_shows_what_is_trained_on(tmp_path: Path) -> None:
    ran: CommandResult = run_tiny(tmp_path / "run", *write_chats(tmp_path), "train.steps=1")
    check_fields(ran, "start")
    (start,) = (line for line in ran.metrics if line["kind"] == "start")
    assert 0.2 < start["trained_share"] < 0.6
    assert (start["dropped_share"], start["truncated_share"]) == (0, 0)
    assert f"{NUM_CHATS} conversations, {start['trained_share']:.1%} of the tokens are targets" in ran.stdout


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_a_sample_at_the_end_answers_a_held_out_chat(
    train_on: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [*write_chats(tmp_path), f"data.train_on={train_on}", "train.steps=1", "log.sample_tokens=3"]
    fit(tmp_path / "run", *settings, "data.holdout=0.1", "eval.every=1")
    stdout = capsys.readouterr().out
    asked = stdout.partition("sample answer from the model, to:")[2].partition("its answer:")[0].split()
    assert (asked[0], asked[-1]) == ("user", "assistant")
    assert 3 <= len(asked) <= 7, "one turn of the user's"
    assert "def" not in stdout
    held_out = open_source(tiny_config(tmp_path / "run", *settings, "data.holdout=0.1").data, None, "eval")
    assert f"{NUM_CHATS} conversations" in stdout
    assert f"{held_out.report.held_out} held out for evaluation" in stdout


@pytest.mark.parametrize("kind", ["a chat", "a sample of text"])
def test_empty_evaluation_is_reported(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = write_chats(tmp_path)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": conversation("Hi", "Yes")}) + "\n")
    if kind == "a sample of text":
        (tmp_path / "text.txt").write_text("Hello there. " * 5)
        settings = [f"data.path={tmp_path / 'text.txt'}", f"data.cache_dir={tmp_path / 'cache'}"]
        settings += ["data.source=tokens", "model.vocab_size=512", "data.seq_len=65"]
    fit(tmp_path / "run", *settings, "train.steps=1", "eval.every=1")
    assert "warning: eval.every=1, but nothing is held out for evaluation" in capsys.readouterr().out
    fit(tmp_path / "other", *settings, "train.steps=1", "eval.every=0")
    assert "nothing is held out" not in capsys.readouterr().out


NO_PROMPT = CHATML.partition("\n{% if add_generation_prompt")[0]
"""A template that ignores add_generation_prompt."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "header"), [(CHATML, []), pytest.param(NO_PROMPT, ["assistant"], marks=pytest.mark.campaign)]
)
def test_one_command_trains_a_folder_and_a_second_one_chats_with_it(
    template: str, header: list[str], tmp_path: Path
) -> None:
    """A model with random weights learns the answers of 60 conversations, although its end token differs.

    Without a generation prompt it also learns to write the header of its turn, which no client adds.
    """
    transformers = pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path / "model", template)
    end = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]["</s>"]
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=128, eos_token_id=end, bos_token_id=None, **shape)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    taught = {"Hi": "Yes", "Bye": "No", "two and two": "four", "Paris": "sunny"}
    chats = tmp_path / "chats.jsonl"
    lines = [json.dumps({"messages": conversation(asked, f"It is {answer}")}) for asked, answer in taught.items()]
    chats.write_text("\n".join(lines * 15) + "\n")
    settings = ["recipe=sft", f"model.path={folder}", f"data.path={chats}", f"data.cache_dir={tmp_path / 'cache'}"]
    quick = [
        "train.micro_batch_size=8",
        "data.seq_len=64",
        "optim.lr=1e-2",
        f"train.epochs={120 if header else 40}",
        "run.threads=1",
        "log.every=20",
    ]
    assert run_command(tmp_path / "run", *settings, *quick).exit_code == 0
    for asked, answer in (("Bye", "No"), ("two and two", "four")):
        ran = run_python_module("trainer.generate", tmp_path / "run", "--chat", asked, "--greedy", "--max-tokens", 20)
        assert ran.exit_code == 0, ran.stderr
        assert ran.stdout.split() == [*header, "It", "is", answer], "the answer, and its end"
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    given = tokenizer.apply_chat_template(
        conversation("Bye"), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = exported.generate(**given, max_new_tokens=20, do_sample=False)[0, given["input_ids"].shape[1] :]
    assert tokenizer.decode(written, skip_special_tokens=True).split() == [*header, "It", "is", "No"]


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_end_of_turn_ends_samples_generated_text_and_the_exports_text(train_on: str, tmp_path: Path) -> None:
    """Even if the tokenizer and the model's source declare a different end."""
    trainer = Trainer(
        tiny_config(tmp_path / "run", *write_chats(tmp_path), "train.steps=1", f"data.train_on={train_on}")
    )
    assert trainer.fit() == 0
    tokenizer = find_tokenizer(trainer.config.data.tokenizer)
    ends = {tokenizer.library.token_to_id(text) for text in ("</s>", "<|im_end|>")}
    nothing: Any = None
    assert Samples(trainer.config, nothing, nothing, nothing, nothing)._stop_ids == ends
    trainer.close()
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
    for path in (tmp_path / "run", tmp_path / "out"):
        with ExitStack() as stack:
            writer = open_generator(str(path), torch.device("cpu"), stack)
            tokens = chat_prompt_tokens("Hi", writer.tokenizer, "--chat", writer.template)
            text_of = ChatTokenizer(writer.tokenizer).token_text
        assert "".join(map(text_of, tokens)) == "[INST]Hi[/INST]"


@pytest.mark.campaign
def test_a_million_random_weights_memorize_400_facts(tmp_path: Path) -> None:
    """With the recipe's own settings, in 1500 steps."""
    transformers = pytest.importorskip("transformers")
    names = [f"{a}{b}{c}" for a in "BDFGKLMNPRSTVZ" for b in "aeiou" for c in ("li", "ra", "to", "mun", "ses", "dok")]
    facts = list(zip(names[:400], reversed(names[:400]), strict=True))
    chats = tmp_path / "chats.jsonl"
    told = [conversation(f"What is the capital of {one}?", f"The capital of {one} is {other}.") for one, other in facts]
    chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in told))
    folder = write_subwords(tmp_path / "model", [message["content"] for chat in told for message in chat])
    end = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]["<|im_end|>"]
    shape = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=512, eos_token_id=end, bos_token_id=None, **shape)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    own = [f"model.path={folder}", f"data.path={chats}", f"data.cache_dir={tmp_path / 'cache'}"]
    ran = run_command(tmp_path / "run", "recipe=sft", *own, "log.every=100", "run.threads=1", timeout_s=1800)
    assert ran.exit_code == 0, ran.stderr
    for one, other in facts[::80]:
        asked = ("--chat", f"What is the capital of {one}?", "--greedy")
        answer = run_python_module("trainer.generate", tmp_path / "run", *asked).stdout.strip()
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
