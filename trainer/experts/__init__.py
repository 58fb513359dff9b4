"""Mixture-of-experts layers: expert parallelism, grouped matmuls, and load balancing.

A model runs its experts through `apply_experts`, and its model spec names the modules that hold them
(`ModelSpec.experts`).  Such a model also supports expert parallelism (`mesh.expert`), in which the experts are divided
among consecutive ranks: `apply_experts` then sends tokens to the ranks of their experts, and returns the results to the
tokens' ranks.

To balance and measure the load of experts, a layer selects experts with `TopKExperts`, and returns their `Load` (from
`expert_load`), which counts only tokens with targets.  The model passes the loads of its layers to its `Balance`
module, and adds the result to its loss.  This package does not depend on any particular model.

Shape suffixes: D model width, E experts, A experts per token, S tokens on this rank, M token-expert pairs.
"""

from __future__ import annotations

from trainer.experts.adapters import (
    ADAPTER_NAME,
    ADAPTERS,
    ExpertAdapter,
    ExpertFactor,
    adapters_of,
    add_adapter,
    expert_matmuls,
    matrices_of,
)
from trainer.experts.balance import (
    BALANCE,
    Balance,
    ExpertBalance,
    Load,
    TopKExperts,
    expert_load,
    find_balance,
    global_balance,
)
from trainer.experts.dispatch import Estimate, ExpertGroup, apply_experts, choices_of
from trainer.experts.grouped import GROUPED_MM, TORCH_GROUPED_MM, fake_tensors, grouped_bias, grouped_mm, grouped_outer
from trainer.experts.parallel import find_experts, observe_experts, shard_experts, simulate_expert_group

__all__ = [
    "ADAPTERS",
    "ADAPTER_NAME",
    "BALANCE",
    "GROUPED_MM",
    "TORCH_GROUPED_MM",
    "Balance",
    "Estimate",
    "ExpertAdapter",
    "ExpertBalance",
    "ExpertFactor",
    "ExpertGroup",
    "Load",
    "TopKExperts",
    "adapters_of",
    "add_adapter",
    "apply_experts",
    "choices_of",
    "expert_load",
    "expert_matmuls",
    "fake_tensors",
    "find_balance",
    "find_experts",
    "global_balance",
    "grouped_bias",
    "grouped_mm",
    "grouped_outer",
    "matrices_of",
    "observe_experts",
    "shard_experts",
    "simulate_expert_group",
]
