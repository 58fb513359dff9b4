"""Several sources in one run: their shares and phases, and which of these may change on resume."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.test_data import Numbered, without_checksums, write_shards
from tests.helpers.ranks import merged, run_tiny
from tests.helpers.tiny import fit, tiny_config
from trainer import Trainer, UserError, load_config
from trainer.config import MIXTURE_BLOCK, Phase, check_config, find_phases
from trainer.data.loader import TrainLoader
from trainer.data.mixture import MixedSource, Mixture, describe_usage, make_order, samples_per_block, usage_by_phase
from trainer.data.opening import open_source

SIZES = {"web": 5000, "code": 777, "math": 93}
PHASES = [
    Phase(0, {"web": 0.7, "code": 0.2, "math": 0.1}),
    Phase(2500, {"web": 0.1, "code": 0.9}),
    Phase(2501, {"math": 1}),
    Phase(7000, {"web": 1, "code": 1, "math": 1}),
]
NUM = 12_000
STARTS = {"code": 0, "math": 777, "web": 870}
"""Where each source's samples begin, by name."""


def drawn(phases: list[Phase] = PHASES, num: int = NUM, seed: int = 3) -> dict[str, list[list[int]]]:
    """Return, for each source, the positions and the indices of its samples, in the order of the run."""
    indices = Mixture(SIZES, phases, seed).at(np.arange(num)).tolist()
    found: dict[str, list[list[int]]] = {name: [[], []] for name in SIZES}
    for position, index in enumerate(indices):
        name = next(name for name in ("web", "math", "code") if index >= STARTS[name])
        found[name][0].append(position)
        found[name][1].append(index - STARTS[name])
    return found


# -- the order --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, MIXTURE_BLOCK, 7000, 7000 + MIXTURE_BLOCK, 7000 + 3 * MIXTURE_BLOCK])
def test_shares_are_exact_in_every_whole_block(start: int) -> None:
    expected = {"web": 717, "code": 205, "math": 102} if start < 2500 else {"web": 341, "code": 342, "math": 341}
    block = range(start, start + MIXTURE_BLOCK)
    assert {name: sum(p in block for p in positions) for name, (positions, _) in drawn().items()} == expected


def test_each_sample_of_a_source_is_used_once_per_epoch_across_phases() -> None:
    for name, (_, numbers) in drawn().items():
        assert len(numbers) > SIZES[name] / 2
        for start in range(0, len(numbers), SIZES[name]):
            epoch = numbers[start : start + SIZES[name]]
            assert len(set(epoch)) == len(epoch), name
            assert len(epoch) < SIZES[name] or sorted(epoch) == list(range(SIZES[name]))


def test_number_of_samples_per_source_up_to_a_position() -> None:
    mixture, found = Mixture(SIZES, PHASES, 3), drawn()
    for samples in (0, 1, 1023, 1024, 2500, 2501, 2502, 6999, 7001, 9000, NUM):
        expected = {name: sum(p < samples for p in positions) for name, (positions, _) in found.items()}
        assert mixture.counts(samples) == expected


def test_order_of_a_mixture_has_not_changed_between_versions() -> None:
    """Runs resume from a position: changing these numbers would silently repeat some samples and skip others."""
    mixture = Mixture(SIZES, PHASES, 0)
    assert mixture.at(np.arange(6)).tolist() == [818, 349, 3399, 475, 5792, 2393]
    assert mixture.at(np.array([2499, 2500, 2501, 10**12])).tolist() == [4993, 417, 814, 495]


def test_position_does_not_depend_on_later_phases() -> None:
    whole = Mixture(SIZES, PHASES, 3).at(np.arange(NUM))
    assert np.array_equal(whole[:2500], Mixture(SIZES, PHASES[:1], 3).at(np.arange(2500)))
    added = [*PHASES[:1], Phase(1300, {"code": 1})]
    assert np.array_equal(whole[:1300], Mixture(SIZES, added, 3).at(np.arange(1300)))
    shuffled = np.random.default_rng(0).permutation(NUM)
    assert np.array_equal(whole[shuffled], Mixture(dict(reversed(SIZES.items())), PHASES, 3).at(shuffled))


def test_weights_become_shares_by_largest_remainders() -> None:
    assert samples_per_block({"web": 0.7, "code": 0.3}) == {"web": 717, "code": 307}
    assert samples_per_block({"web": 2, "code": 1, "math": 0}) == {"web": 683, "code": 341, "math": 0}
    assert samples_per_block({"b": 1, "c": 1, "a": 1}) == {"a": 342, "b": 341, "c": 341}
    assert Mixture(SIZES, [Phase(0, None)], 0).order_state(1) == {
        "phases": [[0, {"code": 136, "math": 16, "web": 872}]]
    }
    with pytest.raises(UserError, match=r"data.weights=null: by size, source rare \(2 of 5002 samples\)"):
        Mixture({"web": 5000, "rare": 2}, [Phase(0, None)], 0)


def mixed_loader(rank: int = 0, num_ranks: int = 1, micro: int = 24, **more: Any) -> TrainLoader:
    source = MixedSource({name: Numbered(size) for name, size in SIZES.items()})
    settings = {"seed": 3, "global_batch_size": 24, "micro_batch_size": micro, "dp_rank": rank, **more}
    return TrainLoader(source, num_dp_ranks=num_ranks, order=Mixture(SIZES, PHASES, 3), **settings)


@pytest.mark.parametrize(
    ("ranks", "micro", "workers"),
    [(1, 24, 0), (2, 3, 0), (4, 6, 0), (8, 1, 0), pytest.param(2, 4, 2, marks=pytest.mark.slow)],
)
def test_same_samples_for_any_ranks_micro_batches_and_workers(ranks: int, micro: int, workers: int) -> None:
    """Resume a one-rank state at step 104, in which the second and the third phase begin."""
    first = mixed_loader()
    for _ in range(103):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))
    assert state["samples"] == 103 * 24
    assert len(json.dumps(state)) < 1000
    rows = []
    for rank in range(ranks):
        loader = mixed_loader(rank, ranks, micro, num_workers=workers)
        loader.load_state_dict(state)
        count = 4 * loader.micro_batches_per_step
        rows.append(np.concatenate([next(loader)["tokens"][:, 0].numpy() for _ in range(count)]).reshape(4, -1))
        loader.close()
    found = drawn()
    by_position = {
        p: number for positions, numbers in found.values() for p, number in zip(positions, numbers, strict=True)
    }
    expected = [by_position[position] for position in range(103 * 24, 107 * 24)]
    assert np.concatenate(rows, axis=1).ravel().tolist() == expected


# -- the settings -----------------------------------------------------------------------------------------------

SOURCES = "data.path={web: a.bin, code: b/*.bin}"


def config_of(*overrides: str) -> Any:
    base = ["data.source=tokens", "train.global_batch_size=8", "data.seq_len=32"]
    return load_config("llama_small", merged(base, overrides))


def test_mapping_names_sources_and_other_values_are_paths(tmp_path: Path) -> None:
    config = config_of(SOURCES, "data.weights={web: 2, code: 1}")
    assert config.data.path == {"web": "a.bin", "code": "b/*.bin"}
    assert config.data.weights == {"web": 2.0, "code": 1.0}
    for text in ("a: b", "{a,b", "[1]", "007", "{web: a}/b.bin"):
        assert config_of(f"data.path={text}").data.path == text
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    assert load_config(str(tmp_path / "again.yaml")) == config


def test_first_step_of_a_phase() -> None:
    stated = (
        "[{from: 11, weights: {web: 1}}, {from: 'tokens:10_000', weights: {code: 1}}, {from: 83.3%, weights: {web: 1}}]"
    )
    phases = find_phases(config_of(SOURCES, "train.steps=100", f"data.phases={stated}"))
    # 10,000 tokens end in step 40, so the phase begins with step 41; 83.3 % of 100 steps end in step 84.
    assert [phase.start for phase in phases] == [0, 10 * 8, 40 * 8, 84 * 8]
    assert [phase.weights for phase in phases] == [None, {"web": 1}, {"code": 1}, {"web": 1}]
    first = find_phases(config_of(SOURCES, "data.phases=[{from: 1, weights: {web: 1}}]"))
    assert first == [Phase(0, {"web": 1})]
    # With epochs the number of steps is not known yet, so 80 % may be before or after step 1500.
    mixed = "data.phases=[{from: 1500, weights: {web: 1}}, {from: 80%, weights: {code: 1}}]"
    check_config(config_of(SOURCES, mixed, "train.epochs=2"), 1, 1)


MISTAKES = {
    "weights of one source": (["data.path=a.bin", "data.weights={web: 1}"], "data.path={web: PATH, code: PATH}"),
    "weight without source": ([SOURCES, "data.weights={wbe: 1}"], "did you mean 'data.weights={web: 1.0}'?"),
    "negative": ([SOURCES, "data.weights={web: -1}"], "nearest legal value: data.weights.web=0"),
    "nothing": ([SOURCES, "data.weights={web: 0}"], "for example: 'data.weights={code: 1, web: 1}'"),
    "tiny": ([SOURCES, "data.weights={web: 1, code: 0.0001}"], "value: 'data.weights={web: 1.0, code: 0.000978}'"),
    "step 0": ([SOURCES, "data.phases=[{from: 0, weights: {web: 1}}]"], "nearest legal value: data.phases[0].from=1"),
    "words": ([SOURCES, "data.phases=[{from: late, weights: {web: 1}}]"], "for example: data.phases[0].from=80%"),
    "beyond the end": ([SOURCES, "data.phases=[{from: 120%, weights: {web: 1}}]"], "value: data.phases[0].from=100%"),
    "out of order": (
        [SOURCES, "data.phases=[{from: 9, weights: {web: 1}}, {from: 9, weights: {code: 1}}]"],
        "nearest legal value: data.phases[1].from=10",
    ),
    "two beginnings": (
        [SOURCES, "data.weights={web: 1}", "data.phases=[{from: 1, weights: {web: 1}}]"],
        "nearest legal value: data.phases[0].from=2",
    ),
    "another key": ([SOURCES, "data.phases=[{at: 9, weights: {web: 1}}]"], "must contain only `from` and `weights`"),
    "a name": (["data.path={my web: a.bin}"], "a source needs a path and a name of letters"),
    "held out of nothing": ([SOURCES, "data.eval_path={math: a.bin}"], "data.path has no source math"),
    "held out of all": ([SOURCES, "data.eval_path=a.bin"], "for example: 'data.eval_path={web: a.bin}'"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_explained(mistake: str) -> None:
    overrides, words = MISTAKES[mistake]
    with pytest.raises(UserError) as caught:
        check_config(config_of(*overrides), 1, 1)
    assert words in str(caught.value)


# -- a run ------------------------------------------------------------------------------------------------------


def write_sources(folder: Path) -> str:
    """Write three sources of 40, 12 and 5 samples of 16 tokens, and return the setting."""
    for name, size in {"web": 40, "code": 12, "math": 5}.items():
        (folder / name).mkdir(parents=True)
        text = np.random.default_rng(size).integers(97, 123, 16 * size).astype(np.uint8).tobytes()
        write_shards(folder / name, [text])
    return "data.path={" + ", ".join(f"{name}: {folder / name}/*.bin" for name in ("web", "code", "math")) + "}"


WHEN = {"second": 2, "third": "tokens:256", "fourth": "80%"}


def phases_of(fourth: str = "{code: 1}", **when: object) -> str:
    """Return a setting with phases that start at steps 2, 5 (after 256 tokens, at 16 x 4 per step) and 6 (of six)."""
    when = {**WHEN, **when}
    second, third = "{web: 1, code: 1}", "{math: 3, web: 1}"
    return (
        f"data.phases=[{{from: {when['second']}, weights: {second}}}, {{from: 'tokens:256', weights: {third}}}, "
        f"{{from: {when['fourth']}, weights: {fourth}}}]"
    )


RUN_SETTINGS = [
    "data.source=tokens",
    "model.vocab_size=257",
    "data.seq_len=16",
    "train.global_batch_size=4",
    "data.weights={web: 0.5, code: 0.3, math: 0.2}",
    "train.steps=6",
    "checkpoint.every=3",
    "checkpoint.keep_last=0",
    "eval.every=6",
    "eval.steps=2",
    "data.holdout=0.2",
]


FIELDS = ["loss", "loss_web", "loss_code", "loss_math"]
MixedRun = tuple[Path, list[dict[str, Any]], list[str]]


@pytest.fixture(scope="module")
def mixed_run(tmp_path_factory: pytest.TempPathFactory) -> MixedRun:
    """Train six steps on one rank; return the run folder, its lines of metrics, and the settings."""
    folder = tmp_path_factory.mktemp("mixed")
    settings = [*RUN_SETTINGS, write_sources(folder / "data")]
    return folder / "run", fit(folder / "run", *settings, phases_of()), settings


def losses(records: list[dict[str, Any]]) -> list[list[float]]:
    """Return the losses of each line, with infinity for null."""
    lines = (record for record in records if record["kind"] in ("train", "eval"))
    return [[math.inf if line[field] is None else line[field] for field in FIELDS] for line in lines]


@pytest.mark.slow
def test_loss_is_the_weighted_mean_of_the_sources_losses(mixed_run: MixedRun) -> None:
    """A source's weight is its number of samples: in the steps for training, among the held-out samples for evaluation.

    The loss of a source without samples is null.
    """
    _, records, settings = mixed_run
    config = tiny_config(Path("run"), *settings, phases_of())
    source = open_source(config.data, 257, "train")
    order = make_order(source, config)
    assert dict(order.sizes) == {"web": 32, "code": 9, "math": 4}, "a fifth of each is held out"
    for record in (record for record in records if record["kind"] == "train"):
        before, after = order.counts(4 * record["step"] - 4), order.counts(4 * record["step"])
        counts = {name: after[name] - before[name] for name in after}
        assert [record[f"loss_{name}"] is None for name in counts] == [not count for count in counts.values()]
        total = sum(count * record[f"loss_{name}"] for name, count in counts.items() if count)
        assert total / 4 == pytest.approx(record["loss"], rel=1e-7)
        assert {name: record[f"epoch_{name}"] * order.sizes[name] for name in after} == pytest.approx(after)
    (evaluation,) = (record for record in records if record["kind"] == "eval")
    # The first eight held-out samples, of 8, 3 and 1 in proportion: 5, 2 and 1.
    total = sum(count * evaluation[f"loss_{name}"] for name, count in {"web": 5, "code": 2, "math": 1}.items())
    assert total / 8 == pytest.approx(evaluation["loss"], rel=1e-7)
    assert evaluation["epoch_web"] == order.counts(24)["web"] / 32


def test_the_epochs_of_a_source_cannot_be_logged(tmp_path: Path) -> None:
    """They would replace what was logged."""
    trainer = Trainer(tiny_config(tmp_path / "run", *RUN_SETTINGS, write_sources(tmp_path / "data")))
    with pytest.raises(UserError, match="'epoch_web' is a field"):
        trainer.log("epoch_web", 1.0)
    trainer.log("epoch_of_curriculum", 1.0)
    trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        ["nproc=2", "train.micro_batch_size=1"],
        pytest.param(["nproc=4", "train.micro_batch_size=1"], marks=pytest.mark.campaign),
        pytest.param(["nproc=4", "mesh.replicate=2", "train.micro_batch_size=1"], marks=pytest.mark.campaign),
        pytest.param(["train.micro_batch_size=4"], marks=pytest.mark.campaign),
    ],
    ids=["2", "4", "2x2", "1"],
)
@pytest.mark.parametrize("start", [3, pytest.param(0, marks=pytest.mark.campaign)])
def test_mixture_resumes_on_any_mesh_with_the_same_losses(
    mesh: list[str], start: int, mixed_run: MixedRun, tmp_path: Path
) -> None:
    folder, records, settings = mixed_run
    tiny = ["model.num_kv_heads=2", "model.dim=16"]
    checkpoint = folder / "checkpoints" / "step_00000003"
    more = [f"checkpoint.resume={checkpoint}"] if start else []
    ran = run_tiny(tmp_path / "run", *tiny, *settings, phases_of(), *mesh, *more)
    for found, expected in zip(losses(ran.metrics), losses(records)[start:], strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ([phases_of(fourth="{web: 1}")], None),
        (
            [phases_of(second=3)],
            r"phase 2 begins with step 2 \(code 512, web 512 of 1024\) in the checkpoint, but begins with step 3"
            r".*; `from: 2` keeps its first step, whatever train.steps is",
        ),
        (
            ["data.phases=[]"],
            r"phase 2 begins with step 2 \(.*\) in the checkpoint, but has not begun now; the run is past step 3",
        ),
        ([phases_of(), "data.weights={web: 1}"], r"phase 1 begins with step 1 \(code 307, math 205, web 512 of 1024\)"),
        ([phases_of(second=3), "checkpoint.allow_changes=[data.phases]"], None),
    ],
)
def test_future_phases_may_change_and_past_ones_may_not(
    change: list[str], words: str | None, mixed_run: MixedRun, tmp_path: Path
) -> None:
    folder, _, settings = mixed_run
    changed = [key.partition("=")[0] for key in change]
    kept = [setting for setting in settings if setting.partition("=")[0] not in changed]
    trainer = Trainer(tiny_config(tmp_path / "run", *kept, *change))
    try:
        checkpoint = folder / "checkpoints" / "step_00000003"
        if words is None:
            assert trainer.load_checkpoint(checkpoint) == 3
        else:
            with pytest.raises(UserError, match=words) as caught:
                trainer.load_checkpoint(checkpoint)
            assert "checkpoint.allow_changes=[data.phases]" in str(caught.value)
    finally:
        trainer.close()


def test_changed_source_is_named(tmp_path: Path) -> None:
    config = config_of("data.seq_len=16", write_sources(tmp_path))

    def loader() -> TrainLoader:
        source = open_source(config.data, 257, "train")
        sizes = {name: len(own) for name, own in source.sources.items()}  # type: ignore[attr-defined]
        order = Mixture(sizes, find_phases(config), 0)
        return TrainLoader(source, seed=0, global_batch_size=4, micro_batch_size=2, order=order)

    stored = json.loads(json.dumps(loader().state_dict()))
    assert loader().changes_from(stored, frozenset()) == ([], [])
    write_shards(tmp_path / "code", [b"x" * 192], [b"y" * 32])
    (line,), _ = loader().changes_from(stored, frozenset())
    assert line.startswith("data, source code: 1 shard of 193 tokens in the checkpoint, 2 shards of 226 tokens now")
    _, notes = loader().changes_from(stored, frozenset({"data.path"}))
    assert [text.partition(":")[0] for text in notes] == ["data, source code"]


def test_sources_of_different_tokenizers_do_not_mix(tmp_path: Path) -> None:
    config = config_of(write_sources(tmp_path), "data.seq_len=16")
    without_checksums(tmp_path / "math")
    for path in (tmp_path / "math").glob("*.json"):
        path.write_text(path.read_text().replace('"bytes"', '"mine"'))
    with pytest.raises(UserError, match=r"sources must use the same tokenizer: web by bytes .*, math by mine"):
        open_source(config.data, 257, "train")
    paths = json.dumps({"web": str(tmp_path / "web" / "*.bin"), "code": "/nowhere"})
    config = config_of(f"data.path={paths}")
    with pytest.raises(UserError, match=r"source code: data.path=/nowhere: no such file"):
        open_source(config.data, 257, "train")


def test_no_source_trains_on_documents_held_out_by_a_different_one(tmp_path: Path) -> None:
    write_sources(tmp_path)
    paths = {"web": str(tmp_path / "*" / "*.bin"), "math": str(tmp_path / "math")}
    held_out = {"math": str(next((tmp_path / "code").glob("*.bin")))}
    settings = [f"data.path={json.dumps(paths)}", "data.seq_len=16"]
    config = config_of(*settings, f"data.eval_path={json.dumps(held_out)}")
    with pytest.raises(UserError, match=r"source web: data.path=.*: includes .*, which data.eval_path .* source math"):
        open_source(config.data, 257, "train")
    assert open_source(config.data, 257, "eval") is not None, "nothing is trained on"
    unused = dataclasses.replace(config.data, weights={"math": 1.0})
    assert open_source(unused, 257, "train") is not None
    for names in ("web",), ("web", "math"), ("math", "web"):
        own = config_of(*settings, f"data.eval_path={json.dumps(dict.fromkeys(names, paths['web']))}")
        with pytest.raises(UserError, match=r"source (web|math): data.path=.*: includes .* holds out for source"):
            open_source(own.data, 257, "train")
    held_out = {"math": str(tmp_path / "code")}
    apart = [f"data.path={json.dumps({**paths, 'web': str(tmp_path / 'web')})}", "data.seq_len=16"]
    assert open_source(config_of(*apart, f"data.eval_path={json.dumps(held_out)}").data, 257, "eval") is not None


def test_repeated_data_is_announced_and_limited(tmp_path: Path) -> None:
    settings = ["data.seq_len=16", "train.steps=4", "eval.every=0", "data.weights={web: 3, math: 1}"]
    config = config_of(write_sources(tmp_path), *settings)
    source = open_source(config.data, 257, "train")
    found = usage_by_phase(make_order(source, config), 8, 4, 16)
    counted = [(p.first_step, p.last_step, p.source, p.samples, p.tokens) for p in found]
    read = make_order(source, config).counts(32)
    assert counted == [(1, 4, name, count, 16 * count) for name, count in read.items()]
    assert {p.source: p.epochs for p in found} == {"web": read["web"] / 40, "code": 0.0, "math": read["math"] / 5}
    assert describe_usage(found)[-1] == f"repeats its data: math is read {read['math'] / 5:.2f} times"
    assert len(describe_usage(usage_by_phase(make_order(source, config), 4, 2, 16))) == 1
    limited = dataclasses.replace(config, data=dataclasses.replace(config.data, max_epochs=1.0))
    with pytest.raises(UserError, match=r"data.max_epochs=1.0: source math would be read .* times in 4 steps"):
        make_order(source, limited)
