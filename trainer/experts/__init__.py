"""Mixtures of experts: which rank computes which expert, grouped matrix products, and balance.

A model computes its experts through `mix`, and its recipe names the modules that hold them (`Recipe.experts`).  Such a
model also supports expert parallelism (`mesh.expert`), where consecutive ranks share out the experts: `mix` then brings
tokens to the ranks of their experts and the results back.  Independent of recipes.

Shape suffixes: D model width, E experts, A experts per token, S tokens of this rank, M token-expert pairs.
"""

from __future__ import annotations

from trainer.experts.adapters import (
    ADAPTER,
    ADAPTERS,
    ExpertAdapter,
    ExpertFactor,
    adapters_of,
    add_adapter,
    matrices_of,
    products,
)
from trainer.experts.balance import BalanceLoss, global_balance
from trainer.experts.dispatch import Estimate, ExpertGroup, choices_of, mix
from trainer.experts.grouped import GROUPED, GROUPED_PRODUCT, fake_tensors, grouped_mm, grouped_outer
from trainer.experts.sharing import find_experts, imagine_group, share_out, watched

__all__ = [
    "ADAPTER",
    "ADAPTERS",
    "GROUPED",
    "GROUPED_PRODUCT",
    "BalanceLoss",
    "Estimate",
    "ExpertAdapter",
    "ExpertFactor",
    "ExpertGroup",
    "adapters_of",
    "add_adapter",
    "choices_of",
    "fake_tensors",
    "find_experts",
    "global_balance",
    "grouped_mm",
    "grouped_outer",
    "imagine_group",
    "matrices_of",
    "mix",
    "products",
    "share_out",
    "watched",
]
