"""Memory of a model that no process can hold in full: it is built and filled shard by shard."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import pytest

from tests.helpers.launch import on_ranks
from trainer import Trainer, load_config
from trainer.model.parameters import count_parameters, local

COMMON = ["data.source=synthetic", "data.seq_len=16", "train.global_batch_size=8", "run.device=cpu", "run.threads=1"]


def own_mib() -> float:
    """Return the private memory of this process, without the pages of files that it reads."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem")) / 2**10


def build(small: list[str], large: list[str], recipe: str, run: Path) -> tuple[float, float, float]:
    """Build a small model, for what the first one imports, and then a large one; return by how much memory has grown at
    its peak, what this rank's shards take, and the whole model in float32, in MiB.
    """

    def trainer_of(overrides: list[str]) -> Trainer:
        trainer = Trainer(load_config(recipe, [*COMMON, f"run.dir={run}", *overrides]))
        trainer.load_checkpoint()  # or initial weights
        return trainer

    trainer_of(small).close()
    before, peak, done = own_mib(), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], own_mib())

    watching = threading.Thread(target=watch)
    watching.start()
    trainer = trainer_of(large)
    done.set()
    watching.join()
    shards = sum(local(p).nbytes for p in trainer.model.parameters()) / 2**20
    whole = 4 * count_parameters(trainer.model) / 2**20
    trainer.close()
    return max(peak[0], own_mib()) - before, shards, whole


@pytest.mark.slow
def test_no_rank_holds_the_full_model(tmp_path: Path) -> None:
    large = ["model.dim=768", "model.num_heads=8", "model.num_kv_heads=8", "model.ffn_dim=3072", "model.num_layers=4"]
    for grown, _, whole in on_ranks(2, build, ["model.num_layers=1"], large, "llama_small", tmp_path):
        print(f"grown by {grown:.0f} of {whole:.0f} MiB")
        assert whole > 140
        assert grown < 0.8 * whole


NUM_LAYERS = 6
PACKED = ["lora.rank=4", "lora.base_dtype=nf4", "fsdp.param_dtype=float32"]


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [("llama_small", PACKED), ("llama_small", []), ("hf.yaml", [])],
    ids=["packed", "plain", "hf"],
)
def test_ranks_that_load_a_folder_hold_their_shards_and_one_unit(
    recipe: str, overrides: list[str], tmp_path: Path
) -> None:
    """There is no second pass that draws random weights, and weights are packed while they are read."""
    transformers = pytest.importorskip("transformers")
    for name, width, layers in (("small", 64, 1), ("large", 768, NUM_LAYERS)):
        shape = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers, "vocab_size": 512}
        config = transformers.LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=4)
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / name, max_shard_size="20MB")
    key = "train.init_from"
    if recipe == "hf.yaml":
        (tmp_path / recipe).write_text("model: {name: hf}\n")
        recipe, key = str(tmp_path / recipe), "model.path"
    small, large = ([f"{key}={tmp_path / name}", *overrides] for name in ("small", "large"))
    for grown, shards, whole in on_ranks(2, build, small, large, recipe, tmp_path / "run"):
        print(f"grown by {grown:.0f} MiB: {shards:.0f} of shards, of a model of {whole:.0f}")
        assert whole > 130
        # malloc may keep the memory of a unit that is freed
        assert grown < shards + 2 * whole / NUM_LAYERS


@pytest.mark.campaign
@pytest.mark.slow
def test_a_billion_parameters_on_four_ranks(tmp_path: Path) -> None:
    """With everything included; and it trains with a smaller vocabulary."""
    ranks = on_ranks(4, train, ["data.seq_len=64", "train.global_batch_size=4", f"run.dir={tmp_path / 'a'}"], 0)
    peak, num_parameters = max(found[0] for found in ranks), ranks[0][1]
    assert num_parameters == 1_235_814_400, "as published"
    assert peak < 0.7 * num_parameters * 4 / 2**30, f"{peak:.2f} GiB a rank, everything included"
    smaller = ["data.seq_len=32", "model.vocab_size=16384", "train.global_batch_size=4", f"run.dir={tmp_path / 'b'}"]
    for _, num_parameters, losses in on_ranks(4, train, smaller, 2):
        assert num_parameters == 1_006_700_544
        assert 0 < losses[1] < 12


def train(overrides: list[str], num_steps: int) -> tuple[float, int, list[float]]:
    """Build llama3_1b and train it for some steps; return the peak of memory, the parameters and the losses."""
    trainer = Trainer(load_config("llama3_1b", ["data.source=synthetic", *overrides]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    steps = trainer.steps()
    return peak, count_parameters(trainer.model), [next(steps).loss for _ in range(num_steps)]
