"""A Trainer in which rank MESHTRAINER_TEST_RANK hangs in the third step, at the place MESHTRAINER_TEST_PLACE."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

import trainer.checkpoint.writer
from tests.helpers.custom_recipes import UNITS, Mlp, MlpConfig
from trainer import Recipe, RunConfig, Trainer, register
from trainer.distributed.channel import TimedStore
from trainer.metrics.record import Record

Batch = dict[str, torch.Tensor]


class HangingState:
    """State with a `state_dict` that never returns."""

    def __init__(self, owner: SleepingTrainer) -> None:
        self.owner = owner

    def state_dict(self) -> dict[str, int]:
        self.owner.sleep_in("save")
        return {"nothing": 0}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


class SleepingTrainer(Trainer):
    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.state.add("nap", HangingState(self))
        self.model.table.register_forward_hook(self.sleep_in_its_backward)  # type: ignore[union-attr, arg-type]
        write, take = trainer.checkpoint.writer.write_tensors, self.checkpoints.take_result

        def write_tensors(*args: Any) -> Any:
            self.sleep_in("writing")
            return write(*args)

        def take_result(*args: Any) -> Any:
            self.sleep_in("collect")
            return take(*args)

        get = TimedStore.get

        def get_late(messages: TimedStore, key: str) -> str:
            if key.endswith("verdict"):
                time.sleep(float(os.environ.get("MESHTRAINER_TEST_HEARS_LATE_S", "0")))
            return get(messages, key)

        TimedStore.get = get_late  # type: ignore[method-assign]
        trainer.checkpoint.writer.write_tensors = write_tensors
        self.checkpoints.take_result = take_result  # type: ignore[method-assign]

    def sleep_in(self, place: str) -> None:
        chosen = os.environ.get("MESHTRAINER_TEST_PLACE")
        if place == chosen and self.world.rank == int(os.environ["MESHTRAINER_TEST_RANK"]) and self.state.step >= 2:
            hang()

    def build_loader(self) -> Iterable[Batch]:
        return HangingLoader(super().build_loader(), self)

    def loss(self, batch: Batch) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.sleep_in("forward")
        else:
            time.sleep(float(os.environ.get("MESHTRAINER_TEST_EVAL_S", "0")))
            self.sleep_in("evaluate")
        return super().loss(batch)

    def sleep_in_its_backward(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: self.sleep_in("backward"))

    def on_step(self, record: Record) -> None:
        self.sleep_in("on_step")


class HangingLoader:
    def __init__(self, loader: Iterable[Batch], owner: SleepingTrainer) -> None:
        self.loader, self.owner = loader, owner

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.loader:
            self.owner.sleep_in("data")
            yield batch


def hang() -> None:
    while True:
        time.sleep(1000)


register(Recipe("sleeping", MlpConfig, Mlp, UNITS, trainer=SleepingTrainer))
