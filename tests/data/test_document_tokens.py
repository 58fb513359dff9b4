"""The tokens of a document: text is only text, and the tokenizer's configuration says how documents begin and end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import meshtrainer
from tests.helpers.data import END, documents_in, write_bpe, write_texts
from trainer import UserError
from trainer.data.tokenizer import find_tokenizer
from trainer.prepare import prepare

tokenizers = pytest.importorskip("tokenizers")

BEGIN, STOP = "<|begin|>", "<|stop|>"

TEXTS = [
    f"the cat{END}the hat",
    END,
    f"{BEGIN}{STOP} and <|begin|",
    "the cat and the hat",
    "the häät\r\n",
]


def write(folder: Path, template: str | None = None, **files: Any) -> Path:
    """Write a tokenizer with three special tokens, an optional post-processor, and other files of its folder."""
    path = write_bpe(folder / "tokenizer.json")
    made = tokenizers.Tokenizer.from_file(str(path))
    made.add_special_tokens([BEGIN, STOP])
    if template is not None:
        ids = [(token, made.token_to_id(token)) for token in (BEGIN, END, STOP)]
        processors = tokenizers.processors
        around = processors.TemplateProcessing(single=template, special_tokens=ids)
        made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), around])
    made.save(str(path))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def expected(path: Path, text: str, end: Sequence[str]) -> list[int]:
    """Return the ids that the library gives for a document, plus the end tokens that it does not add."""
    library = tokenizers.Tokenizer.from_file(str(path))
    library.encode_special_tokens = True
    return [*library.encode(text).ids, *(library.token_to_id(token) for token in end)]


def prepared(folder: Path, tokenizer: Path, texts: Sequence[str]) -> list[int]:
    """Return the tokens of documents as `trainer.prepare` writes them."""
    lines = write_texts(folder / "in.jsonl", texts)
    assert meshtrainer("prepare", lines, "--out", folder / "out", "--tokenizer", tokenizer).code == 0
    return [token for document in documents_in(folder / "out-00000.bin") for token in document]


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
    assert prepared(tmp_path, path, TEXTS) == [token for text in TEXTS for token in expected(path, text, end)]


def test_text_that_spells_a_special_token_is_restored_as_text(tmp_path: Path) -> None:
    tokenizer = find_tokenizer(str(write(tmp_path)))
    for text in TEXTS:
        ids = tokenizer.encode(text).tolist()
        assert tokenizer.end_id not in ids
        assert tokenizer.decode(ids) == text


def test_long_document_has_one_beginning_and_end_and_all_its_text(tmp_path: Path) -> None:
    path = write(tmp_path, f"{BEGIN} $A {END}")
    text = "the cat\nand the hat\n" * 80_000
    (tmp_path / "long.txt").write_text(text)
    prepare([str(tmp_path / "long.txt")], str(tmp_path / "out"), tokenizer=str(path))
    (ids,) = documents_in(tmp_path / "out-00000.bin")
    begin, end = (tokenizers.Tokenizer.from_file(str(path)).token_to_id(token) for token in (BEGIN, END))
    assert (ids[0], ids[-1]) == (begin, end)
    assert not {begin, end} & {*ids[1:-1]}
    assert find_tokenizer(str(path)).decode(ids) == text


def test_truncation_and_padding_of_the_tokenizer_are_ignored(tmp_path: Path) -> None:
    """A tokenizer.json may contain the input length of some model."""
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
    assert tokenizer.end_id == {END: 0, STOP: 271}[end]
    assert tokenizer.end_ids == (tokenizer.end_id,)


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"tokenizer_config": {"eos_token": "<|no|>"}}, "eos_token=<|no|>"),
        ({"generation_config": {"eos_token_id": [9999]}}, "eos_token_id=9999"),
        ({"config": {"eos_token_id": True}}, "eos_token_id=true"),
        ({"tokenizer_config": "{"}, ""),
        ({"tokenizer_config": "[]"}, ""),
    ],
)
def test_configuration_that_does_not_fit_its_tokenizer(tmp_path: Path, files: dict[str, Any], named: str) -> None:
    path = write(tmp_path, **files)
    with pytest.raises(UserError) as caught:
        find_tokenizer(str(path))
    assert str(caught.value).startswith(f"data.tokenizer={path}: ")
    assert f"{next(iter(files))}.json" in str(caught.value)
    assert named in str(caught.value)


def test_tokenizers_with_different_ids_have_different_names(tmp_path: Path) -> None:
    """So no cache and no shards of one are used for the other."""
    names = set()
    for number, files in enumerate([{}, {"tokenizer_config": {"eos_token": STOP}}]):
        names.add(find_tokenizer(str(write(tmp_path / str(number), **files))).name)
    assert len(names) == 2
    copied = write(tmp_path / "again")
    assert find_tokenizer(str(copied)).name.split(":")[1] in {name.split(":")[1] for name in names}, "by its content"
