"""Plans for tensor parallelism that models share; `trainer.model.tensor` explains the styles."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.model_spec import TensorStyle

ATTENTION: dict[str, TensorStyle] = {
    "tok_embeddings": "vocabulary",
    "layers.*.attention": "input",
    "layers.*.attention.wq": "columns",
    "layers.*.attention.wk": "columns",
    "layers.*.attention.wv": "columns",
    "layers.*.attention.wo": "rows",
    "head.output": "vocabulary",
}
"""The plan of a decoder outside its feed-forward layers."""

FEED_FORWARD: dict[str, TensorStyle] = {
    "layers.*.feed_forward": "input",
    "layers.*.feed_forward.w1": "columns",
    "layers.*.feed_forward.w3": "columns",
    "layers.*.feed_forward.w2": "rows",
}
"""The plan of SwiGLU feed-forward layers."""

DENSE = {**ATTENTION, **FEED_FORWARD}
"""The plan of a decoder with SwiGLU feed-forward layers."""

MOE: dict[str, TensorStyle] = {"layers.*.moe": "sequence"}
"""The plan of layers with experts.  Each token chooses its experts by itself; its rank computes them, or sends it
to the ranks that hold them (`mesh.expert`)."""

EXPERTS = {**ATTENTION, **MOE}
"""The plan of a decoder with experts."""
