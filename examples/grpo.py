"""Group relative policy optimization (GRPO): a subclass of Trainer that generates what it trains on.

    python examples/grpo.py recipe=examples/grpo.yaml [section.key=value ...]
    torchrun --nproc-per-node 2 examples/grpo.py recipe=examples/grpo.yaml train.steps=100

The first `SUPERVISED_STEPS` steps train on correct answers.  Each later step generates `GROUP` answers to each prompt
of the global batch, and makes those with a higher reward than their group's mean more likely.  Prompts and rewards are
in `sort_digits.py`.  Source: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, without the division by the group's
standard deviation and the mean over each text (Liu et al. 2025, "Understanding R1-Zero-Like Training",
arXiv:2503.20783), and without a reference model.
"""

import sys
import time

import sort_digits as task
import torch

from trainer import Sampling, Trainer, TrainLoader, gathered, generate_batch, main, token_logprobs

SUPERVISED_STEPS = 90
GROUP = 8
CLIP = 0.2
IGNORE = -100
NUM_EVAL_PROMPTS = 256


class GRPOTrainer(Trainer):
    """Trains on the rewards of texts that the model generates itself.

    A sample is a prompt with a correct answer: the tokens before the first target are the prompt.
    """

    def build_loader(self):
        return TrainLoader.from_config(task.SOURCE, self.config, self.world.rank, self.world.size, self.world.device)

    def build_eval_loader(self):
        """Return this rank's share of the last samples, which training does not reach."""
        last = range(len(task.SOURCE) - NUM_EVAL_PROMPTS + self.world.rank, len(task.SOURCE), self.world.size)
        return [{name: torch.from_numpy(entry) for name, entry in task.SOURCE.batch(list(last)).items()}]

    def train_step(self, micro_batches):
        if self.state.step >= SUPERVISED_STEPS:
            start_time = time.perf_counter()
            with gathered(self.model):
                micro_batches = [self.roll_out(batch) for batch in micro_batches]
            self.log("generate_s", time.perf_counter() - start_time, over=1)
        return super().train_step(micro_batches)

    def roll_out(self, batch):
        """Return a micro-batch of generated texts, with their advantages and the log-probabilities of their tokens."""
        prompts, indices = [], []
        for tokens, targets, index in zip(batch["tokens"], batch["targets"], batch["index"].tolist(), strict=True):
            num_prompt_tokens = int((targets != IGNORE).nonzero()[0]) + 1
            prompts += [tokens[:num_prompt_tokens].tolist()] * GROUP
            indices += range(GROUP * index, GROUP * (index + 1))
        texts = self.generate(prompts, Sampling(temperature=1.0), indices)
        rewards = torch.tensor([task.reward(p, text.tokens) for p, text in zip(prompts, texts, strict=True)])
        self.log("reward", rewards.sum(), over=len(rewards))
        advantages = rewards.view(-1, GROUP) - rewards.view(-1, GROUP).mean(1, keepdim=True)
        shape = (len(prompts), self.config.data.seq_len)
        tokens, targets = torch.zeros(shape, dtype=torch.long), torch.full(shape, IGNORE)
        old_logprobs = torch.zeros(shape)
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            sequence, generated = prompt + text.tokens, slice(len(prompt) - 1, len(prompt) - 1 + len(text.tokens))
            tokens[row, : len(sequence) - 1] = torch.tensor(sequence[:-1])
            targets[row, generated] = torch.tensor(text.tokens)
            old_logprobs[row, generated] = torch.tensor(text.logprobs)
        return {
            "tokens": tokens,
            "targets": targets,
            "old_logprobs": old_logprobs,
            "advantages": advantages.flatten(),
        }

    def generate(self, prompts, sampling, indices=None):
        return generate_batch(
            self.model,
            prompts,
            task.MAX_TOKENS,
            sampling,
            seed=self.config.run.seed + self.state.step,
            indices=indices,
            ends={task.END},
            device=self.world.device,
        )

    def count(self, batch):
        """Return the number of generated tokens; in an evaluation, the number of prompts."""
        return super().count(batch) if self.model.training else len(batch["tokens"])

    def loss(self, batch):
        if not self.model.training:
            return self.error(batch)
        if "advantages" not in batch:
            return super().loss(batch)
        logprobs, advantages = token_logprobs(self.model, batch), batch["advantages"].unsqueeze(1)
        counts, change = batch["targets"] != IGNORE, logprobs - batch["old_logprobs"]
        self.log("drift", (change.abs() * counts).sum(), over=counts.sum())
        ratio = change.exp()
        objective = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        return -(objective * counts).sum()

    def error(self, batch):
        """Return the sum of 1 - reward over the greedy answers to a batch of prompts: lower is better."""
        ends = (batch["targets"] != IGNORE).int().argmax(1).tolist()
        prompts = [tokens[: end + 1].tolist() for tokens, end in zip(batch["tokens"], ends, strict=True)]
        texts = self.generate(prompts, Sampling(temperature=0.0))
        rewards = torch.tensor([task.reward(p, text.tokens) for p, text in zip(prompts, texts, strict=True)])
        self.log("reward", rewards.sum(), over=len(rewards))
        return (1 - rewards).sum()


if __name__ == "__main__":
    sys.exit(main(GRPOTrainer))
