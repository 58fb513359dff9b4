"""A task for `grpo.py`, sorting four to six digits: prompts, correct answers for the supervised phase, and rewards.

Replace this file with a task of your own: `SOURCE`, `END`, `MAX_TOKENS` and `reward` are all that `grpo.py` uses.
"""

import numpy as np

from trainer import Source

EQUALS, END = 10, 11  # the tokens after the ten digits
LENGTHS = (4, 5, 6)
MAX_TOKENS = max(LENGTHS) + 1


class Digits(Source):
    """Samples such as `3 1 4 1 = 1 1 3 4 END`, in which the targets are the answer."""

    seq_len, vocab_size = 2 * max(LENGTHS) + 1, 12

    def __len__(self):
        return 2**20

    def batch(self, indices):
        tokens = np.full((len(indices), self.seq_len + 1), END)
        targets = np.full((len(indices), self.seq_len), -100)
        for row, index in enumerate(indices):
            if index >= 0:
                random = np.random.Generator(np.random.Philox(key=int(index)))
                digits = random.integers(0, 10, random.choice(LENGTHS))
                sample = [*digits, EQUALS, *sorted(digits), END]
                tokens[row, : len(sample)] = sample
                targets[row, len(digits) : len(sample) - 1] = sample[len(digits) + 1 :]
        return {"tokens": tokens[:, :-1], "targets": targets, "index": np.asarray(indices)}


SOURCE = Digits()


def reward(prompt, answer):
    """Return the fraction of the answer's tokens that are correct, from 0 to 1."""
    expected = [*sorted(prompt[:-1]), END]
    return sum(a == b for a, b in zip(answer, expected, strict=False)) / max(len(answer), len(expected))
