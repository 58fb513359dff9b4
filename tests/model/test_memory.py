"""Memory of a model that no process can hold in full: it is built shard by shard."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import pytest

from tests.helpers.launch import on_ranks, tiny
from trainer import load_config


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def build(overrides: list[str], num_steps: int) -> tuple[float, int, list[float]]:
    """Build llama3_1b and train it for some steps; return the peak of memory, the parameters and the losses."""
    from itertools import islice

    from trainer import Trainer
    from trainer.model.parameters import count_parameters

    trainer = Trainer(load_config("llama3_1b", overrides))
    built = peak_gib()
    return built, count_parameters(trainer.model), [record.loss for record in islice(trainer.steps(), num_steps)]


def build_small(folder: Path) -> tuple[float, float]:
    """Build a model of some 90 M parameters; return by how much memory has grown at its peak, and its size, in MiB."""
    from trainer import Trainer
    from trainer.model.parameters import count_parameters

    Trainer(load_config("llama_small", tiny(f"run.dir={folder}"))).close()  # what the first one imports
    wide = ["model.dim=1024", "model.num_heads=8", "model.num_kv_heads=8", "model.ffn_dim=4096", "model.num_layers=4"]
    before = peak_gib()
    trainer = Trainer(load_config("llama_small", tiny(*wide, "model.vocab_size=16384", f"run.dir={folder}")))
    found = 1024 * (peak_gib() - before), 4 * count_parameters(trainer.model) / 2**20
    trainer.close()
    return found


@pytest.mark.slow
def test_no_rank_holds_the_full_model(tmp_path: Path) -> None:
    for grown, size in on_ranks(4, build_small, tmp_path):
        assert size > 300
        print(f"grown by {grown:.0f} of {size:.0f} MiB")
        assert grown < 0.7 * size


def own_mib() -> float:
    """Return the private memory of this process, without the pages of files that it reads."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem")) / 2**10


def load_folder(path: Path, run: Path, recipe: str, *overrides: str) -> tuple[float, float, float]:
    """Build a model and fill it from a folder of weights; return by how much memory has grown at its peak, what this
    rank's shards take, and the largest unit, in MiB.
    """
    from trainer import Trainer
    from trainer.model.parameters import local
    from trainer.weights.loading import load_initial_weights

    def build(folder: Path) -> Trainer:
        weights = f"{'model.path' if recipe.endswith('.yaml') else 'train.init_from'}={folder}"
        common = ["data.source=synthetic", "data.seq_len=16", "train.global_batch_size=8", f"run.dir={run / 'run'}"]
        config = load_config(recipe, [*common, weights, *overrides])
        trainer = Trainer(config)
        load_initial_weights(trainer.model, trainer.model_files, config, trainer.world)
        return trainer

    build(path / "small").close()  # what the first one imports
    before, peak, done = own_mib(), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], own_mib())

    watching = threading.Thread(target=watch)
    watching.start()
    trainer = build(path / "large")
    done.set()
    watching.join()
    shards = sum(local(p).nbytes for p in trainer.model.parameters()) / 2**20
    sizes = [sum(p.numel() for p in module.parameters()) for _, module in trainer.model.named_modules()]
    block = 4 * sorted(sizes)[-1] / NUM_LAYERS / 2**20
    trainer.close()
    return peak[0] - before, shards, block


NUM_LAYERS = 6


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["llama_small", pytest.param("hf.yaml", marks=pytest.mark.campaign)])
def test_ranks_that_load_a_folder_hold_their_shards_and_one_unit(recipe: str, tmp_path: Path) -> None:
    """There is no second pass that draws random weights."""
    transformers = pytest.importorskip("transformers")
    for name, width, layers in (("small", 32, 1), ("large", 1024, NUM_LAYERS)):
        config = transformers.LlamaConfig(
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=512,
            tie_word_embeddings=False,
        )
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / name, max_shard_size="20MB")
    if recipe.endswith(".yaml"):
        (tmp_path / recipe).write_text("model: {name: hf}\n")
        recipe = str(tmp_path / recipe)
    for grown, shards, block in on_ranks(4, load_folder, tmp_path, tmp_path, recipe):
        assert shards > 50
        print(f"grown by {grown:.0f} MiB: {shards:.0f} of shards, {block:.0f} of a block")
        assert grown < shards + block
