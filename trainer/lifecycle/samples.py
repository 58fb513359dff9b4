"""Generates samples from the prompts in `log.prompts` at each evaluation."""

from __future__ import annotations

from functools import cached_property

from torch import nn

from trainer.config import RunConfig
from trainer.config.rules import compiles_blocks
from trainer.data.prompts import chat_end_ids, chat_prompt_tokens, prompt_tokens
from trainer.data.tokenizer import find_tokenizer
from trainer.distributed.world import World
from trainer.metrics.hub import Metrics
from trainer.metrics.record import Record
from trainer.model.gradients import evaluation_mode
from trainer.model.sample import generate_sample
from trainer.optim.average import WeightAverage


class Samples:
    """Continues `log.prompts`, or answers them if the data is chats.  The seed is fixed, so that samples compare."""

    def __init__(
        self, config: RunConfig, world: World, model: nn.Module, average: WeightAverage, metrics: Metrics
    ) -> None:
        self._config, self._world, self._model = config, world, model
        self._average, self._metrics = average, metrics

    @cached_property
    def _prompts(self) -> list[tuple[str, list[int]]]:
        """Each prompt with its tokens."""
        data = self._config.data
        if not self._config.log.prompts:
            return []
        if data.source == "chat":
            how = (data.tokenizer, "log.prompts", data.chat_template)
            return [(text, chat_prompt_tokens(text, *how)) for text in self._config.log.prompts]
        tokenizer = find_tokenizer(data.tokenizer)
        return [(text, prompt_tokens(text, tokenizer)) for text in self._config.log.prompts]

    @cached_property
    def _ends(self) -> set[int]:
        """The tokens that end a document or an assistant's turn."""
        data = self._config.data
        if data.source == "chat":
            return chat_end_ids(data.tokenizer, data.chat_template)
        return {find_tokenizer(data.tokenizer).end_id}

    def check(self) -> None:
        """Raise UserError for a prompt that cannot be tokenized, for example if the tokenizer has no chat template."""
        assert len(self._prompts) == len(self._config.log.prompts)

    def write(self, step: int) -> None:
        """Write a record for each prompt.  Collectives: those of one forward pass per token."""
        if not self._prompts:
            return
        config, tokenizer = self._config, find_tokenizer(self._config.data.tokenizer)
        sizes = config.log.prompt_tokens, config.data.seq_len
        compiles = compiles_blocks(config.train.compile, self._world.device.type)
        with self._average.swapped_in(), evaluation_mode(self._model):
            for prompt, given in self._prompts:
                written = generate_sample(self._model, self._world, given, *sizes, compiles, self._ends)[len(given) :]
                text = tokenizer.decode([token for token in written if token not in self._ends])
                self._metrics.write(Record(kind="sample", step=step, prompt=prompt, text=text))
