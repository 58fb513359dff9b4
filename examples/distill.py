"""Distillation: a subclass of Trainer with its own loss, from a second, frozen, sharded model.

    python examples/distill.py recipe=llama_small [section.key=value ...]
    torchrun --nproc-per-node 2 examples/distill.py recipe=llama_small train.steps=50

This teacher has random weights, because nothing is downloaded; a real one would be loaded after it is built.
"""

import dataclasses
import sys

import torch
import torch.nn.functional as F

from trainer import Trainer, main


class DistillTrainer(Trainer):
    """Trains a student on the data and on a wider teacher's predictions, in equal parts."""

    def build_model(self, config=None):
        if config is None and not hasattr(self, "teacher"):
            shape = dataclasses.replace(self.config.model, dim=2 * self.config.model.dim)
            self.teacher = super().build_model(dataclasses.replace(self.config, model=shape))
            self.teacher.requires_grad_(False).eval()
        return super().build_model(config)

    def loss(self, batch):
        student = self.model(batch["tokens"]).flatten(0, 1).float()
        with torch.no_grad():
            teacher = self.teacher(batch["tokens"]).flatten(0, 1).float()
        targets = batch["targets"].flatten()
        data = F.cross_entropy(student, targets, ignore_index=-100, reduction="sum")
        divergence = F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="none").sum(-1)
        return 0.5 * data + 0.5 * (divergence * (targets != -100)).sum()


if __name__ == "__main__":
    sys.exit(main(DistillTrainer))
