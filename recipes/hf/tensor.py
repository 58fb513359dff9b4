"""The plan for tensor parallelism that transformers ships with a model, in the styles of `trainer.model.tensor`.

Between the layers of these models all tokens of a group must be there: their masks and rotary embeddings are made for
as many tokens as there are hidden states.  So every rank computes norms and residuals for all tokens, and only its own
tokens reach the head (`model.py`).
"""

from __future__ import annotations

from typing import Any

import transformers

from trainer.errors import UserError
from trainer.model_spec import TensorStyle, matches_pattern

_STYLES: dict[str, TensorStyle] = {"colwise": "columns", "rowwise": "rows_gathered"}
_WHOLE = ("replicate", "replicated_with_grad_allreduce")
"""The library's styles for weights that every rank holds."""


def tensor_plan(model: Any) -> dict[str, TensorStyle]:
    """Return the library's plan; the embedding and the head stay whole.

    Raises UserError if the library has no plan for the model, if a style has no counterpart, if a matrix in the layers
    is not named, or for dropout outside attention: ranks would drop different elements of the same hidden states.
    """
    library = f"model_type={model.config.model_type}: transformers {transformers.__version__}"
    library_plan = model.config.base_model_tp_plan or {}
    if not library_plan:
        raise UserError(f"{library} ships no plan for it")
    for entry, rate in model.config.to_dict().items():
        if "drop" in entry and "att" not in entry and isinstance(rate, float) and rate > 0:
            rule = f"ranks would drop different elements of the same hidden states with {entry}={rate} in config.json"
            raise UserError(f"model_type={model.config.model_type}: {rule}")
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    plan: dict[str, TensorStyle] = {}
    for name, style in library_plan.items():
        if style in _STYLES:
            plan[f"{prefix}{name}"] = _STYLES[style]
        elif style not in _WHOLE:
            raise UserError(f"{library} splits {prefix}{name} by {style!r}; only colwise and rowwise are supported")
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    plan |= {name: "sequence" for name, module in model.named_modules() if any(module is end for end in ends)}
    for name, parameter in model.named_parameters():
        parents = [name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)]
        if parameter.ndim > 1 and not any(matches_pattern(each, pattern) for each in parents for pattern in plan):
            raise UserError(f"{library} has a plan that does not name {name}")
    return plan
