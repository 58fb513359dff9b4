"""Mistakes of expert parallelism: those of settings, those in the code, and ranks that die in the middle."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.experts.test_expert_parallel import EXCHANGE, FEW, FOUR, GATHER, TINY, TWO, config_of
from tests.helpers.faults import Fault, start
from tests.helpers.ranks import merged, run_command, run_ranks
from tests.trainer.test_exactness import relative
from trainer import Trainer, UserError, load_config
from trainer.config import AUTO, MeshShape, advice_on_shards, check_config, resolve_expert_method, smallest_mesh
from trainer.config.experts import with_expert
from trainer.errors import TrainingFailed
from trainer.experts import ExpertGroup, apply_experts, dispatch, grouped_mm, parallel
from trainer.model.shard import check_sharding
from trainer.plan import search
from trainer.plan.experts import advice_on_experts, tokens_at_break_even
from trainer.plan.machine import find_machine
from trainer.plan.plan import make_plan, without_data
from trainer.plan.search import fastest_choice

# ---------------------------------------------------------------------------------------------------------------
# The check at the start rejects wrong settings


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class DividedByTorch(Trainer):
    """Divides gradients by torch's own means, which do it twice where FSDP shards experts over one rank."""

    def build_model(self, config: Any = None) -> Any:
        model = super().build_model(config)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(self.world.size)
                module.set_force_sum_reduction_for_comms(True)
        return model


def unscaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x


@contextmanager
def unscaled_in_layer(layer: int) -> Iterator[None]:
    """Leave the division of gradients out in one layer alone."""
    compute, layers = dispatch._run_experts, list[Any]()

    def computed(group: ExpertGroup, experts: Any, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        layers.extend([experts] if experts not in layers else [])
        if layers.index(experts) != layer:
            return compute(group, experts, rows, ends)
        with patched(dispatch, "scale_gradient", unscaled):
            return compute(group, experts, rows, ends)

    with patched(dispatch, "_run_experts", computed):
        yield


def rotated(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Let the next rank compute what belongs to one."""

    def wrong(group: ExpertGroup, experts: Any, x: Any, chosen: torch.Tensor, weights: Any) -> torch.Tensor:
        first = next(iter(experts.parameters()))
        return method(group, experts, x, (chosen + first.shape[0] // group.size) % first.shape[0], weights)

    return wrong


def other_order(modules: Any, mesh: Any, method: str) -> None:
    """Give each rank the index of the next one, as on a mesh of another order of ranks."""
    shard_experts(modules, mesh, method)
    for module in modules:
        group = getattr(module, dispatch.GROUP_ATTRIBUTE)
        setattr(module, dispatch.GROUP_ATTRIBUTE, replace(group, rank=(group.rank + 1) % group.size))


shard_experts = parallel.shard_experts


ALMOST_CANCELLED = ["fsdp.param_dtype=bfloat16", "model.num_layers=8", "run.seed=0"]
"""In layer 3 the products of outputs and the gradients of the loss almost cancel: the sum is below their rounding."""


def outcomes(folder: Path, names: list[str]) -> dict[str, str]:
    """Return, for each kind of mistake, the error that ends the start, or how long the check took."""
    import torch.distributed as dist

    import trainer.model.shard
    import trainer.trainer

    dist.init_process_group("gloo")
    mistakes: dict[str, tuple[Any, list[str], Any]] = {
        "none": (Trainer, [EXCHANGE], patched(time, "altzone", 0)),
        "scale": (Trainer, [EXCHANGE], patched(dispatch, "scale_gradient", unscaled)),
        "scale, gather": (Trainer, [GATHER], patched(dispatch, "scale_gradient", unscaled)),
        "torch": (DividedByTorch, [EXCHANGE], patched(dispatch, "scale_gradient", unscaled)),
        "rotated": (Trainer, [EXCHANGE], patched(dispatch, "_run_by_exchange", rotated(dispatch._run_by_exchange))),
        "rotated, gather": (Trainer, [GATHER], patched(dispatch, "_run_by_gather", rotated(dispatch._run_by_gather))),
        "order": (Trainer, [GATHER], patched(trainer.model.shard, "shard_experts", other_order)),
        "bfloat16": (Trainer, [GATHER, "fsdp.param_dtype=bfloat16"], patched(time, "altzone", 0)),
        "bfloat16 weights": (Trainer, [EXCHANGE, "train.weights_dtype=bfloat16"], patched(time, "altzone", 0)),
        "bfloat16 scale": (
            Trainer,
            [GATHER, "fsdp.param_dtype=bfloat16"],
            patched(dispatch, "scale_gradient", unscaled),
        ),
        "bfloat16, one layer": (Trainer, [GATHER, *ALMOST_CANCELLED], unscaled_in_layer(3)),
        "frozen": (Trainer, [EXCHANGE, 'train.freeze=["*.w3"]'], patched(dispatch, "scale_gradient", unscaled)),
    }
    found, check = {}, trainer.trainer.check_experts
    seconds = [0.0]

    def timed(*args: Any) -> None:
        started = time.process_time()
        check(*args)
        seconds[0] = time.process_time() - started

    trainer.trainer.check_experts = timed
    for number, name in enumerate(names):
        kind, overrides, patch = mistakes[name]
        with patch:
            running = kind(config_of(folder / str(number), TWO, *overrides))
            try:
                running.start()
            except TrainingFailed as error:
                found[name] = str(error)
            else:
                found[name] = f"passed in {seconds[0]:.2f} s"
                assert all(parameter.grad is None for parameter in running.model.parameters())
                running.close()
    return found


@pytest.mark.slow
def test_what_is_wrong_is_refused_before_the_first_step(tmp_path: Path) -> None:
    names = ["none", "scale", "torch", "rotated", "order", "bfloat16, one layer"]
    found = run_ranks(2, outcomes, tmp_path, names)[1]
    print(found)
    assert found["none"].startswith("passed in ")
    assert float(found["none"].split()[2]) < 1
    assert "layers.0.moe.experts: the gradient of w3 is 2 times what its outputs imply" in found["scale"]
    assert "the gradient of w3 is 0.5 times" in found["torch"]
    assert "layers.1.moe.experts: the output of a token is not that of its experts" in found["rotated"]
    assert "the output of a token is not that of its experts" in found["order"]
    assert "layers.3.moe.experts: the gradient of w3 is 2" in found["bfloat16, one layer"]
    assert "layers.4" not in found["bfloat16, one layer"]


@pytest.mark.campaign
def test_what_else_is_wrong_is_refused(tmp_path: Path) -> None:
    names = ["scale, gather", "rotated, gather", "bfloat16", "bfloat16 weights", "bfloat16 scale", "frozen"]
    found = run_ranks(2, outcomes, tmp_path, names)[0]
    print(found)
    assert "is 2 times" in found["scale, gather"]
    assert "their ranks hold other experts" in found["rotated, gather"]
    assert found["bfloat16"].startswith("passed in ")
    assert found["bfloat16 weights"].startswith("passed in "), "their gradients are rounded, too"
    assert "times what its outputs imply" in found["bfloat16 scale"]
    assert "the gradient of w2 is 2 times" in found["frozen"], "whatever is trained and linear"


# ---------------------------------------------------------------------------------------------------------------
# Settings


def test_mistakes() -> None:
    for overrides, ranks, per_node, said in (
        ([FOUR, "mesh.replicate=2"], 4, 4, "mesh.expert=4: must divide the shard axis, 2.*mesh.expert=2"),
        (["mesh.expert=8"], 8, 8, "mesh.expert=8: must divide model.num_experts=4.*mesh.expert=4"),
        ([TWO, GATHER], 4, 1, "mesh.expert_method=gather: gathers all tokens.*nodes of 1 ranks.*exchange"),
        ([TWO, EXCHANGE, "train.compile=true"], 2, 2, "train.compile=true: compiled blocks cannot exchange.*gather"),
        ([TWO, "fsdp.reshard_after_forward=2"], 4, 4, "fsdp.reshard_after_forward=2: .*mesh.expert=2.*always"),
        (["mesh.expert=some"], 2, 2, "mesh.expert=some: must be a whole number, or auto"),
    ):
        with pytest.raises(UserError, match=f"(?s){said}"):
            check_config(config_of("runs/none", *overrides), ranks, per_node)
    with pytest.raises(UserError, match=r"(?s)mesh\.expert=2: recipe 'llama' declares no experts"):
        check_config(load_config("llama_small", [TWO]), 2, 2)
    with pytest.raises(
        UserError, match=r"(?s)mesh\.expert=2: leaves layers.0.moe.experts.w1 of shape .1, 25, 31. to be divided"
    ):
        check_sharding(config_of("x", TWO, *FEW, "model.expert_dim=25", "model.dim=31", "model.num_heads=2"), 4)
    with pytest.raises(UserError, match=r"(?s)fsdp\.wrap=size:2000: makes experts a separate unit"):
        check_sharding(config_of("x", TWO, "fsdp.wrap=size:2000"), 4)


def test_a_configuration_is_right_where_the_ranks_are_not_known() -> None:
    assert smallest_mesh(config_of("x", FOUR)).shard == 4


def test_more_shards_than_experts_are_advised_against() -> None:
    said = advice_on_shards(config_of("x"), MeshShape(2, 6))
    assert "mesh.shard=6 is more than the 4 experts" in said
    assert "mesh.shard=2 mesh.replicate=6" in said
    assert not advice_on_shards(config_of("x"), MeshShape(2, 4))
    assert not advice_on_shards(config_of("x"), MeshShape(1, 8))  # each expert is split by rows between two ranks
    assert "mesh.shard=8 is more" in advice_on_shards(config_of("x", "fsdp.reshard_after_forward=2"), MeshShape(1, 8))
    assert not advice_on_shards(config_of("x", TWO), MeshShape(2, 6))
    assert not advice_on_shards(load_config("llama_small"), MeshShape(1, 512))


def test_the_method_follows_from_nodes_and_compilation() -> None:
    config = config_of("x", TWO, "train.compile=auto")
    assert resolve_expert_method(config, 2).mesh.expert_method == "gather"
    assert resolve_expert_method(config, 2).train.compile == AUTO
    across = resolve_expert_method(config, 1)
    assert across.mesh.expert_method == "exchange"
    assert across.train.compile is False, "its shapes depend on the tokens"
    assert resolve_expert_method(config_of("x", FOUR), 4).mesh.expert_method == "exchange", "more ranks than choices"
    assert resolve_expert_method(config_of("x", FOUR, "train.compile=true"), 4).mesh.expert_method == "gather"


def test_rows_of_no_expert_give_zeros() -> None:
    """And get none but zeros as gradients; they are what buffers for the worst case hold besides tokens."""
    torch.manual_seed(0)
    rows, weights = torch.randn(7, 3, requires_grad=True), torch.randn(2, 3, 4, requires_grad=True)
    out = grouped_mm(rows, weights, torch.tensor([2, 5, 7], dtype=torch.int32))
    expected = torch.cat([rows[:2] @ weights[0], rows[2:5] @ weights[1], torch.zeros(2, 4)])
    assert torch.allclose(out, expected)
    given = torch.randn(7, 4)
    found = torch.autograd.grad(out, (rows, weights), given)
    right = torch.autograd.grad(expected, (rows, weights), given)
    assert all(torch.allclose(own, other) for own, other in zip(found, right, strict=True))


def test_a_group_of_one_computes_what_no_group_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """By both methods, without any ranks: there is nothing to exchange."""
    from trainer.recipes.qwen3_moe.config import Qwen3MoeConfig
    from trainer.recipes.qwen3_moe.model import Experts

    monkeypatch.setattr(dispatch, "gather_parts", lambda part, num_parts, group: part[None])
    monkeypatch.setattr(dispatch, "sum_parts", lambda parts, group: parts[0])
    monkeypatch.setattr(dispatch, "exchange_parts", lambda parts, group: parts)
    monkeypatch.setattr(dispatch, "exchange_rows", lambda rows, sent, received, group: rows)
    torch.manual_seed(0)
    experts = Experts(Qwen3MoeConfig(dim=8, expert_dim=6, num_experts=4))
    x, weights = torch.randn(5, 8), torch.rand(5, 2)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(5)])
    expected = apply_experts(experts, x, chosen, weights)
    for method in ("exchange", "gather"):
        experts.expert_group = ExpertGroup(1, 0, method)  # type: ignore[assignment]
        assert torch.allclose(apply_experts(experts, x, chosen, weights), expected, atol=1e-6), method


def test_gradients_of_tokens_are_bit_identical_in_every_run() -> None:
    """Four threads reach the pairs of a token in any order; each repetition would add them in another."""
    from torch import nn

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stacked = nn.Parameter(torch.ones(8, 1))

        def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            return rows * torch.linspace(0.1, 3, len(rows)).unsqueeze(1)

    torch.manual_seed(0)
    x, given, weights = torch.randn(256, 64), torch.randn(256, 64), torch.rand(256, 4)
    chosen, experts, found = torch.rand(256, 8).topk(4, 1)[1], Scaled(), set()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for _ in range(40):
            tokens = x.clone().requires_grad_()
            (apply_experts(experts, tokens, chosen, weights) * given).sum().backward()
            assert tokens.grad is not None
            found.add(tokens.grad.numpy().tobytes())
    finally:
        torch.set_num_threads(num_threads)
    assert len(found) == 1


# ---------------------------------------------------------------------------------------------------------------
# Plans


LARGE = [
    *("model.dim=2048", "model.num_layers=8", "model.num_heads=16", "model.num_kv_heads=4", "model.head_dim=128"),
    *("model.expert_dim=2048", "model.num_experts=64", "model.num_chosen=4", "fsdp.param_dtype=bfloat16"),
    *("data.seq_len=1024", "train.activation_checkpoint=full"),
]


def test_the_planner_says_when_an_expert_axis_pays() -> None:
    """Below 2 F E / A R = 8192 tokens a micro-batch it does, where experts take longer to move than to compute."""
    machine, shape = find_machine("h100"), MeshShape(1, 16)
    few = without_data(config_of("x", *LARGE, "train.global_batch_size=16"))
    plan = make_plan(few, shape, machine)
    assert tokens_at_break_even(plan) == 8192
    (said,) = advice_on_experts(plan)
    assert "instead of" in said, said
    assert said.startswith("experts: mesh.expert=")
    assert "(1,024 tokens per micro-batch; the break-even point is 8,192)" in said
    many = without_data(config_of("x", *LARGE, "data.seq_len=16384", "train.global_batch_size=16"))
    assert ["would not make the step shorter" in line for line in advice_on_experts(make_plan(many, shape, machine))]
    chosen = fastest_choice(replace(few, mesh=replace(few.mesh, expert=AUTO)), shape, machine)
    assert chosen.plan.config.expert > 1
    assert chosen.plan.time.total_s < plan.time.total_s
    dense = without_data(load_config("llama3_1b", ["train.global_batch_size=16", "data.source=synthetic"]))
    assert not list(advice_on_experts(make_plan(dense, shape, machine)))


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("model.num_experts=9", "mesh.expert=2: must divide model.num_experts=9"),
        ("fsdp.reshard_after_forward=2", "fsdp.reshard_after_forward=2: a number of ranks to reshard to cannot be"),
    ],
)
def test_the_planner_says_why_no_expert_axis_is_possible(override: str, reason: str) -> None:
    config = without_data(config_of("x", *LARGE, "train.global_batch_size=16", override))
    (said,) = advice_on_experts(make_plan(config, MeshShape(1, 16), find_machine("h100")))
    assert said.startswith(f"experts: of the sizes of mesh.expert (2, 4, 8, 16, 32, 64) none is possible: {reason}")
    assert "\n" not in said


def test_the_planner_says_if_an_expert_axis_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    config, shape = without_data(config_of("x", *LARGE, "train.global_batch_size=16")), MeshShape(1, 16)
    plan = make_plan(config, shape, find_machine("h100"))
    others = [make_plan(with_expert(config, size, "auto"), shape, find_machine("h100", 4)) for size in (8, 16)]
    monkeypatch.setattr("trainer.plan.experts._alternatives", lambda _: iter(others))
    (said,) = advice_on_experts(plan)
    needed = min(other.needed_gib for other in others)
    assert said.startswith("experts: dividing them among ranks (mesh.expert) would not fit in memory: at least ")
    assert f"{needed:.4g} GiB" in said
    fitting = [others[0], make_plan(with_expert(config, 16, "auto"), shape, find_machine("h100"))]
    monkeypatch.setattr("trainer.plan.experts._alternatives", lambda _: iter(fitting))
    (said,) = advice_on_experts(make_plan(config, shape, find_machine("h100", 12)))
    assert said.startswith("experts: mesh.expert=16 "), "what does not fit is no help to a plan that does not"


def test_the_break_even_depends_on_how_many_ranks_share_a_nodes_traffic() -> None:
    config = without_data(config_of("x", *LARGE, "train.global_batch_size=16"))
    plans = [make_plan(config, MeshShape(1, 16), find_machine("h100", ranks_per_node=ranks)) for ranks in (4, 8, 16)]
    assert [tokens_at_break_even(plan) for plan in plans] == [16384, 8192, None], "16: no weights pass between nodes"
    assert all("per micro-batch" not in line for line in advice_on_experts(plans[2]))


def test_remedies_are_not_looked_for_where_a_choice_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a plan each, and there would be as many for each choice that does not fit."""
    config = without_data(config_of("x", "model.expert_dim=512", "fsdp.accumulate=sharded"))
    machine, shape = find_machine("cpu", ranks_per_node=2), MeshShape(1, 4)
    one, two = (make_plan(with_expert(config, size, "exchange"), shape, machine).memory.peak.total for size in (1, 2))
    assert two < 0.9 * one
    monkeypatch.setattr(search, "remedies", lambda plan: pytest.fail("looked for remedies"))
    chosen = fastest_choice(with_expert(config, AUTO, "auto"), shape, machine.with_budget((one + two) / 2))  # type: ignore[arg-type]
    assert chosen.plan.config.expert == 2


def test_the_planner_says_when_replicas_are_faster() -> None:
    """If the ranks are not a multiple of the experts, FSDP divides another dimension, and copies once more."""
    config = without_data(config_of("x", *LARGE, "model.num_experts=48", "train.global_batch_size=128"))
    machine = find_machine("h100")
    plan, replicated = (make_plan(config, shape, machine) for shape in (MeshShape(1, 128), MeshShape(8, 16)))
    said = [line for line in advice_on_experts(plan) if "mesh.shard=16 mesh.replicate=8" in line]
    assert replicated.time.total_s < 0.98 * plan.time.total_s
    assert f"{replicated.time.total_s:.3g} s per step instead of {plan.time.total_s:.3g}" in said[0]
    assert not [line for line in advice_on_experts(replicated) if "mesh.replicate" in line]


def test_experts_split_by_rows_are_not_copied_twice() -> None:
    """On twice as many ranks as experts, a rank copies what it copies on half of them."""
    config = without_data(config_of("x", *LARGE, "train.global_batch_size=128"))
    by_rows, replicated = (
        make_plan(config, shape, find_machine("h100")).time for shape in (MeshShape(1, 128), MeshShape(2, 64))
    )
    assert by_rows.copy_s == pytest.approx(replicated.copy_s, rel=0.01)


def test_an_imbalance_of_the_router_costs_time_and_memory() -> None:
    config = without_data(config_of("x", *LARGE, "mesh.expert=8", EXCHANGE, "train.global_batch_size=16"))
    even, skewed = (
        make_plan(config, MeshShape(1, 16), replace(find_machine("h100"), imbalance=imbalance)) for imbalance in (1, 2)
    )
    assert skewed.time.total_s > 1.05 * even.time.total_s
    assert skewed.memory.peak.total > even.memory.peak.total
    gather = without_data(config_of("x", *LARGE, FOUR, GATHER, "train.global_batch_size=16"))
    plan = make_plan(gather, MeshShape(1, 16), find_machine("h100"))
    grouped = [w.flops * n for event in plan.trace.events for w, n in event.segment.work if w.kind == "grouped"]
    alone = make_plan(
        without_data(config_of("x", *LARGE, "train.global_batch_size=16")), MeshShape(1, 16), plan.machine
    )
    expected = [w.flops * n for event in alone.trace.events for w, n in event.segment.work if w.kind == "grouped"]
    assert sum(grouped) == pytest.approx(sum(expected), rel=1e-6), "buffers for the worst case are not computed"


# ---------------------------------------------------------------------------------------------------------------
# Faults


PLACES = ["experts", "experts backward"]


def call_in_step_4(ranks: int) -> int:
    """Return the number of a call: two for each layer and micro-batch, after those of the check at the start."""
    return 2 * 2 + (8 // ranks) * 2 * 2 * 3 + 2


@pytest.mark.slow
@pytest.mark.parametrize("place", ["experts", pytest.param("experts backward", marks=pytest.mark.campaign)])
def test_a_rank_that_is_killed_inside_an_exchange(place: str, tmp_path: Path) -> None:
    """It is named, and the run continues with another value of `mesh.expert`."""
    own = ["recipe=qwen3_moe_small", "model.name=tests.helpers.custom_recipes:moe_faulty"]
    own += merged(TINY, ["train.steps=6", "checkpoint.every=2", "checkpoint.mode=sync", "run.step_timeout_s=20"])
    fault = Fault(rank=1, inside=place, then="SIGKILL", first=call_in_step_4(2), last=call_in_step_4(2))
    run = start(tmp_path / "run", *own, TWO, EXCHANGE, ranks=2, fault=fault)
    codes = run.wait(240)
    assert codes == [1, -9], run.stderr
    assert re.search(r"error: rank 1 \(process \d+\) (has died|was killed by SIGKILL)", run.stderr), run.stderr
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert saved.name == "step_00000002"
    went_on = run_command(tmp_path / "run", *own, FOUR, GATHER, "nproc=4")
    assert went_on.exit_code == 0, went_on.stderr
    straight = run_command(tmp_path / "straight", *own)
    assert relative(went_on.train("loss"), straight.train("loss")) < 1e-6


@pytest.mark.campaign
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_is_suspended_inside_an_exchange(place: str, tmp_path: Path) -> None:
    own = ["recipe=qwen3_moe_small", "model.name=tests.helpers.custom_recipes:moe_faulty"]
    own += merged(TINY, ["train.steps=6", "checkpoint.every=2", "run.step_timeout_s=6"])
    fault = Fault(rank=1, inside=place, then="SIGSTOP", first=call_in_step_4(4), last=call_in_step_4(4))
    run = start(tmp_path / "run", *own, TWO, EXCHANGE, ranks=4, fault=fault)
    try:
        run.processes[0].join(240)
    finally:
        run.kill()
    assert run.processes[0].exitcode == 1, run.stderr
    assert "watchdog: rank 1 did not answer" in run.stderr
    (waits,) = [line.split() for line in run.stderr.splitlines() if line.endswith("waits for its expert group")]
    assert waits[0] == "0", "the only one that shares its experts"


@pytest.mark.campaign
def test_a_request_to_stop_inside_an_exchange(tmp_path: Path) -> None:
    own = [
        "recipe=qwen3_moe_small",
        "model.name=tests.helpers.custom_recipes:moe_faulty",
        *merged(TINY, ["train.steps=6"]),
    ]
    fault = Fault(rank=1, inside="experts", then="SIGTERM", first=call_in_step_4(2), last=call_in_step_4(2))
    run = start(tmp_path / "run", *own, TWO, EXCHANGE, ranks=2, fault=fault)
    assert run.wait(240) == [75, 75], run.stderr
    went_on = run_command(tmp_path / "run", *own, TWO, GATHER, "nproc=4")
    straight = run_command(tmp_path / "straight", *own)
    assert relative(went_on.train("loss"), straight.train("loss")) < 1e-6
