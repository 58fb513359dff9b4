"""The Trainer for distillation, in which a student learns to match a teacher's next-token distribution.

The distribution comes either from a frozen model, sharded like the student, or from a folder in which `trainer.teach`
has stored the teacher's top-k log-probabilities.

Shape suffixes: n tokens in a chunk, N tokens in a micro-batch, D model width, V vocabulary size, k stored tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config import RunConfig
from trainer.config.teacher import TEACHER_KEY, teacher_config
from trainer.data.loader import Batch, EvalLoader, TrainLoader
from trainer.data.opening import open_source
from trainer.data.top_logps import TopLogps, new_top_logps
from trainer.data.transfer import prefetch_to_device
from trainer.errors import setting_error
from trainer.loss import IGNORE, Gradients, find_loss, replace_loss
from trainer.model.gradients import reshard
from trainer.trainer import Trainer
from trainer.weights.loading import load_base, load_initial_weights

TEACHER = "teacher"
"""Key under which a checkpoint's state stores the identity of the teacher's weights."""

_CHUNK_BYTES = 16 * 2**20
"""Maximum size in bytes of one model's fp32 logits for a chunk, unless a single token's logits take more.  Several
tensors of this size are in memory at the same time."""


class DistillationTrainer(Trainer):
    """Trains a student to match the next-token distribution of a teacher: a frozen model, or its stored outputs.

    Logits are computed in chunks and never materialized in full, unless a model itself returns its logits.
    """

    takes_objectives = True
    """True, since this Trainer requires an objective other than next-token prediction."""

    def __init__(self, config: RunConfig) -> None:
        self.teacher: nn.Module | None = None
        super().__init__(config)
        if self.teacher is not None:
            config_of_teacher = teacher_config(self.config)
            assert config_of_teacher is not None
            with self.world.closing_on_user_error():
                self.state.add(TEACHER, load_base(self.teacher, config_of_teacher, self.world, TEACHER_KEY))

    def build_model(self, config: RunConfig | None = None) -> nn.Module:
        """Return the sharded model of `config` (None: this run's).

        For the run's own model, builds the teacher first, unless its outputs are stored in files.  Collective.
        """
        if config is None:
            config_of_teacher = self.world.agreed(lambda: teacher_config(self.config))
            if config_of_teacher is not None:
                self.teacher = super().build_model(config_of_teacher).requires_grad_(False).eval()
        return super().build_model(config)

    def build_loader(self) -> Iterable[Batch]:
        """Return the training data, with the teacher's log-probabilities if they are stored in files."""
        if self.teacher is not None:
            return super().build_loader()
        data = open_source(self.config.data, self.config.vocab_size, "train")
        source = TopLogps(data, self.config.objective.teacher)
        return TrainLoader.from_config(source, self.config, self.world.rank, self.world.size, self.world.device)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return this rank's loss summed over the batch's targets.

        Collectives: first those of the teacher's forward pass, unless its log-probabilities are stored in files, then
        those of the student's.
        """
        teacher: Outputs | TopTokens
        if self.teacher is None:
            teacher = TopTokens(batch["top_ids"].flatten(0, 1), batch["top_logps"].flatten(0, 1))
        else:
            teacher = outputs_of(self.teacher, batch)
        divergence = torch.zeros((), device=self.world.device, dtype=torch.float64)

        def distillation_loss(hidden: torch.Tensor, weight: torch.Tensor | None, targets: torch.Tensor) -> torch.Tensor:
            objective, needs_gradients = self.config.objective, torch.is_grad_enabled()
            loss, sum_of_divergences = _DistillationLoss.apply(  # type: ignore[no-untyped-call]
                hidden.flatten(0, -2), weight, targets.flatten(), teacher, objective, needs_gradients
            )
            divergence.add_(sum_of_divergences)
            return loss

        with replace_loss(distillation_loss):
            loss = super().loss(batch)
        self.log("divergence", divergence, over=(batch["targets"] != IGNORE).sum())
        return loss


@torch.no_grad()
def outputs_of(model: nn.Module, batch: Batch) -> Outputs:
    """Return a model's final hidden states for a batch, and the weight that projects them to logits.

    Collectives: those of a forward pass.
    """
    captured: list[Outputs] = []

    def capture(hidden: torch.Tensor, weight: torch.Tensor | None, targets: torch.Tensor) -> torch.Tensor:
        # Copy the weight, because `reshard` below frees it if it was gathered.
        captured.append(Outputs(hidden.flatten(0, -2), None if weight is None else weight.clone()))
        return hidden.new_zeros(())

    with replace_loss(capture):
        find_loss(model)(batch)
    reshard(model)
    return captured[0]


@dataclass(frozen=True)
class Outputs:
    """Hidden states (N, D), and the weight (V, D) that projects them to logits.

    If the weight is None, `hidden` holds the logits (N, V) themselves.
    """

    hidden: torch.Tensor
    weight: torch.Tensor | None

    def logits(self, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) of the logits in fp32, (n, V)."""
        hidden_nD = self.hidden[start:stop]
        return (hidden_nD if self.weight is None else hidden_nD @ self.weight.T).float()

    def log_prob_pair(self, student_nV: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probabilities of student and teacher at rows [start, stop), (n, V) each.

        student_nV: the student's log-probabilities at these rows.
        """
        return student_nV, self.logits(start, stop).log_softmax(1)


@dataclass(frozen=True)
class TopTokens:
    """A teacher's most likely next tokens and their log-probabilities, (N, k) each.

    Student and teacher are compared on k + 1 outcomes: each of these tokens, and all other tokens together.  For the
    Kullback-Leibler and Jensen-Shannon divergences, the result is a lower bound on the divergence over the full
    vocabulary, with equality for k = V.
    """

    ids: torch.Tensor
    logps: torch.Tensor

    def log_prob_pair(self, student_nV: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probabilities of student and teacher at rows [start, stop), (n, k + 1) each.

        student_nV: the student's log-probabilities at these rows.
        """
        student_nk = student_nV.gather(1, self.ids[start:stop])
        return _with_other_tokens(student_nk), _with_other_tokens(self.logps[start:stop])


def _with_other_tokens(logps_nk: torch.Tensor) -> torch.Tensor:
    """Append the log-probability of all other tokens together, and return the result, (n, k + 1)."""
    other_n1 = (1 - logps_nk.exp().sum(1, keepdim=True)).clamp(min=_MIN_OTHER_PROB).log()
    return torch.cat([logps_nk, other_n1], 1)


_MIN_OTHER_PROB = 1e-7
"""Lower bound on the total probability of all other tokens: about the rounding error of 1 - x in fp32."""


def _rows_per_chunk(vocab_size: int) -> int:
    return max(1, _CHUNK_BYTES // (4 * vocab_size))


class _DistillationLoss(torch.autograd.Function):
    """Returns the loss and the divergence from the teacher, each summed over targets; only the loss has a gradient.

    Gradients are computed in the forward pass, while a chunk's logits exist, as in `linear_cross_entropy`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor | None,
        targets_N: torch.Tensor,
        teacher: Outputs | TopTokens,
        objective: Any,
        needs_gradients: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        student, needs_grad = Outputs(hidden_ND, weight_VD), ctx.needs_input_grad
        gradients = Gradients(hidden_ND, needs_gradients and needs_grad[0], needs_gradients and needs_grad[1])
        chunk_rows = _rows_per_chunk(hidden_ND.shape[1] if weight_VD is None else weight_VD.shape[0])
        loss, divergence = (hidden_ND.new_zeros((), dtype=torch.float32) for _ in range(2))
        for start in range(0, len(targets_N), chunk_rows):
            stop = min(start + chunk_rows, len(targets_N))
            targets_n = targets_N[start:stop]
            mask_n = targets_n != IGNORE
            logits_nV = student.logits(start, stop).requires_grad_(gradients.is_needed)
            with torch.set_grad_enabled(gradients.is_needed):
                logps_nV = logits_nV.log_softmax(1)
                divergences_n = objective.divergence(*teacher.log_prob_pair(logps_nV, start, stop))
                target_logps_n = logps_nV.gather(1, targets_n.where(mask_n, 0).unsqueeze(1)).squeeze(1)
                losses_n = (1 - objective.hard) * divergences_n - objective.hard * target_logps_n
                chunk_loss = losses_n.where(mask_n, 0.0).sum()
            loss += chunk_loss.detach()
            divergence += divergences_n.detach().where(mask_n, 0.0).sum()
            if gradients.is_needed:
                (grad_nV,) = torch.autograd.grad(chunk_loss, logits_nV)
                grad_nV = grad_nV.to(hidden_ND.dtype)
                if weight_VD is not None:
                    gradients.add(grad_nV, hidden_ND[start:stop], weight_VD, start)
                elif gradients.hidden_ND is not None:
                    gradients.hidden_ND[start:stop] = grad_nV
        ctx.save_for_backward(gradients.hidden_ND, gradients.weight_VD)
        ctx.weight_dtype = None if weight_VD is None else weight_VD.dtype
        ctx.mark_non_differentiable(divergence)
        return loss, divergence

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        scale = grad_outputs[0]
        hidden = None if grad_hidden_ND is None else grad_hidden_ND * scale
        weight = None if grad_weight_VD is None else (grad_weight_VD * scale).to(ctx.weight_dtype)
        return hidden, weight, None, None, None, None


@torch.no_grad()
def write_top_logps(config: RunConfig, folder: Path, num_top: int) -> int:
    """Write the teacher's `num_top` most likely next tokens at each position of a run's data to `folder`.

    Returns the number of samples.  Uses one process.  Raises UserError if the configuration names no teacher model, if
    the data is endless, if `num_top` exceeds the vocabulary size, or if the folder has already been written.
    """
    config_of_teacher = teacher_config(config)
    if config_of_teacher is None:
        raise setting_error("train.objective", config.train.objective, "has no teacher model", fix="use recipe=distill")
    if config.data.source == "synthetic":
        rule = "has no end, and the files must hold every sample"
        raise setting_error("data.source", config.data.source, rule, fix="use your own data")
    vocab_size = config_of_teacher.vocab_size
    assert vocab_size is not None
    if num_top > vocab_size:
        raise setting_error("--top", num_top, "is more tokens than the vocabulary has", vocab_size)
    trainer = Trainer(config_of_teacher)
    try:
        with trainer.lifecycle.without_writing():
            load_initial_weights(trainer.model, trainer.model_files, trainer.config, trainer.world, TEACHER_KEY)
            batch_size = int(trainer.config.train.micro_batch_size)
            source = open_source(trainer.config.data, vocab_size, "train")
            with new_top_logps(folder, source, num_top, str(config.objective.teacher)) as (ids, logps):
                batches = EvalLoader(source, global_batch_size=batch_size, micro_batch_size=batch_size)
                chunk_rows, num_tokens, first = _rows_per_chunk(vocab_size), batch_size * source.seq_len, 0
                trainer.model.eval()
                for batch in prefetch_to_device(batches, trainer.world.device):
                    outputs = outputs_of(trainer.model, batch)
                    chunks = [
                        outputs.logits(start, min(start + chunk_rows, num_tokens)).log_softmax(1).topk(num_top)
                        for start in range(0, num_tokens, chunk_rows)
                    ]
                    top_logps, top_ids = (torch.cat(parts).cpu().numpy() for parts in zip(*chunks, strict=True))
                    shape, last = (batch_size, source.seq_len, num_top), min(first + batch_size, len(source))
                    logps[first:last] = top_logps.reshape(shape)[: last - first]  # the last batch is padded
                    ids[first:last] = top_ids.reshape(shape)[: last - first]
                    first = last
            return len(source)
    finally:
        trainer.close()
