"""Inspect the data that a run would train on, without training.

    python -m trainer.data show [recipe=NAME] [section.key=value ...] [--step N] [--samples N] [--full]
    python -m trainer.data plan [recipe=NAME] [section.key=value ...]

  show    prints samples of one step: their text, document boundaries, targets, source and epoch
            --step N      the step (default 1)
            --samples N   number of samples (default 2), at most a global batch
            --full        prints the complete text; otherwise, the middle of a long text is left out
  plan    prints, for each phase (a range of steps with the same mixture weights) and source, the number of tokens
          that the run would read, the source's share of the samples, and its epochs by the end of the phase

recipe=NAME is a recipe, a path ending in .yaml, or a run folder.  Without it, the settings of llama_small are
used, and token ids in the data are not checked against the model's vocabulary size.

--allow-import M allows importing module M if the run folder given as recipe= refers to it; it may be repeated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config.command_line import SettingsParser
from trainer.config.load import load_config
from trainer.config.parallel import smallest_mesh
from trainer.config.rules import check_config
from trainer.config.schema import RunConfig
from trainer.data.mixture import (
    SOURCE,
    MixedSource,
    SampleOrder,
    SourceUsage,
    describe_usage,
    epochs,
    make_order,
    usage_by_phase,
)
from trainer.data.opening import open_source, resolve_from_data
from trainer.data.shards import ShardError
from trainer.data.source import IGNORE, Source, as_mapping
from trainer.data.tokenizer import Tokenizer, tokenizer_of
from trainer.errors import (
    EXIT_FINISHED,
    TrainingFailed,
    UserError,
    choice_error,
    print_stdout,
    run_command,
    setting_error,
)
from trainer.registry import add_working_directory_to_sys_path
from trainer.tables import table

_COMMANDS = ("show", "plan")


def command_line(argv: Sequence[str] | None = None) -> int:
    """Run the command given on the command line and return the exit code."""
    add_working_directory_to_sys_path()
    parser = SettingsParser("python -m trainer.data", __doc__)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--full", action="store_true")
    return run_command(lambda: _run(parser, sys.argv[1:] if argv is None else argv))


def _run(parser: SettingsParser, argv: Sequence[str]) -> int:
    options, named, overrides = parser.parse_settings(argv)
    for name, number in (("--step", options.step), ("--samples", options.samples)):
        if number < 1:
            raise setting_error(name, number, "must be at least 1", 1)
    if not options.words:
        example = "for example: python -m trainer.data show recipe=llama_small"
        raise UserError(f"missing command: {', '.join(_COMMANDS)}\n  {example}")
    command, *words = options.words
    if command not in _COMMANDS:
        raise choice_error("command", command, _COMMANDS)
    parser.refuse_words(words, "recipe" in named)
    config = load_config(named.get("recipe", "llama_small"), overrides, options.allow_import, needs_weights=False)
    mesh = smallest_mesh(config)
    check_config(config, mesh.num_ranks, mesh.shard)
    vocab_size = config.vocab_size if "recipe" in named else None
    config = resolve_from_data(config)
    source = open_source(config.data, vocab_size, "train")
    order = make_order(source, config)
    if command == "show":
        _show_samples(source, order, config, step=options.step, count=options.samples, full_text=options.full)
        return EXIT_FINISHED
    usages = usage_by_phase(order, config.train.global_batch_size, config.train.steps, source.seq_len)
    print_stdout("\n".join(_usage_lines(config, usages)))
    return EXIT_FINISHED


def _usage_lines(config: RunConfig, usages: Sequence[SourceUsage]) -> list[str]:
    header = ("steps", "source", "tokens", "share", "samples", "epochs")
    rows = [
        (
            f"{usage.first_step}-{usage.last_step}",
            usage.source or config.data.source,
            f"{usage.tokens:,}",
            f"{100 * usage.share:.2f}%",
            f"{usage.samples:,}",
            f"{usage.epochs:.3f}",
        )
        for usage in usages
    ]
    return [
        table(header, rows, text_columns=()),
        "epochs: passes over the source by the end of the phase",
        *(line for line in describe_usage(usages) if line.startswith("repeats")),
    ]


_EDGE_CHARS = 60
"""Number of characters to show from each end of a long text, without `--full`."""


def _show_samples(
    source: Source, order: SampleOrder, config: RunConfig, *, step: int, count: int, full_text: bool
) -> None:
    """Print the first `count` samples of a step.

    Each line of a sample shows padding, or consecutive tokens of one document whose targets are all trained on or all
    ignored.  Raises TrainingFailed if the data are corrupt.
    """
    global_batch_size = config.train.global_batch_size
    data_tokenizer = tokenizer_of(config.data)
    tokenizer = data_tokenizer if data_tokenizer.name == source.tokenizer else None  # otherwise ids are shown
    positions = (step - 1) * global_batch_size + np.arange(min(count, global_batch_size))
    indices = order.at(positions)
    try:
        entries = as_mapping(source.batch(indices))
    except ShardError as error:
        raise TrainingFailed(str(error)) from error
    names = list(source.sources) if isinstance(source, MixedSource) else [""]
    is_chat, rows_per_sample = config.data.source == "chat", source.rows_per_sample
    for number, (position, index) in enumerate(zip(positions.tolist(), indices.tolist(), strict=True)):
        name = names[int(entries[SOURCE][number * rows_per_sample])] if SOURCE in entries else ""
        rows = range(number * rows_per_sample, (number + 1) * rows_per_sample)
        lines = [line for row in rows for line in _sample_lines(entries, row, tokenizer, is_chat, full_text)]
        source_text, epoch = f", source {name}" if name else "", epochs(order, position)[name]
        header = f"step {step}, position {position}: sample {index}{source_text}, epoch {epoch:.4f}"
        print_stdout("\n".join([header, *lines, ""]))


def _sample_lines(
    entries: dict[str, NDArray[Any]], row: int, tokenizer: Tokenizer | None, is_chat: bool, full_text: bool
) -> Iterator[str]:
    """Yield the lines that show a row; see `_show_samples`."""
    tokens, is_target = entries["tokens"][row], entries["targets"][row] != IGNORE
    if "documents" in entries:
        documents = entries["documents"][row]
    elif is_chat:  # one conversation, then padding, which repeats the last token
        end = int(np.flatnonzero(is_target | (tokens != tokens[-1])).max(initial=-1)) + 1
        documents = (np.arange(len(tokens)) >= end).astype(np.int64)
    elif tokenizer is None:
        documents = np.zeros(len(tokens), dtype=np.int64)
    else:  # documents are separated by end tokens; padding belongs to the last one
        is_end = tokens == tokenizer.end_id
        documents = np.cumsum(np.concatenate([[False], is_end[:-1] & ~is_end[1:]]))
    # Every conversation has a target, so everything after the last document with a target is padding.
    is_padding = documents > documents[is_target].max(initial=-1) if is_chat else np.zeros(len(tokens), bool)
    changes = np.flatnonzero((np.diff(documents) != 0) | (np.diff(is_target) != 0)) + 1
    width = len(str(len(tokens)))
    for start, end in zip([0, *changes.tolist()], [*changes.tolist(), len(tokens)], strict=True):
        if is_padding[start]:
            yield f"  {start:>{width}}-{end - 1:<{width}}  padding"
            continue
        kind = "trained on" if is_target[start] else "ignored   "
        text = _format_text(tokens[start:end], tokenizer, full_text)
        yield f"  {start:>{width}}-{end - 1:<{width}}  document {int(documents[start]) + 1}  {kind}  {text}"


def _format_text(tokens: NDArray[Any], tokenizer: Tokenizer | None, full_text: bool) -> str:
    if tokenizer is None:
        items = (
            tokens.tolist() if full_text or len(tokens) <= 16 else [*tokens[:8].tolist(), "...", *tokens[-8:].tolist()]
        )
        return " ".join(map(str, items))
    text = tokenizer.decode(tokens)
    start = len(tokenizer.start_ids)
    prefix = "[begin] " if start and tuple(tokens[:start].tolist()) == tokenizer.start_ids else ""
    suffix = " [end]" if tokens[-1] == tokenizer.end_id else ""
    if full_text or len(text) <= 2 * _EDGE_CHARS + 5:
        return prefix + repr(text) + suffix
    return f"{prefix}{text[:_EDGE_CHARS]!r} ... {text[-_EDGE_CHARS:]!r}{suffix}"


if __name__ == "__main__":
    sys.exit(command_line())
