"""The tokens of a document: text is only text, and the tokenizer's configuration says how documents begin and end."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.commands.test_prepare import run, write_jsonl
from tests.data.test_data import write_tokenizer
from trainer.data.ingest import encode
from trainer.data.shards import Shard
from trainer.data.tokenizer import ByteTokenizer, find_tokenizer
from trainer.errors import UserError

BEGIN, END, STOP = "<|begin|>", "<|endoftext|>", "<|stop|>"

TEXTS = [
    f"the cat{END}the hat",
    END,
    f"{BEGIN}{STOP} and <|begin|",
    "the cat and the hat",
    "the häät\r\n",
]


def write(folder: Path, template: str | None = None, **files: Any) -> Path:
    """Write a tokenizer with three special tokens, an optional post-processor, and other files of its folder."""
    import tokenizers
    from tokenizers import processors

    path = write_tokenizer(folder / "tokenizer.json", END)
    made = tokenizers.Tokenizer.from_file(str(path))
    made.add_special_tokens([BEGIN, STOP])
    if template is not None:
        ids = [(token, made.token_to_id(token)) for token in (BEGIN, END, STOP)]
        around = processors.TemplateProcessing(single=template, special_tokens=ids)
        made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), around])
    made.save(str(path))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def expected(path: Path, text: str, end: Sequence[str]) -> list[int]:
    """Return the ids that the library gives for a document, plus the end tokens that it does not add."""
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(path))
    library.encode_special_tokens = True
    return [*library.encode(text).ids, *(library.token_to_id(token) for token in end)]


def prepared(folder: Path, tokenizer: Path, texts: Sequence[str]) -> list[list[int]]:
    lines = write_jsonl(folder / "in.jsonl", list(texts))
    assert run(lines, "--out", folder / "out", "--tokenizer", tokenizer) == 0
    shard = Shard(folder / "out-00000.bin")
    assert {int(shard.read(end - 1, 1)[0]) for end in shard.read_offsets()[1:]} == {shard.info.end_id}
    return [shard.read(start, end - start).tolist() for start, end in itertools.pairwise(shard.read_offsets())]


@pytest.mark.parametrize(
    ("template", "eos", "end"),
    [
        (None, END, [END]),
        (f"{BEGIN} $A", END, [END]),
        (f"{BEGIN} $A {END}", END, []),
        (f"$A {END}", END, []),
        (f"{BEGIN} $A {STOP}", END, [END]),
        (f"{END} $A", END, [END]),
        (f"{BEGIN} $A {STOP}", STOP, []),
        (f"{BEGIN} {STOP} $A {STOP} {END}", END, []),
        (f"{BEGIN} $A {STOP}", None, []),
    ],
)
def test_documents_have_the_ids_of_their_tokenizer(
    tmp_path: Path, template: str | None, eos: str | None, end: list[str]
) -> None:
    """Also if text spells a special token; with a single end, also if the tokenizer adds none."""
    path = write(tmp_path, template, tokenizer_config={"eos_token": eos})
    assert prepared(tmp_path, path, TEXTS) == [expected(path, text, end) for text in TEXTS]


def test_text_that_spells_a_special_token_is_restored_as_text(tmp_path: Path) -> None:
    tokenizer = find_tokenizer(str(write(tmp_path)))
    for text in TEXTS:
        ids = tokenizer.encode(text).tolist()
        assert tokenizer.end_id not in ids
        assert tokenizer.decode(ids) == text


def test_document_tokenized_in_pieces_has_one_beginning_and_end(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(encode, "MAX_PIECE_BYTES", 5)
    path = write(tmp_path, f"{BEGIN} $A {END}")
    (tmp_path / "long.txt").write_text("the cat\nand the hat\n" * 20)
    assert run(tmp_path / "long.txt", "--out", tmp_path / "out", "--tokenizer", path) == 0
    shard = Shard(tmp_path / "out-00000.bin")
    ids = shard.read(0, shard.info.num_tokens).tolist()
    special = find_tokenizer(str(path))
    assert (ids[0], ids[-1]) == (special.start_ids[0], special.end_id)
    assert not {*special.start_ids, special.end_id} & {*ids[1:-1]}
    assert special.decode(ids) == "the cat\nand the hat\n" * 20


def test_truncation_and_padding_of_the_tokenizer_are_ignored(tmp_path: Path) -> None:
    """A tokenizer.json may contain the input length of some model."""
    import tokenizers

    path = write(tmp_path)
    made = tokenizers.Tokenizer.from_file(str(path))
    whole = made.encode("the cat and the hat" * 9).ids
    made.enable_truncation(4)
    made.enable_padding(length=200)
    made.save(str(path))
    assert find_tokenizer(str(path)).encode("the cat and the hat" * 9).tolist() == whole


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({}, END),
        ({"tokenizer_config": {"eos_token": STOP}}, STOP),
        ({"tokenizer_config": {"eos_token": {"content": STOP, "special": True}}}, STOP),
        ({"tokenizer_config": {"eos_token": None}, "special_tokens_map": {"eos_token": {"content": STOP}}}, STOP),
        ({"tokenizer_config": {"eos_token": STOP}, "generation_config": {"eos_token_id": 0}}, STOP),
        ({"tokenizer_config": {}, "generation_config": {"eos_token_id": [271, 0]}}, STOP),
        ({"config": {"eos_token_id": 271}}, STOP),
        ({"config": {"eos_token_id": None}, "generation_config": {}}, END),
    ],
)
def test_end_of_document_follows_the_tokenizer_configuration(tmp_path: Path, files: dict[str, Any], end: str) -> None:
    tokenizer = find_tokenizer(str(write(tmp_path, **files)))
    assert tokenizer.decode([65]) != ""
    assert tokenizer.end_id == {END: 0, STOP: 271}[end]
    assert tokenizer.end_ids == (tokenizer.end_id,)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer_config": {"eos_token": "<|no|>"}}, r"tokenizer_config\.json has eos_token=<\|no\|>, which"),
        ({"generation_config": {"eos_token_id": [9999]}}, r"generation_config\.json has eos_token_id=9999, which"),
        ({"config": {"eos_token_id": True}}, r"config\.json has eos_token_id=true, which"),
        ({"tokenizer_config": "{"}, r"tokenizer_config\.json in the same folder cannot be read"),
        ({"tokenizer_config": "[]"}, r"tokenizer_config\.json in the same folder cannot be read"),
    ],
)
def test_configuration_that_does_not_fit_its_tokenizer(tmp_path: Path, files: dict[str, Any], words: str) -> None:
    path = write(tmp_path, **files)
    with pytest.raises(UserError, match=rf"^data\.tokenizer={path}: .*{words}"):
        find_tokenizer(str(path))


def test_tokenizers_with_different_ids_have_different_names(tmp_path: Path) -> None:
    """So no cache and no shards of one are used for the other."""
    names = set()
    for number, files in enumerate([{}, {"tokenizer_config": {"eos_token": STOP}}]):
        (tmp_path / str(number)).mkdir()
        names.add(find_tokenizer(str(write(tmp_path / str(number), **files))).name)
    assert len(names) == 2
    assert (ByteTokenizer().start_ids, ByteTokenizer().end_ids) == ((), (256,))
