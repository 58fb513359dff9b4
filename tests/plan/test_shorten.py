"""A model without most of its identical blocks is planned like the whole one."""

from __future__ import annotations

import pytest

from tests.helpers.cases import in_campaign
from tests.helpers.plan_truth import config_of
from trainer.config.parallel import MeshShape, resolve_expert_method
from trainer.model.network import build_network
from trainer.plan import probe
from trainer.plan.machine import find_machine
from trainer.plan.plan import make_plan
from trainer.plan.shorten import find_series

SHAPE = MeshShape(2, 4)
DEEP = "model.num_layers=16"


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("llama_small", [DEEP, "train.activation_checkpoint=2", "train.offload_activations=0.5"]),
        *in_campaign(
            ("llama_small", ["model.num_layers=19", "train.activation_checkpoint=4"]),
            ("llama_small", ["model.num_layers=18", "train.offload_activations=0.25"]),
            ("llama_small", [DEEP, "train.activation_checkpoint=budget:0.3"]),
            ("llama_small", [DEEP, "fsdp.wrap=size:50000"]),
            ("llama_small", [DEEP, "lora.rank=4"]),
            ("gpt2", []),
            ("gpt_oss_small", ["model.num_layers=14"]),
            ("deepseek_v3_small", ["model.num_layers=12", "mesh.expert=2"]),
            ("qwen3_next_small", ["model.num_layers=20"]),
        ),
    ],
)
def test_plan_equals_that_of_the_whole_model(
    recipe: str, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(recipe, "train.micro_batch_size=1", *overrides, shape=SHAPE, micro_batches=2)
    config = resolve_expert_method(config, 8)
    machine = find_machine("h100", ranks_per_node=8)

    assert find_series(build_network(config)), "there are no blocks to delete"
    with monkeypatch.context() as patched:
        patched.setattr(probe.Probe, "_trace_whole", lambda *_: pytest.fail("the shortened model cannot be traced"))
        shortened = make_plan(config, SHAPE, machine)
    monkeypatch.setattr(probe, "treats_blocks_alike", lambda *_: False)
    whole = make_plan(config, SHAPE, machine)
    assert shortened.collectives == whole.collectives
    assert abs(shortened.memory.peak.total / whole.memory.peak.total - 1) < 0.001
    # What the model does once for all blocks takes a few kernels less.
    assert abs(shortened.time.total_s / whole.time.total_s - 1) < 0.01
