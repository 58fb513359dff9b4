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

OnResume = Literal["never", "fixed", "free", "ignored"]
"""Whether a key may change when a run resumes: `never`; `fixed`, only if `checkpoint.allow_changes` names it; `free`;
or `ignored`, if it does not affect training and a change is not even reported."""


def declare(
    default: Any,
    meaning: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    pattern: str | None = None,
    form: str | None = None,
    aliases: Mapping[str, object] | None = None,
    example: object = None,
    needs: str | None = None,
    on_resume: OnResume | None = None,
    training_only: bool = False,
    is_computed: bool = False,
) -> Any:
    """Return the dataclass field of one configuration key.

    meaning: the key's help text.
    at_least, above, at_most, below: limits for numbers.
    pattern: a regular expression that text must match; `form` describes it, or the type, in words.
    aliases: other names of values, with the values that messages propose instead: {"gpu": "cuda"}.
    example: a value that messages propose if none is near; needed where the default is empty or disables the feature.
    needs: "KEY=VALUE" or "KEY": the key may differ from its default only if KEY has this value, or is not false, 0 or
        empty.
    on_resume: whether the key may change when a run resumes; by default, its section decides.
    training_only: marks a model field that only affects training, such as dropout: it may differ from the value that
        the model in `train.init_from` was trained with.
    is_computed: marks a value that follows from other keys.  It is not a key, and is not stored.
    """
    given = {
        "meaning": meaning,
        "at_least": at_least,
        "above": above,
        "at_most": at_most,
        "below": below,
        "pattern": pattern,
        "form": form,
        "aliases": aliases,
        "example": example,
        "needs": needs,
        "on_resume": on_resume,
    }
    metadata = {name: value for name, value in given.items() if value is not None}
    metadata |= {"training_only": training_only, "is_computed": is_computed}
    return field(default=default, metadata=metadata)


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
            is_inclusive = limit in ("at_least", "at_most")
            # A model's numbers must also fit each other: its smallest width is not a width that suits its heads.
            is_legal = is_inclusive and value == number and not key.startswith("model.")
            nearest_legal = limits[limit] if is_legal else None
            rule = f"must be {limit.replace('_', ' ')} {limits[limit]}"
            null = re.search(r"null: ([^;]+)", str(limits.get("meaning", "")))
            fix = f"{key}=null means {null[1]}" if null and nearest_legal is None else ""
            suggestion = example() if nearest_legal is None and not fix else None
            raise setting_error(key, value, rule, suggestion if nearest_legal is None else nearest_legal, fix=fix)


def union_members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union type, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
