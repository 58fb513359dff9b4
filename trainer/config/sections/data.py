"""The section of the training data."""

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
        "stdlib: this Python's own source text; synthetic: generated; tokens: what data.path names; chat: "
        "conversations in JSONL or parquet files",
    )
    path: str | dict[str, str] | None = declare(
        None,
        "source=tokens, which it implies: a file, folder, glob or manifest of token shards, or of text (.txt, .md, "
        "code, .jsonl, .parquet, .gz, .zst), which is tokenized on first use; or shards at a URL (https, s3, ...); "
        "source=chat: a file, folder or glob; or {name: path, ...} for several sources",
    )
    eval_path: str | dict[str, str] | None = declare(
        None, "source=tokens: the same, to evaluate on; {name: path, ...} for each source its own"
    )
    text_key: str = declare("text", "of JSONL and parquet: the key or column that holds the text")
    bad: str = declare(
        "error", "documents that cannot be read: error, skip (left out and counted), or the share that may be left out"
    )
    weights: dict[str, float] | None = declare(
        None, "shares of the sources of data.path, as {web: 0.7, code: 0.3}; null: by size"
    )
    phases: tuple[dict[str, Any], ...] = declare(
        (),
        "other weights later, as [{from: 80%, weights: {code: 1}}]; from: a step (the first that has them), "
        "tokens:<n>, or a share of the run",
    )
    holdout: float | None = declare(
        None,
        "without eval_path: share that is kept for evaluation: of text the documents, by a hash; of shards the last "
        "samples; with source=chat the conversations; null: 0.01 with eval.every, else 0",
        at_least=0,
        below=1,
    )
    max_epochs: float | None = declare(
        None, "a run that would go through a source more often is refused; null: any number of times", above=0
    )
    seq_len: int = declare(256, "tokens of one sequence", at_least=1, at_most=MAX_SIZE)
    tokenizer: str = declare(
        "bytes", "bytes; a Hugging Face tokenizer.json, or its folder; or model, that of model.path or train.init_from"
    )
    bos: bool | None = declare(
        None,
        "of text: whether documents begin with the tokenizer's beginning-of-text token; null: as the tokenizer itself "
        "adds it, or not",
    )
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "preference"] = declare(
        "auto", "source=chat: what a record is like; auto: as its keys say"
    )
    columns: dict[str, str] | None = declare(
        None, "source=chat: what the files call a format's keys, as {messages: dialog}; null: as the format does"
    )
    chat_template: str = declare("model", "source=chat: model, the template beside the tokenizer, or a file of Jinja")
    train_on: Literal["assistant", "last", "all", "completion"] = declare(
        "assistant",
        "source=chat: what counts as a target: all that the assistant writes, its last turn, every token, or what it "
        "writes after the user's last message",
    )
    too_long: Literal["drop", "truncate", "error"] = declare(
        "drop", "source=chat: what is done with a conversation that is longer than a sequence"
    )
    trim_rows: bool = declare(
        False, "source=chat: sequences are no longer than the longest conversation needs, rounded up to 64 tokens"
    )
    documents: Literal["joined", "masked", "apart"] = declare(
        "joined",
        "documents in a sequence: joined (it runs across them), masked (none sees another, each is counted from "
        "position 0), apart (one a sequence, the rest ignored); chats are masked in place of joined",
    )
    fit: Literal["cut", "best"] = declare(
        "cut", "documents where a sequence ends: cut, or best (best-fit packing: none is cut that is not longer)"
    )
    pack: bool = declare(True, "false: the same as documents=apart")
    num_workers: int = declare(
        0,
        "processes that prepare batches on each rank, where that is work; token shards are read by a thread",
        at_least=0,
        at_most=256,
    )
    seed: int = declare(0, "seed of the order of the samples", at_least=0)
    cache_dir: str | None = declare(
        None, "where tokenized text is kept, and shards from elsewhere; null: the user's cache folder"
    )
    cache_gib: float | None = declare(
        None, "GiB of shards from elsewhere that are kept on each machine at a time; null: all that are read", above=0
    )

    def generated(self) -> DataSection:
        """Return the section with generated data of the same shape in place of files."""
        return DataSection(source="synthetic", seq_len=self.seq_len, pack=self.pack, num_workers=self.num_workers)

    @property
    def arrangement(self) -> Literal["joined", "masked", "apart"]:
        """The treatment of documents, by either of the two keys."""
        return self.documents if self.pack else "apart"

    @property
    def fills_rows(self) -> bool:
        """True if sequences are cut from one stream, and every token but its first is a target."""
        return self.arrangement == "joined" and self.fit == "cut"
