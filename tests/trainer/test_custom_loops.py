"""The Python interface: overridable methods, custom loops, custom state and custom recipes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.helpers import tiny
from tests.helpers.launch import REPOSITORY, launch, merged, on_ranks
from tests.helpers.launch import tiny as launch_tiny
from tests.helpers.tiny import full, lines
from trainer import ModelSpec, RunConfig, Source, Trainer, TrainLoader, UserError, load_config, register, run
from trainer.metrics.record import Record
from trainer.registry import find_model

Batch = dict[str, torch.Tensor]


def tiny_config(folder: Path, *overrides: str) -> RunConfig:
    return tiny.tiny_config(folder, *merged(["train.steps=4"], overrides))


def fit(trainer: Trainer) -> list[dict[str, Any]]:
    """Train to the end and return the lines of metrics.jsonl."""
    assert trainer.fit() == 0
    trainer.close()
    return lines(trainer.config.run_dir)


def of(kind: str, found: list[dict[str, Any]], field: str) -> list[Any]:
    return [line[field] for line in found if line["kind"] == kind]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of a Trainer without changes."""
    return fit(Trainer(tiny_config(tmp_path_factory.mktemp("plain"))))


# ---------------------------------------------------------------------------------------------------------------
# Overriding


class OwnMesh(Trainer):
    def build_mesh(self) -> Any:
        self.own = init_device_mesh("cpu", (self.world.size,), mesh_dim_names=("shard",))
        return self.own


def test_build_mesh(tmp_path: Path, plain: list[dict[str, Any]]) -> None:
    trainer = OwnMesh(tiny_config(tmp_path, "fsdp.cpu_offload=true"))  # else one rank shards nothing
    assert trainer.mesh is trainer.own
    assert {p.device_mesh for p in trainer.model.parameters() if isinstance(p, DTensor)} == {trainer.own}
    assert of("train", fit(trainer), "loss") == of("train", plain, "loss")


class FrozenEmbedding(Trainer):
    def build_model(self, config: RunConfig | None = None) -> nn.Module:
        model = super().build_model(config)
        model.tok_embeddings.requires_grad_(False)  # type: ignore[union-attr]
        return model


def test_build_model(tmp_path: Path) -> None:
    trainer = FrozenEmbedding(tiny_config(tmp_path))

    def weights() -> dict[str, torch.Tensor]:
        return {name: full(p).detach().clone() for name, p in trainer.model.named_parameters()}

    before = weights()
    fit(trainer)
    unchanged = [name for name, tensor in weights().items() if torch.equal(tensor, before[name])]
    assert unchanged == ["tok_embeddings.weight"]


class WithTeacher(Trainer):
    """Builds a second model, and learns only from it."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.teacher = self.build_model(load_config(str(config.run_dir.parent / "teacher.yaml")))
        self.teacher.requires_grad_(False)

    def loss(self, batch: Batch) -> torch.Tensor:
        wanted = self.teacher(batch["tokens"]).softmax(-1)
        return -(self.model(batch["tokens"]).log_softmax(-1) * wanted).sum()


def test_a_second_model(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "run", "train.steps=6", "optim.lr=0.02")
    (tmp_path / "teacher.yaml").write_text(tiny_config(tmp_path, "run.seed=9", "model.num_layers=1").to_yaml())
    trainer = WithTeacher(config)
    assert len(trainer.units) == 2 + config.model.num_layers, "its own units, not the teacher's"
    losses = of("train", fit(trainer), "loss")
    assert losses[-1] < losses[0]


class OwnOptimizer(Trainer):
    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=99.0)


def test_build_optimizer(tmp_path: Path) -> None:
    trainer = OwnOptimizer(tiny_config(tmp_path))
    found = fit(trainer)
    assert isinstance(trainer.optimizer.parts[0], torch.optim.SGD)
    assert trainer.optimizer.lr == of("train", found, "lr")[-1], "at the configured learning rate"


def test_data_seed_determines_the_order(tmp_path: Path) -> None:
    found = []
    for number, seeds in enumerate([[], ["data.seed=7"], ["run.seed=7"]]):
        trainer = Trainer(tiny_config(tmp_path / str(number), *seeds))
        found.append(trainer.loader.next_samples().tolist())  # type: ignore[attr-defined]
        trainer.close()
    assert found[1] != found[0] == found[2]


class Counting:
    """Batches whose tokens say which batch it is; resumable."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self.number += 1
            tokens = torch.full((2, 16), self.number % 32)
            yield {"tokens": tokens, "targets": tokens}

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


class OwnLoader(Trainer):
    def build_loader(self) -> Counting:
        self.seen: list[int] = []
        return Counting()

    def loss(self, batch: Batch) -> torch.Tensor:
        self.seen.append(int(batch["tokens"][0, 0]))
        return super().loss(batch)


def test_build_loader(tmp_path: Path) -> None:
    first = OwnLoader(tiny_config(tmp_path, "train.steps=3"))
    fit(first)
    second = OwnLoader(tiny_config(tmp_path, "train.steps=5"))
    fit(second)
    assert first.seen == [1, 2, 3, 4, 5, 6], "two micro-batches a step"
    assert second.seen == [7, 8, 9, 10], "it goes on where it was"


class DoubleLoss(Trainer):
    def loss(self, batch: Batch) -> torch.Tensor:
        return 2 * super().loss(batch)


def test_loss(tmp_path: Path, plain: list[dict[str, Any]]) -> None:
    found = fit(DoubleLoss(tiny_config(tmp_path)))
    assert of("train", found, "loss")[0] == 2 * of("train", plain, "loss")[0]
    assert of("train", found, "grad_norm")[0] == pytest.approx(2 * of("train", plain, "grad_norm")[0])


class Rows(Trainer):
    """Counts sequences instead of targets, and logs a sum, a mean, and a value that only one rank sometimes has."""

    def count(self, batch: Batch) -> float:
        return len(batch["tokens"])

    def loss(self, batch: Batch) -> torch.Tensor:
        self.log("rows", len(batch["tokens"]))
        self.log("mean_rank", torch.tensor(self.world.rank * len(batch["tokens"])), over=len(batch["tokens"]))
        self.log("of_nothing", 1.0, over=torch.zeros(()))
        if self.world.rank == self.world.size - 1 and self.state.step == 2 and self.model.training:
            self.log("rare", torch.ones(1))
        return super().loss(batch)


def train_rows(folder: str) -> None:
    overrides = ["log.every=2", "eval.every=3", "train.global_batch_size=8", "train.micro_batch_size=2", "eval.steps=1"]
    fit(Rows(tiny_config(Path(folder), *overrides, "train.steps=5")))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.campaign)])
def test_counted_and_logged_values(ranks: int, tmp_path: Path, plain: list[dict[str, Any]]) -> None:
    """Summed over steps, micro-batches and ranks, separately for evaluations; a name may be logged by one rank only."""
    on_ranks(ranks, train_rows, str(tmp_path))
    train = [line for line in lines(tmp_path) if line["kind"] == "train"]
    held_out = [line for line in lines(tmp_path) if line["kind"] == "eval"]
    assert [(line["step"], line["rows"]) for line in train] == [(1, 8), (2, 8), (4, 16), (5, 8)]
    assert [(line["step"], line["rows"]) for line in held_out] == [(3, 8), (5, 8)]
    assert [line.get("rare") for line in train] == [None, None, 4 / ranks, None]
    assert all(line["mean_rank"] == (ranks - 1) / 2 and line["of_nothing"] is None for line in train + held_out)
    assert "rare" not in held_out[0]
    assert train[0]["loss"] == pytest.approx(16 * of("train", plain, "loss")[0], rel=0.1), "16 targets a sequence"
    assert [line["tokens"] for line in train] == [8 * 16 * line["step"] for line in train], "targets all the same"


def test_existing_field_cannot_be_logged(tmp_path: Path) -> None:
    trainer = Trainer(tiny_config(tmp_path))
    with pytest.raises(UserError, match="grad_norm"):
        trainer.log("grad_norm", 1.0)
    trainer.close()


class Weighted(Source):
    """Two tokens a sample, and a weight for each."""

    seq_len, vocab_size = 16, 32

    def __len__(self) -> int:
        return 64

    def batch(self, indices: Any) -> dict[str, Any]:
        tokens = np.repeat(indices[:, None] % 32, 16, 1)
        return {"tokens": tokens, "targets": tokens, "weights": np.asarray(indices, dtype=np.float32)}


class OwnEntries(Trainer):
    def build_loader(self) -> TrainLoader:
        return TrainLoader.from_config(Weighted(), self.config, self.world.rank, self.world.size, self.world.device)

    def loss(self, batch: Batch) -> torch.Tensor:
        assert torch.equal(batch["weights"] % 32, batch["tokens"][:, 0].float())
        return super().loss(batch)


def test_source_may_have_additional_entries(tmp_path: Path) -> None:
    assert of("train", fit(OwnEntries(tiny_config(tmp_path))), "step") == [1, 2, 3, 4]


class OwnStep(Trainer):
    num_steps = 0

    def train_step(self, micro_batches: Sequence[Batch]) -> Any:
        assert len(micro_batches) == self.num_micro_batches == 2
        update = super().train_step(micro_batches)
        self.num_steps += 1
        return update


def test_train_step(tmp_path: Path, plain: list[dict[str, Any]]) -> None:
    trainer = OwnStep(tiny_config(tmp_path))
    assert of("train", fit(trainer), "loss") == of("train", plain, "loss")
    assert trainer.num_steps == 4


class OwnEvaluation(Trainer):
    def evaluate(self) -> Record:
        return self.metrics.write(Record(kind="eval", step=self.state.step, loss=0.125, accuracy=0.5))


def test_evaluate(tmp_path: Path) -> None:
    found = fit(OwnEvaluation(tiny_config(tmp_path, "eval.every=2", "train.steps=5")))
    assert of("eval", found, "step") == [2, 4, 5], "every second, and at the end"
    assert of("eval", found, "accuracy") == [0.5] * 3


def test_evaluate_returns_what_it_logs(tmp_path: Path) -> None:
    trainer = Trainer(tiny_config(tmp_path, "eval.every=100"))
    record = trainer.evaluate()
    assert record is not None
    assert (record.kind, record.step, type(record.loss)) == ("eval", 0, float)
    again = trainer.evaluate()
    trainer.close()
    assert again is not None
    assert again.loss == record.loss, "evaluation changes nothing"


def test_evaluation_does_not_affect_training(tmp_path: Path) -> None:
    """With dropout: neither its random numbers nor the mode of the model."""
    own = ["data.source=synthetic", "data.seq_len=16", "train.steps=4", "train.global_batch_size=4", "log.every=1"]
    own += ["train.micro_batch_size=2", "model.vocab_size=32", "model.dim=16", "model.num_layers=2"]
    own += ["model.num_heads=4", "model.dropout=0.5", "run.threads=1", "log.sample_tokens=0", "eval.steps=1"]
    losses = []
    for every in (0, 1):
        config = load_config("gpt2", [*own, f"eval.every={every}", f"run.dir={tmp_path / str(every)}"])
        losses.append(of("train", fit(Trainer(config)), "loss"))
    assert losses[0] == losses[1]


def test_failed_evaluation_leaves_the_model_training(tmp_path: Path) -> None:
    """A custom loop may catch the error and go on."""

    class Failing(Trainer):
        def count(self, micro_batch: Any) -> Any:
            assert self.model.training, "no batch can be evaluated"
            return super().count(micro_batch)

    trainer = Failing(tiny_config(tmp_path, "eval.every=100"))
    with pytest.raises(AssertionError, match="no batch can be evaluated"):
        trainer.evaluate()
    assert trainer.model.training
    trainer.close()


def test_padding_of_the_last_evaluation_batch_does_not_count(tmp_path: Path) -> None:
    """Of 256 held-out samples in micro-batches of 3, the last one lacks two."""
    losses = []
    for micro in (1, 3):
        sizes = ["train.global_batch_size=6", f"train.micro_batch_size={micro}", "eval.steps=0", "eval.every=1"]
        trainer = Trainer(tiny_config(tmp_path / str(micro), *sizes))
        record = trainer.evaluate()
        trainer.close()
        assert record is not None
        losses.append(record.loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


class OnStep(Trainer):
    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.records: list[Record] = []

    def on_step(self, record: Record) -> None:
        self.records.append(record)


def test_on_step(tmp_path: Path, plain: list[dict[str, Any]]) -> None:
    trainer = OnStep(tiny_config(tmp_path, "log.every=100"))
    fit(trainer)
    assert [record.loss for record in trainer.records] == of("train", plain, "loss")


class OwnFit(Trainer):
    def fit(self) -> int:
        for record in self.steps():
            if record.loss < 0:
                return 1
        self.save_checkpoint()
        return 0


def test_custom_fit(tmp_path: Path, plain: list[dict[str, Any]]) -> None:
    assert of("train", fit(OwnFit(tiny_config(tmp_path))), "loss") == of("train", plain, "loss")
    assert (tmp_path / "checkpoints" / "step_00000004").is_dir()


class NoEvaluation(Trainer):
    def evaluate(self) -> Record:
        raise AssertionError("eval.every=0 means no evaluation at all")

    def loss(self, batch: Batch) -> torch.Tensor:
        assert torch.is_grad_enabled()
        return super().loss(batch)


def test_disabled_evaluation_is_not_run_at_the_end_either(tmp_path: Path) -> None:
    trainer = NoEvaluation(tiny_config(tmp_path, "eval.every=0"))
    assert trainer.eval_loader is None
    assert of("eval", fit(trainer), "step") == []


# ---------------------------------------------------------------------------------------------------------------
# Custom loops


def test_custom_loop_resumes_and_logs(tmp_path: Path, plain: list[dict[str, Any]]) -> None:
    losses = []
    first = Trainer(tiny_config(tmp_path))
    for record in first.steps():
        losses.append(record.loss)
        if record.step == 2:
            saved = first.save_checkpoint()
            break
    first.close()
    assert saved == tmp_path / "checkpoints" / "step_00000002"
    second = Trainer(tiny_config(tmp_path))
    losses += [record.loss for record in second.steps()]
    second.close()
    assert losses == of("train", plain, "loss")
    found = lines(tmp_path)
    assert of("train", found, "step") == [1, 2, 3, 4]
    assert of("train", found, "loss") == losses
    assert of("start", found, "resumed_step") == [None, 2]
    assert of("checkpoint", found, "step") == [2]


# ---------------------------------------------------------------------------------------------------------------
# Checkpoints


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 4 steps with a checkpoint at each."""
    folder = tmp_path_factory.mktemp("source")
    fit(Trainer(tiny_config(folder, "checkpoint.every=1", "checkpoint.keep_last=0")))
    return folder


def test_load_a_given_checkpoint(source: Path, tmp_path: Path, plain: list[dict[str, Any]]) -> None:
    trainer = Trainer(tiny_config(tmp_path))
    assert trainer.load_checkpoint(source / "checkpoints" / "step_00000002") == 2
    assert trainer.state.step == 2
    found = fit(trainer)
    assert of("start", found, "resumed_step") == [2]
    assert of("train", found, "step") == [3, 4]
    assert of("train", found, "loss") == of("train", plain, "loss")[2:]


def test_load_the_newest_checkpoint(source: Path, tmp_path: Path) -> None:
    trainer = Trainer(tiny_config(source))
    assert trainer.load_checkpoint() == 4
    trainer.close()
    fresh = Trainer(tiny_config(tmp_path))
    assert fresh.load_checkpoint() is None
    fresh.close()


def test_steps_continues_from_an_explicitly_loaded_checkpoint(source: Path) -> None:
    """Also if the run's own folder has a newer one."""
    trainer = Trainer(tiny_config(source, "train.steps=6"))
    trainer.load_checkpoint(source / "checkpoints" / "step_00000002")
    record = next(iter(trainer.steps()))
    trainer.close()
    assert record.step == 3


class OwnState:
    """A moving average and a counter: typical custom state."""

    def __init__(self) -> None:
        self.average, self.count = torch.zeros(3), 0

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average, self.count = state["average"], state["count"]


class Stateful(Trainer):
    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.shared, self.own = OwnState(), OwnState()
        self.state.add("average", self.shared)
        self.state.add("of_this_rank", self.own, per_rank=True)

    def on_step(self, record: Record) -> None:
        self.shared.average += record.step
        self.shared.count += 1
        self.own.average += record.step * (1 + self.world.rank)
        self.own.count += 1 + self.world.rank


def resume_own_state(folder: Path) -> dict[str, Any]:
    """Train in two parts, one Trainer after the other; return what each held at its end."""
    found = []
    for steps in (1, 3):
        trainer = Stateful(tiny_config(folder, f"train.steps={steps}", "train.micro_batch_size=1"))
        fit(trainer)
        found.append(
            [trainer.shared.average[0].item(), trainer.shared.count, trainer.own.average[2].item(), trainer.own.count]
        )
    return {"found": found, "is_open": dist.is_initialized()}


@pytest.mark.campaign
def test_custom_state_is_restored_on_every_rank_by_successive_trainers(tmp_path: Path) -> None:
    """Each Trainer opens and closes the process group; keys left in the store must not mislead the next one.

    They once did: 3 of 5 second Trainers waited forever for a rank at an address of the first.
    """
    first, second = on_ranks(2, resume_own_state, tmp_path)
    assert first == {"found": [[1, 1, 1, 1], [6, 3, 6, 3]], "is_open": False}
    assert second == {"found": [[1, 1, 2, 2], [6, 3, 12, 6]], "is_open": False}


def test_state_name_must_be_unique(tmp_path: Path) -> None:
    trainer = Trainer(tiny_config(tmp_path))
    for name in ("model", "random", "loader"):
        with pytest.raises(ValueError, match=name):
            trainer.state.add(name, OwnState())
    trainer.close()


# ---------------------------------------------------------------------------------------------------------------
# Processes


def test_two_trainers_one_after_the_other(tmp_path: Path, plain: list[dict[str, Any]]) -> None:
    for number in range(2):
        assert of("train", fit(Trainer(tiny_config(tmp_path / str(number)))), "loss") == of("train", plain, "loss")
        assert not dist.is_initialized()


class HasNoData(Trainer):
    def build_loader(self) -> Iterable[Batch]:
        raise UserError("data.path=nowhere: no such file")


def test_a_refused_trainer_leaves_its_process_group(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data\.path=nowhere"):
        HasNoData(tiny_config(tmp_path))
    assert not dist.is_initialized()


def losses_around_a_refusal(folder: Path) -> list[list[float]]:
    """Train two steps with shared-out experts, try to build two other Trainers, and train the same again."""
    tiny = ["model.num_experts=4", "model.num_chosen=2", "model.expert_dim=64", "model.balance=0"]
    experts = ["mesh.expert=2", "mesh.expert_method=gather"]
    found = []
    for number, overrides in enumerate((experts, [*experts, "mesh.replicate=2"], ["mesh.replicate=2"], experts)):
        own = ["data.source=synthetic", "train.steps=4", *tiny, *overrides, f"run.dir={folder / str(number)}"]
        config = load_config("qwen3_moe_small", [item for item in launch_tiny(*own) if "ffn_dim" not in item])
        with contextlib.suppress(UserError):  # a mesh of 2 x 1 ranks cannot share out experts
            trainer = Trainer(config)
            found.append([record.loss for record in itertools.islice(trainer.steps(), 2)])
            trainer.close()
        assert not dist.is_initialized(), "a Trainer that is refused leaves its process group too"
    return found


def test_results_of_a_later_trainer_have_its_mesh(tmp_path: Path) -> None:
    """DTensor caches the mesh of a result.  That of an earlier Trainer is equal, but its groups no longer exist."""
    for number in range(2):
        trainer = Trainer(tiny_config(tmp_path / str(number)))
        ones = distribute_tensor(torch.ones(4), trainer.mesh, [Shard(0)] * trainer.mesh.ndim)
        assert (ones + ones).device_mesh is trainer.mesh
        trainer.close()


@pytest.mark.campaign
def test_losses_are_the_same_after_trainers_of_other_meshes(tmp_path: Path) -> None:
    """One of the Trainers in between is refused."""
    first, _, last = on_ranks(2, losses_around_a_refusal, tmp_path)[1]
    assert last == pytest.approx(first, rel=1e-6)


def test_joined_process_group_is_left_open(tmp_path: Path, plain: list[dict[str, Any]]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for number in range(2):
            trainer = Trainer(tiny_config(tmp_path / str(number)))
            assert trainer.world.env.launcher == "joined"
            assert of("train", fit(trainer), "loss") == of("train", plain, "loss")
            assert dist.is_initialized()
        one = torch.ones(1)
        dist.all_reduce(one)
        assert one.item() == 1.0
    finally:
        dist.destroy_process_group()


class StopsItself(Trainer):
    def on_step(self, record: Record) -> None:
        if record.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


class Fails(Trainer):
    def on_step(self, record: Record) -> None:
        if record.step == 2:
            raise ZeroDivisionError("of my own")


def status(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "status.json").read_text())


def test_what_fit_returns(tmp_path: Path) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    stopped = StopsItself(tiny_config(tmp_path))
    assert stopped.fit() == 75
    stopped.close()
    assert (status(tmp_path)["state"], status(tmp_path)["exit_code"], status(tmp_path)["step"]) == ("stopped", 75, 3)
    assert (tmp_path / "checkpoints" / "step_00000003").is_dir(), "the step in hand was the last"
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    for expected in ("finished", "nothing to do"):
        before = (tmp_path / "metrics.jsonl").read_bytes()
        trainer = Trainer(tiny_config(tmp_path))
        assert trainer.fit() == 0
        trainer.close()
        assert ((tmp_path / "metrics.jsonl").read_bytes() == before) == (expected == "nothing to do")
    assert of("end", lines(tmp_path), "reason") == ["stopped", "finished"]


def test_what_fit_raises(tmp_path: Path) -> None:
    trainer = Fails(tiny_config(tmp_path))
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    trainer.close()
    assert (status(tmp_path)["state"], status(tmp_path)["exit_code"], status(tmp_path)["step"]) == ("failed", 1, 2)
    assert "of my own" in status(tmp_path)["reason"]
    assert of("end", lines(tmp_path), "reason") == ["failed"]


# ---------------------------------------------------------------------------------------------------------------
# A recipe from outside


@dataclass
class BigramConfig:
    """The shape of a bigram model."""

    vocab_size: int = 32
    width: int = 8


class Bigram(nn.Module):
    def __init__(self, config: BigramConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.width)
        self.out = nn.Linear(config.width, config.vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(tokens))


class BigramTrainer(DoubleLoss):
    """Has a custom loss, so that its use can be detected."""


register(ModelSpec("bigram", BigramConfig, Bigram, ["table", "out"], trainer=BigramTrainer))
register(
    ModelSpec(
        "bigram_by_name", BigramConfig, Bigram, ["table"], trainer="tests.trainer.test_custom_loops:BigramTrainer"
    )
)


@pytest.mark.parametrize("name", ["bigram", "bigram_by_name"])
def test_external_recipe_with_its_own_trainer(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert find_model(f"tests.trainer.test_custom_loops:{name}").trainer_class(Trainer) is BigramTrainer
    file = tmp_path / "bigram.yaml"
    file.write_text(f"# A bigram model.\nmodel: {{name: 'tests.trainer.test_custom_loops:{name}', width: 4}}\n")
    overrides = ["data.source=synthetic", "data.seq_len=16", "train.steps=2", "run.threads=1", "eval.every=0"]
    overrides += ["optim.lr=0.0", f"run.dir={tmp_path / 'run'}"]
    assert run.main([f"recipe={file}", *overrides]) == 0, capsys.readouterr().err
    found = lines(tmp_path / "run")
    assert of("start", found, "parameters") == [32 * 4 + 4 * 32 + 32]
    assert of("train", found, "loss")[0] > 1.5 * torch.tensor(32.0).log().item(), "twice the cross-entropy"
    assert "tests.trainer.test_custom_loops" in sys.modules
    assert not dist.is_initialized()


@pytest.mark.slow
def test_recipes_of_an_installed_package_are_found(tmp_path: Path) -> None:
    """Through an entry point with a module that registers them."""
    metadata = tmp_path / "announcing-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: announcing\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[meshtrainer.models]\nany = announcing\n")
    (tmp_path / "announcing.py").write_text(
        "from trainer import ModelSpec, register\n"
        "from trainer.registry import find_model\n"
        "llama = find_model('llama')\n"
        "register(ModelSpec('announced', llama.config, llama.build, llama.units))\n"
    )
    asked = "import trainer; print(trainer.load_config('llama_small', ['model.name=announced']).spec.name)"
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    found = launch([sys.executable, "-c", asked], tmp_path, variables).wait()
    assert (found.code, found.out) == (0, "announced\n"), found.err
