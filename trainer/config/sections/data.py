"""The `data` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from trainer.config.sections.limits import MAX_SIZE
from trainer.recipe import declare


@dataclass(frozen=True)
class DataSection:
    """The training data."""

    source: Literal["stdlib", "synthetic", "tokens", "chat"] = declare(
        "stdlib",
        "stdlib: the source code of Python's standard library; synthetic: generated data; tokens: the files in "
        "data.path; chat: conversations in JSONL or parquet files",
    )
    path: str | dict[str, str] | None = declare(
        None,
        "with source=tokens (implied): a file, folder, glob or manifest of token shards, or of text (.txt, "
        ".md, code, .jsonl, .parquet, .gz, .zst), tokenized on first use; or a URL (https, s3, ...); with "
        "source=chat: a file, folder or glob; {name: path, ...} mixes several sources",
    )
    eval_path: str | dict[str, str] | None = declare(
        None, "evaluation data, in the same forms as data.path; {name: path, ...} for several sources"
    )
    text_key: str = declare("text", "JSONL key or parquet column that holds the text")
    bad: str = declare(
        "error", "unreadable documents: error, skip (leave out and count), or the largest share that may be left out"
    )
    weights: dict[str, float] | None = declare(
        None,
        "sampling weights of the sources in data.path, for example {web: 0.7, code: 0.3}; null: proportional to size",
    )
    phases: tuple[dict[str, Any], ...] = declare(
        (),
        "changes to data.weights during training, for example [{from: 80%, weights: {code: 1}}]; from: the first "
        "step with these weights, tokens:<n>, or a share of the run",
    )
    holdout: float | None = declare(
        None,
        "without eval_path: share held out for evaluation: text documents and conversations by a hash of their "
        "content, the last samples of token shards; null: 0.01 if eval.every is set, else 0",
        at_least=0,
        below=1,
    )
    max_epochs: float | None = declare(
        None, "maximum passes over any source; a run that needs more is refused; null: no limit", above=0
    )
    seq_len: int = declare(256, "tokens per sequence", at_least=1, at_most=MAX_SIZE)
    tokenizer: str = declare(
        "bytes",
        "bytes; a Hugging Face tokenizer.json or its folder; or model: the tokenizer in model.path or train.init_from, "
        "which is also the default if the initial weights come with one",
    )
    bos: bool | None = declare(
        None,
        "for text: start each document with the tokenizer's beginning-of-text token; null: as the tokenizer does",
    )
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "preference"] = declare(
        "auto", "with source=chat: format of the records; auto: detect it from their keys"
    )
    columns: dict[str, str] | None = declare(
        None,
        "with source=chat: maps a format's keys to the names in your files, for example {messages: dialog}; "
        "null: the same names",
    )
    chat_template: str = declare(
        "model",
        "with source=chat: model (the tokenizer's own template), chatml, or a Jinja file",
    )
    train_on: Literal["assistant", "last", "all", "completion"] = declare(
        "assistant",
        "with source=chat: target tokens: assistant (all assistant turns), last (the last assistant turn), all "
        "(every token), or completion (the assistant turns after the last user message)",
    )
    too_long: Literal["auto", "drop", "truncate", "error"] = declare(
        "auto",
        "with source=chat: how to treat conversations longer than a sequence; auto: drop them, but refuse to start if "
        "most would be dropped",
    )
    trim_rows: bool = declare(
        False, "with source=chat: shorten sequences to the longest conversation, rounded up to 64 tokens"
    )
    documents: Literal["joined", "masked", "apart"] = declare(
        "joined",
        "how documents share a sequence: joined (attention crosses documents), masked (documents cannot attend to "
        "each other; positions restart at 0), apart (one per sequence; the rest is ignored); for chats, joined "
        "means masked",
    )
    fit: Literal["cut", "best"] = declare(
        "cut",
        "how sequences are filled: cut (documents are cut at the end of a sequence), or best (best-fit packing: "
        "only documents longer than a sequence are cut)",
    )
    pack: bool = declare(True, "false: the same as documents=apart")
    num_workers: int = declare(
        0,
        "data loading processes per rank; token shards need none, since a thread reads them",
        at_least=0,
        at_most=256,
    )
    seed: int = declare(0, "seed of the sample order", at_least=0)
    cache_dir: str | None = declare(
        None, "folder for tokenized text and downloaded shards; null: the user's cache folder"
    )
    cache_gib: float | None = declare(
        None, "maximum GiB of downloaded shards cached on each machine; null: no limit", above=0
    )

    def generated(self) -> DataSection:
        """Return a section with synthetic data of the same shape instead of files."""
        return DataSection(source="synthetic", seq_len=self.seq_len, pack=self.pack, num_workers=self.num_workers)

    @property
    def arrangement(self) -> Literal["joined", "masked", "apart"]:
        """How documents share sequences, from `documents` and `pack`."""
        return self.documents if self.pack else "apart"

    @property
    def fills_rows(self) -> bool:
        """True if sequences are cut from one token stream, in which every token but the first is a target."""
        return self.arrangement == "joined" and self.fit == "cut"
