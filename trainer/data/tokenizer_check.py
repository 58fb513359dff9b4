"""Checks that token shards were made with the tokenizer that the initial weights were trained with."""

from __future__ import annotations

from contextlib import suppress

from trainer.config import RunConfig
from trainer.config.initial_weights import allows_another, find_weights_tokenizer, resumes
from trainer.data.source import Source
from trainer.data.tokenizer import find_tokenizer
from trainer.errors import UserError, setting_error


def check_tokenizer(source: Source, config: RunConfig) -> None:
    """Raise UserError if token shards were made with a different tokenizer than the initial weights were trained with.

    Text needs no check: it is tokenized with `data.tokenizer`, which was checked when the configuration was loaded.
    """
    if config.data.source != "tokens" or source.tokenizer is None or allows_another(config) or resumes(config):
        return
    own = find_weights_tokenizer(config)
    if own is None or source.tokenizer == find_tokenizer(config.data.tokenizer, bos=config.data.bos).name:
        return
    for bos in (None, True, False):
        with suppress(UserError):  # raised if the tokenizer has no BOS token
            if source.tokenizer == find_tokenizer(own, bos=bos).name:
                return
    what = f"the shards were made with another tokenizer ({source.tokenizer}) than the weights were trained with, {own}"
    fix = "prepare the text again, with --tokenizer and that file; to use these on purpose: "
    raise setting_error("data.path", config.data.path, what, fix=f"{fix}checkpoint.allow_changes=[data.tokenizer]")
