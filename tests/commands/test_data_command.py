"""`python -m trainer.data` shows, checks and plans exactly the data that the tests write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.test_data import write_shards
from tests.data.test_mixture import write_sources
from tests.helpers.chats import CHATML, conversation, write_tokenizer
from trainer.data.__main__ import command_line
from trainer.files import CHECKSUM

RANDOM = np.random.default_rng(5)


def words(length: int) -> bytes:
    return RANDOM.integers(97, 123, length).astype(np.uint8).tobytes()


def ask(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    code = command_line([*arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("seq_len", [16, 100])
def test_duplicates_and_leaks_are_found(seq_len: int, tmp_path: Path, capsys: Any) -> None:
    """Documents repeated in another shard, a held-out one, and 47 tokens of another in the middle of other text."""
    train, held_out = [[words(150) for _ in range(40)] for _ in range(2)], [words(120) for _ in range(9)]
    train[1][7], train[0][11] = train[0][3], held_out[2]
    train[1][30] = words(33) + held_out[6][20:67] + words(20)
    write_shards(tmp_path, *train)
    write_shards(tmp_path, held_out, name="eval")
    settings = ["data.source=tokens", f"data.path={tmp_path}/text-*.bin", f"data.eval_path={tmp_path}/eval-*.bin"]
    code, out, _ = ask(capsys, "check", *settings, f"data.seq_len={seq_len}")
    assert code == 1
    first, second, eval_ = (tmp_path / name for name in ("text-00000.bin", "text-00001.bin", "eval-00000.bin"))
    assert f"duplicate: document 7 of {second} is identical to document 3 of {first}" in out
    assert f"duplicate: document 2 of {eval_} is identical to document 11 of {first}" in out
    assert "89 documents: 2 duplicates" in out
    leaks = {int(line.split()[3]) for line in out.splitlines() if line.startswith("leak: ")}
    # Held-out documents have 121 tokens with their ends.
    whole = set(range(2 * 121 // seq_len, (3 * 121 - 1) // seq_len + 1))
    assert leaks & whole
    assert leaks - whole
    assert leaks <= whole | set(range((6 * 121 + 20) // seq_len, (6 * 121 + 66) // seq_len + 1))


def test_text_repeated_in_every_document_is_checked_quickly(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text in 400 training and 40 held-out documents matches thousands of times, and is compared once per sample."""
    random, licence = np.random.default_rng(0), bytes(range(1, 97))
    texts = [licence + random.integers(0, 256, 32, dtype=np.uint8).tobytes() for _ in range(440)]
    path, held_out = (write_shards(tmp_path, part, name=n) for n, part in (("a", texts[:400]), ("b", texts[400:])))
    compared = []
    same = np.array_equal
    monkeypatch.setattr(np, "array_equal", lambda *each: compared.append(1) or same(*each))
    assert command_line(["check", f"data.path={path}", f"data.eval_path={held_out}", "data.seq_len=64"]) == 1
    assert "81 held-out samples: 80 share text with the training data" in capsys.readouterr().out
    assert len(compared) <= 2 * 81


def test_correct_data_passes(tmp_path: Path, capsys: Any) -> None:
    path = write_shards(tmp_path, [words(200) for _ in range(30)], [words(200)])
    code, out, _ = ask(capsys, "check", "data.source=tokens", f"data.path={path}", "data.seq_len=64", "eval.every=5")
    assert code == 0
    assert "2 shards, 6,231 tokens: none broken" in out
    assert "31 documents: 0 duplicates" in out
    assert "1 held-out sample: 0 share text with the training data" in out


def test_every_broken_shard_is_named(tmp_path: Path, capsys: Any) -> None:
    path = write_shards(tmp_path, *([words(200)] for _ in range(4)))
    (tmp_path / "text-00001.bin").write_bytes(b"short")
    (tmp_path / "text-00002.idx").write_bytes(bytes(16))
    content = bytearray((tmp_path / "text-00003.bin").read_bytes())
    content[100:102] = b"\xff\xff"
    (tmp_path / "text-00003.bin").write_bytes(content)
    code, out, _ = ask(capsys, "check", "data.source=tokens", f"data.path={path}")
    assert code == 1
    lines = out.splitlines()
    assert len(lines) == 3
    assert "text-00001.bin has 5 bytes" in lines[0]
    assert "text-00002.idx is damaged" in lines[1]
    assert "text-00003.bin is damaged: its checksum is " in lines[2]


def test_every_way_to_name_shards_is_checked(tmp_path: Path, capsys: Any) -> None:
    """A folder and a glob; damage found by token ids and by checksum, next to an intact shard."""
    write_shards(tmp_path, *([words(200)] for _ in range(3)))
    for number, what in ((1, b"\xff\xff"), (2, b"a\x00")):
        content = bytearray((tmp_path / f"text-0000{number}.bin").read_bytes())
        content[100:102] = what
        (tmp_path / f"text-0000{number}.bin").write_bytes(content)
    metadata = json.loads((tmp_path / "text-00001.json").read_text())
    old = {name: value for name, value in metadata.items() if name not in ("checksum", CHECKSUM)}
    (tmp_path / "text-00001.json").write_text(json.dumps(old))
    for path in (tmp_path, tmp_path / "text-*.bin"):
        code, out, err = ask(capsys, "check", "data.source=tokens", f"data.path={path}", "data.seq_len=16")
        assert (code, err) == (1, "")
        first, second = out.splitlines()
        assert first.endswith("text-00001.bin: token 50 is 65535, beyond the vocabulary")
        assert "text-00002.bin is damaged: its checksum is " in second


def test_several_sources_are_checked(tmp_path: Path, capsys: Any) -> None:
    shared = words(200)
    paths = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        paths.append(write_shards(tmp_path / name, [words(200), shared]))
    mixed = f"data.path={{one: {paths[0]}, other: {paths[1]}}}"
    code, out, _ = ask(
        capsys, "check", "data.source=tokens", mixed, "data.seq_len=16", "data.holdout=0", "eval.every=0"
    )
    assert code == 1
    assert "2 shards, 804 tokens: none broken" in out
    one, other = (tmp_path / name / "text-00000.bin" for name in ("one", "other"))
    assert f"duplicate: document 1 of {other} is identical to document 1 of {one}" in out


def test_samples_are_shown_as_the_model_sees_them(tmp_path: Path, capsys: Any) -> None:
    """One document per row with the rest ignored, then two documents in one row."""
    path = write_shards(tmp_path, [b"once upon"])
    settings = ["data.source=tokens", f"data.path={path}", "data.seq_len=14", "eval.every=0"]
    code, out, _ = ask(capsys, "show", *settings, "data.pack=false", "--samples", "1")
    assert code == 0
    title, trained, ignored = out.splitlines()[:3]
    assert title == "step 1, position 0: sample 0, epoch 0.0000"
    assert trained.split(None, 4) == ["0-8", "document", "1", "trained", "on  'once upon'"]
    assert ignored.split(None, 4)[:4] == ["9-13", "document", "1", "ignored"]
    path = write_shards(tmp_path / "two", [b"one", b"two and"]) if (tmp_path / "two").mkdir() is None else ""
    _, out, _ = ask(capsys, "show", "data.source=tokens", f"data.path={path}", "data.seq_len=11", "eval.every=0")
    assert "0-3   document 1  trained on  'one' [end]" in out
    assert "4-10  document 2  trained on  'two and'" in out


def test_chats_are_shown_as_text_without_padding(tmp_path: Path, capsys: Any) -> None:
    """One or two chats per row, and both answers of a pair; a leaked held-out chat is also printed as text."""
    pytest.importorskip("tokenizers", reason="a chat model's tokenizer is read with the library `tokenizers`")
    tokenizer = write_tokenizer(tmp_path / "model", CHATML, eos_token="<|im_end|>")
    own = ["data.source=chat", f"data.tokenizer={tokenizer}", f"data.cache_dir={tmp_path / 'cache'}", "eval.every=0"]

    def shown(records: list[Any], *settings: str) -> list[str]:
        path = tmp_path / "chats.jsonl"
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
        _, out, _ = ask(capsys, "show", *own, f"data.path={path}", "data.seq_len=24", "--samples", "1", *settings)
        return [" ".join(line.split()[1:]) for line in out.splitlines()[1:] if line.startswith("  ")]

    first = ["document 1 ignored 'user \\n Hi \\n assistant'", "document 1 trained on '\\n Yes'"]
    chat = {"messages": conversation("Hi", "Yes")}
    assert shown([chat], "data.pack=false") == [*first, "padding"]
    second = [line.replace("document 1", "document 2") for line in first]
    ends = ["document 1 ignored '' [end]", "document 2 ignored '' [end]"]
    assert shown([chat, chat]) == [*first, ends[0], *second, ends[1], "padding"]
    pair = {"prompt": "Hi", "chosen": conversation("a", "Yes")[1:], "rejected": conversation("a", "No")[1:]}
    assert shown([pair]) == [*first, "padding", first[0], first[1].replace("Yes", "No"), "padding"]
    long = " ".join(["Hi"] * 40)
    for name in ("train", "eval"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": conversation("Bye", long)}) + "\n")
    both = [f"data.path={tmp_path / 'train.jsonl'}", f"data.eval_path={tmp_path / 'eval.jsonl'}", "data.seq_len=128"]
    (leak,) = (line for line in ask(capsys, "check", *own, *both)[1].splitlines() if line.startswith("leak: "))
    assert leak.count("Hi") > 10


def test_a_plan_and_samples_of_several_sources(tmp_path: Path, capsys: Any) -> None:
    sources = ["data.source=tokens", write_sources(tmp_path), "data.weights={web: 3, math: 1}"]
    phases = "data.phases=[{from: 3, weights: {code: 1}}]"
    settings = [*sources, phases, "data.seq_len=16", "train.steps=4", "train.global_batch_size=8", "eval.every=0"]
    code, out, _ = ask(capsys, "plan", *settings)
    rows = [line.split() for line in out.splitlines()[1:7]]
    assert code == 0
    assert [row[:2] for row in rows] == [[steps, name] for steps in ("1-2", "3-4") for name in ("code", "math", "web")]
    assert sum(int(row[2]) for row in rows) == 4 * 8 * 16
    assert rows[3] == ["3-4", "code", "256", "100.00%", "16", "1.333"]
    assert out.splitlines()[-1] == "repeats its data: code is read 1.33 times"
    _, out, _ = ask(capsys, "show", *settings, "--step", "3", "--samples", "1")
    assert ", source code, epoch 0.0000" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "missing command: show, check, plan"),
        (["shwo"], "did you mean command=show?"),
        (["show", "--step", "0"], "--step=0: must be a whole number"),
        (["show", "--stp"], "did you mean --step?"),
        (["plan", "data.source=tokens"], "data.path=null"),
    ],
)
def test_wrong_argument(arguments: list[str], words: str, capsys: Any) -> None:
    code, _, err = ask(capsys, *arguments)
    assert code == 2
    assert words in err
