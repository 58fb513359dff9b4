"""The declaration of one configuration key: its default, meaning and limits."""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.errors import setting_error


def declare(default: Any, meaning: str, **limits: Any) -> Any:
    """Return the dataclass field of one configuration key, with its default, its help text and its limits.

    limits: `at_least`, `above`, `at_most` and `below` for numbers.  `aliases` maps other names of values to the values
        that messages suggest: {"gpu": "cuda"}.  `form` describes valid values if the type alone does not.
        `training_only=True` marks a model field that only affects training, such as dropout: it may differ from the
        value that the model in `train.init_from` was trained with.
    """
    if "free" in limits:
        limits["training_only"] = limits.pop("free")  # the old name; remove in the next release
    return field(default=default, metadata={"meaning": meaning, **limits})


@dataclass(frozen=True)
class BalanceConfig:
    """Base class for configurations of mixture-of-experts models: the settings that balance the experts' load.

    See `trainer.experts.Balance` and `trainer.experts.TopKExperts`.
    """

    balance: float = declare(
        0.0, "coefficient of the load-balancing loss over the global batch; 0: none", at_least=0, training_only=True
    )
    balance_shares: Literal["exact", "last"] = declare(
        "exact",
        "fractions of tokens routed to each expert, as used in that loss: `exact`, those of this step, which takes one "
        "more forward pass per micro-batch if there are several; `last`, those of the previous step, at no cost",
        training_only=True,
    )
    balance_rate: float | None = declare(
        None,
        "amount by which each expert's bias changes after a step, to even out the experts' load; 0: constant biases; "
        "null: no biases",
        at_least=0,
        training_only=True,
    )
    sequence_balance: float = declare(
        0.0, "coefficient of the load-balancing loss within each sequence; 0: none", at_least=0, training_only=True
    )
    z_loss: float = declare(
        0.0, "coefficient of the squared log-sum-exp of the router's logits; 0: none", at_least=0, training_only=True
    )

    @property
    def needs_probs(self) -> bool:
        """Whether a loss needs the router's probabilities."""
        return self.balance > 0 or self.sequence_balance > 0


def check_number(
    key: str, value: Any, number: float, limits: Mapping[str, Any], example: Callable[[], object] = lambda: None
) -> None:
    """Raise UserError unless `number` is finite and within the key's limits (see `declare`).

    value: the entire value of the key, which is `number` or contains it.
    example: returns a value to suggest if there is no nearest legal value.
    """
    if isinstance(number, int) and not -(2**63) <= number < 2**63:
        raise setting_error(key, "(a number of more than 63 bits)", "must be a number that fits in 64 bits")
    if not math.isfinite(number):
        raise setting_error(key, value, "must be finite", proposal=example())
    for limit, is_violated in (
        ("at_least", lambda bound: number < bound),
        ("at_most", lambda bound: number > bound),
        ("above", lambda bound: number <= bound),
        ("below", lambda bound: number >= bound),
    ):
        if limit in limits and is_violated(limits[limit]):
            nearest_legal = limits[limit] if limit in ("at_least", "at_most") and value == number else None
            rule = f"must be {limit.replace('_', ' ')} {limits[limit]}"
            null = re.search(r"null: ([^;]+)", str(limits.get("meaning", "")))
            fix = f"{key}=null means {null[1]}" if null and nearest_legal is None else ""
            suggestion = example() if nearest_legal is None and not fix else None
            raise setting_error(key, value, rule, suggestion if nearest_legal is None else nearest_legal, fix=fix)


def union_members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union type, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
