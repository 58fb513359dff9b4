"""Generate text with a trained model: stream one completion, or complete a file of prompts in batches.

    python -m trainer.generate MODEL --prompt TEXT
    python -m trainer.generate MODEL --chat TEXT
    python -m trainer.generate MODEL --prompts FILE --batch 16 --out FILE

MODEL is a run folder, a checkpoint, a Hugging Face folder or repository (org/name), or a GGUF file.  Uses one process,
on a GPU if there is one.  A completion ends at an end-of-document or end-of-turn token, after --max-tokens tokens, or
when the model's context is full.
"""

from __future__ import annotations

import argparse
import json
import math
import secrets
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config.model_folder import CONFIG_JSON, check_weights, has_config_only
from trainer.config.weights import check_tokenizer_of_folder, local_model_path, locate
from trainer.data.progress import ProgressLine
from trainer.data.prompts import ChatPrompts, chat_prompt_tokens, chat_stop_ids, prompt_tokens, read_prompts
from trainer.data.tokenizer import Tokenizer, find_tokenizer
from trainer.errors import (
    EXIT_FINISHED,
    CommandParser,
    TrainingFailed,
    UserError,
    printable,
    run_command,
    setting_error,
)
from trainer.files import append_and_sync, writing_to
from trainer.model.sample import (
    GREEDY,
    NO_TOKEN,
    Sampling,
    Token,
    build_decoder,
    generate_batch,
    generate_tokens,
    max_seq_len,
)
from trainer.registry import add_working_directory_to_sys_path
from trainer.weights.loading import StoredModel, open_model
from trainer.weights.model_files import (
    GENERATION,
    ModelFiles,
    read_model_files,
    settings_for_folder,
    tokenizer_settings,
)

_MAX_PROMPT_CHARS = 60
"""The message about a prompt that is too long cuts the prompt off after this many characters."""

_NUM_CONTEXT_TOKENS = 8
"""Number of preceding tokens to decode together with new tokens, since they can determine whether the new text starts
with a space."""

_DEFAULT_BATCH_SIZE = 8
"""Number of prompts to complete at once, unless --batch is given."""


@dataclass(frozen=True)
class TextGenerator:
    """A model with everything needed to generate text.

    stored: where the model's weights are.
    tokenizer: `bytes`, or the path of a tokenizer, as for `data.tokenizer`.
    template: the name or path of the chat template, as for `data.chat_template`.
    settings: the entries of generation_config.json; `eos_token_id` may come from config.json.
    bos: the run's `data.bos`; None for a Hugging Face folder.
    special_tokens: the run's `data.special_tokens`; empty for a Hugging Face folder.
    turn_ends: ids of the tokens with which the model was trained to end its chat turns.
    """

    stored: StoredModel
    device: torch.device
    tokenizer: str
    template: str
    settings: Mapping[str, Any]
    bos: bool | None = None
    turn_ends: frozenset[int] = frozenset()
    special_tokens: tuple[str, ...] = ()

    @cached_property
    def model(self) -> nn.Module:
        """The model, loaded on first use."""
        return self.stored.load(self.device)

    @cached_property
    def max_len(self) -> int:
        """Maximum number of tokens in a sequence of the model."""
        return max_seq_len(self.stored.build()) or sys.maxsize

    def find_mistake(self, prompt: Sequence[int]) -> str:
        """Return what is wrong with a prompt's tokens, or an empty string."""
        if len(prompt) >= self.max_len:
            return f"is {len(prompt)} tokens long, but the model has positions for {self.max_len}"
        vocab_size = getattr(self.stored.model_config, "vocab_size", None)
        if vocab_size is not None and max(prompt, default=0) >= vocab_size:
            return f"has token {max(prompt)} of {self.tokenizer}, but the model's vocabulary has {vocab_size} tokens"
        return ""

    def end_ids(self, tokenizer: Tokenizer) -> set[int]:
        """Return the ids of the stop tokens: `turn_ends`, and those in `settings` or else the tokenizer's."""
        end_ids = self.settings.get("eos_token_id")
        if end_ids is None:
            return {tokenizer.end_id, *self.turn_ends}
        return {*(end_ids if isinstance(end_ids, list) else [end_ids]), *self.turn_ends}

    def sampling(self, overrides: Mapping[str, float]) -> Sampling:
        """Return the sampling parameters, each from `overrides`, else from `settings`, else its default.

        Raises UserError if generation_config.json holds an invalid value.
        """
        names = [name for name in _SAMPLING if self.settings.get(name) is not None]
        given: dict[str, Any] = {**{name: self.settings[name] for name in names}, **overrides}
        if given.get("top_k") == -1:  # other software's value for no limit
            given["top_k"] = 0
        try:
            return Sampling(**given)
        except (UserError, TypeError) as error:
            rule = f"{GENERATION}: {error}" if isinstance(error, UserError) else f"{GENERATION}: has {given}"
            raise UserError(f"{rule}\n  to fix: correct it in the model's folder") from error


_SAMPLING = ("temperature", "top_k", "top_p")
"""Entries of generation_config.json that are parameters of `Sampling`."""


def open_generator(
    path: str, device: torch.device, stack: ExitStack, allow_import: Collection[str] = (), ema: bool = False
) -> TextGenerator:
    """Open the model at `path`: a checkpoint, a run folder (its newest checkpoint), or a Hugging Face folder.

    The weights are read when `TextGenerator.model` is first used.  A Hugging Face folder whose model no
    native model spec builds is loaded with transformers.

    stack: a checkpoint's tokenizer files are extracted to a temporary folder, which is removed when the stack closes.
    allow_import: the modules that the checkpoint's configuration may import.
    ema: whether to use the averaged weights of a run with `train.ema`.

    Raises UserError if there is no such model or it cannot generate text, TrainingFailed if a checkpoint is damaged.
    """
    location = locate(local_model_path(path))
    if location.kind == "huggingface":
        folder = Path(location.path)
        if has_config_only(folder):
            check_weights(folder, "path")
        check_tokenizer_of_folder(folder)
        stored = open_model(location)
        tokenizer, template = settings_for_folder(folder)
        return TextGenerator(stored, device, tokenizer, template, _generation_settings(read_model_files(folder)))
    stored = open_model(location, allow_import, ema)
    source = stored.stored
    config = stored.config
    assert source is not None
    assert config is not None
    if config.objective.outputs:
        rule = f"was trained with train.objective={config.train.objective}: it scores texts, and cannot generate them"
        raise setting_error("path", path, rule, fix="export it, and load it with AutoModelForSequenceClassification")
    model_files = ModelFiles.of_checkpoint(source)
    tokenizer, template = stack.enter_context(tokenizer_settings(model_files, config.data.tokenizer))
    turn_ends = frozenset(chat_stop_ids(tokenizer, template) if config.data.source == "chat" else ())
    return TextGenerator(
        stored,
        device,
        tokenizer,
        template,
        _generation_settings(model_files.files),
        config.data.bos,
        turn_ends,
        config.data.special_tokens,
    )


def _generation_settings(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the entries of generation_config.json, with `eos_token_id` from config.json if it has none."""
    config = json.loads(files[CONFIG_JSON]) if CONFIG_JSON in files else {}
    return {"eos_token_id": config.get("eos_token_id"), **json.loads(files.get(GENERATION, b"{}"))}


# ---------------------------------------------------------------------------------------------------------------
# Text


def stream_text(tokens: Iterable[int], prompt: Sequence[int], decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """Yield the text of `tokens`, a continuation of `prompt`, in pieces that end with a complete character."""
    context = list(prompt[-_NUM_CONTEXT_TOKENS:])
    new: list[int] = []
    for token in tokens:
        new.append(token)
        text = decode([*context, *new])[len(decode(context)) :]
        if text and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text
            context = [*context, *new][-_NUM_CONTEXT_TOKENS:]
            new = []
    if new:
        yield decode([*context, *new])[len(decode(context)) :]


# ---------------------------------------------------------------------------------------------------------------
# Command line


def command_line(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = _parser().parse_args(argv)
    add_working_directory_to_sys_path()
    return run_command(lambda: _explaining_memory(options))


def _parser() -> CommandParser:
    parser = CommandParser(prog="python -m trainer.generate", description=__doc__)
    parser.add_argument("path", help="a run folder (its newest checkpoint), a checkpoint, or a Hugging Face folder")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", metavar="TEXT", type=_utf8, help="text for the model to continue")
    text.add_argument(
        "--chat", metavar="TEXT", type=_utf8, help="user message to answer, using the tokenizer's chat template"
    )
    text.add_argument(
        "--prompts",
        metavar="FILE",
        help="a text file with one prompt per line, or a file of records (.jsonl) with `prompt` or `messages`; writes "
        "JSON lines in the same order: the prompt's object with `completion` and `finish` (end or length)",
    )
    parser.add_argument("--batch", type=int, metavar="N", help="number of prompts to complete at once (default: 8)")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="new file for the answers to --prompts (default: stdout)",
    )
    parser.add_argument("--greedy", action="store_true", help="always take the most likely token")
    parser.add_argument(
        "--max-tokens", type=int, default=256, help="maximum number of tokens to generate (default: 256)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        help="random seed; the same seed gives the same text (default: a new one each time, and 0 for --prompts)",
    )
    parser.add_argument("--temperature", type=float, help="default: the model's generation_config.json, or 0.8")
    parser.add_argument("--top-p", type=float, help="default: the model's generation_config.json, or 1")
    parser.add_argument("--ema", action="store_true", help="use the averaged weights of a run with train.ema")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if there is one"
    )
    parser.add_allow_import()
    return parser


def _utf8(text: str) -> str:
    """Return an argument that must be text: Python passes on bytes that are not UTF-8 as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: must be text in UTF-8") from error
    return text


def _explaining_memory(options: argparse.Namespace) -> int:
    """Generate, and name the option that needs less memory if there is too little."""
    try:
        return _generate(options)
    except torch.OutOfMemoryError as error:
        fix = f"--batch below {options.batch or _DEFAULT_BATCH_SIZE}, " if options.prompts else ""
        raise TrainingFailed(f"{error}\n  to fix: {fix}a smaller --max-tokens, or --device cpu") from error


def _generate(options: argparse.Namespace) -> int:
    _check_options(options)
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    with ExitStack() as stack:
        text_generator = open_generator(options.path, torch.device(device), stack, options.allow_import, options.ema)
        tokenizer = find_tokenizer(text_generator.tokenizer, bos=text_generator.bos)
        options_given = {name: getattr(options, name) for name in ("temperature", "top_p")}
        overrides = {name: value for name, value in options_given.items() if value is not None}
        sampling = GREEDY if options.greedy else text_generator.sampling(overrides)
        if options.prompts is None:
            _stream(options, text_generator, tokenizer, sampling)
        else:
            _answer_prompts(options, text_generator, tokenizer, sampling)
    return EXIT_FINISHED


def _stream(
    options: argparse.Namespace, text_generator: TextGenerator, tokenizer: Tokenizer, sampling: Sampling
) -> None:
    """Print the completion of `--prompt`, or the response to `--chat`, as it is generated."""
    if options.chat is None:
        prompt = prompt_tokens(options.prompt, tokenizer, text_generator.tokenizer, text_generator.special_tokens)
    else:
        template, special_tokens = text_generator.template, text_generator.special_tokens
        prompt = chat_prompt_tokens(options.chat, text_generator.tokenizer, "--chat", template, special_tokens)
    max_len = text_generator.max_len
    if mistake := text_generator.find_mistake(prompt):
        key, text = ("--prompt", options.prompt) if options.chat is None else ("--chat", options.chat)
        excerpt = text if len(text) <= _MAX_PROMPT_CHARS else f"{text[:_MAX_PROMPT_CHARS]}..."
        raise setting_error(key, excerpt, mistake, fix="shorten or change it")
    num_tokens = min(options.max_tokens, max_len - len(prompt))
    seed = secrets.randbits(63) if options.seed is None else options.seed
    end_ids = text_generator.end_ids(tokenizer)
    decoder = build_decoder(text_generator.model, text_generator.device, len(prompt) + num_tokens)
    generated = generate_tokens(decoder, [prompt], [num_tokens], sampling, seed, ends=end_ids)
    tokens = (token for token in map(_require_token, generated) if token not in end_ids)
    make_safe = printable if sys.stdout.isatty() else str
    try:
        for text in stream_text(tokens, prompt, tokenizer.decode):
            print(make_safe(text), end="", flush=True)
    except KeyboardInterrupt:
        print(flush=True)
        raise
    print(flush=True)


_NOT_FINITE = "the model's logits are not finite: its weights are damaged, or training has diverged"


def _require_token(generated: Token) -> int:
    """Return the sampled token.  Raises TrainingFailed if it is NO_TOKEN, because the logits were not finite."""
    if generated.token == NO_TOKEN:
        raise TrainingFailed(_NOT_FINITE)
    return generated.token


def _answer_prompts(
    options: argparse.Namespace, text_generator: TextGenerator, tokenizer: Tokenizer, sampling: Sampling
) -> None:
    """Complete the prompts in the file `--prompts` in order.

    With `--out`, flushes each batch of completions to disk.
    """
    max_len = text_generator.max_len
    batch_size = options.batch or _DEFAULT_BATCH_SIZE
    records, prompts = _read_prompts(options, text_generator, tokenizer)
    end_ids = text_generator.end_ids(tokenizer)
    model = text_generator.model
    num_done = 0
    num_tokens = 0
    start_time = time.monotonic()

    def progress() -> str:
        seconds = time.monotonic() - start_time
        line = f"{num_done} of {len(records)} prompts, {num_tokens / seconds:.1f} tokens/s"
        if not num_done:
            return line
        remaining_s = int((len(records) - num_done) * seconds / num_done)
        return f"{line}, {remaining_s // 3600}:{remaining_s // 60 % 60:02d}:{remaining_s % 60:02d} left"

    with ProgressLine(progress):
        for start in range(0, len(records), batch_size):
            batch = range(start, min(start + batch_size, len(records)))
            completions = generate_batch(
                model,
                [prompts[index] for index in batch],
                [min(options.max_tokens, max_len - len(prompts[index])) for index in batch],
                sampling,
                seed=options.seed or 0,
                indices=batch,
                ends=end_ids,
                device=text_generator.device,
            )
            lines = ""
            for index, completion in zip(batch, completions, strict=True):
                if completion.finish == "not finite":
                    raise TrainingFailed(_NOT_FINITE)
                tokens = (token for token in completion.tokens if token not in end_ids)
                text = "".join(stream_text(tokens, prompts[index], tokenizer.decode))
                answer = {**records[index], "completion": text, "finish": completion.finish}
                lines += json.dumps(answer) + "\n"
            if options.out is None:
                print(lines, end="", flush=True)
            else:
                with writing_to("--out", Path(options.out)):
                    append_and_sync(Path(options.out), lines)
            num_done = batch.stop
            num_tokens += sum(len(each.tokens) for each in completions)


def _read_prompts(
    options: argparse.Namespace, text_generator: TextGenerator, tokenizer: Tokenizer
) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Return the records in the file `--prompts`, and their tokenized prompts.  Raises UserError for a bad record."""
    if "://" in options.prompts:
        raise setting_error("--prompts", options.prompts, "is not on a local file system", fix="download the file")
    path = Path(options.prompts).expanduser()
    records: list[dict[str, Any]] = []
    prompts: list[list[int]] = []
    chats: ChatPrompts | None = None
    for location, record in read_prompts(path, "--prompts"):
        if "messages" in record:
            template, special_tokens = text_generator.template, text_generator.special_tokens
            chats = chats or ChatPrompts(text_generator.tokenizer, "--prompts", path, template, special_tokens)
            tokens = chats.tokens(record["messages"], record.get("tools") or ())
        else:
            setting, special_tokens = text_generator.tokenizer, text_generator.special_tokens
            tokens = prompt_tokens(record["prompt"], tokenizer, setting, special_tokens)
        if mistake := text_generator.find_mistake(tokens):
            raise setting_error(
                "--prompts", path, f"{location}: {mistake}", fix="shorten or change the prompt, or leave it out"
            )
        if taken := record.keys() & {"completion", "finish"}:
            rule = f"{location}: has the key {min(taken)!r}, which the answer uses"
            raise setting_error("--prompts", path, rule, fix="rename the key in that file")
        records.append(record)
        prompts.append(tokens)
    if not records:
        raise setting_error("--prompts", path, "has no prompts", fix="write one per line")
    return records, prompts


def _check_options(options: argparse.Namespace) -> None:
    temperature, top_p = options.temperature, options.top_p
    if options.device == "cuda" and not torch.cuda.is_available():
        raise setting_error("--device", options.device, "torch finds no usable GPU", "cpu")
    for key, value, is_legal, rule, legal in (
        ("--max-tokens", options.max_tokens, options.max_tokens >= 1, "must be at least 1", 1),
        ("--batch", options.batch, options.batch is None or options.batch >= 1, "must be at least 1", 1),
        ("--temperature", temperature, 0 <= (temperature or 0) < math.inf, "must be at least 0 and finite", 0),
        ("--top-p", top_p, top_p is None or 0 < top_p <= 1, "must be above 0 and at most 1", 1),
    ):
        if not is_legal:
            raise setting_error(key, value, rule, legal)
    for key, value in (("--temperature", temperature), ("--top-p", top_p)):
        if options.greedy and value:
            raise setting_error(key, value, "cannot be combined with --greedy", fix=f"leave out {key} or --greedy")
    for key, value in (("--batch", options.batch), ("--out", options.out)):
        if options.prompts is None and value is not None:
            raise setting_error(key, value, "needs --prompts FILE", fix=f"leave out {key}")
    if options.out is not None:
        out = Path(options.out)
        if out.exists():
            raise setting_error("--out", out, "exists", fix="choose a file name that is not in use, or remove it")
        if not out.parent.is_dir():
            rule = f"there is no folder {out.parent}"
            raise setting_error("--out", out, rule, fix="create it, or name another one")


if __name__ == "__main__":
    sys.exit(command_line())
