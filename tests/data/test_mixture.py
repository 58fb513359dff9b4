"""Several sources in one run: their shares and phases, and which of these may change on resume."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.data import Numbered, write_bpe, write_shards
from tests.helpers.launch import merged
from tests.helpers.tiny import fit, tiny_config
from trainer import Trainer, UserError, load_config
from trainer.config.phases import MIXTURE_BLOCK, Phase, find_phases
from trainer.config.rules import check_config
from trainer.data.loader import TrainLoader
from trainer.data.mixture import MixedSource, Mixture, make_order, samples_per_block
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


# ---------------------------------------------------------------------------------------------------------------
# The order


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
    by_size = Mixture(SIZES, [Phase(0, None)], 0).counts(MIXTURE_BLOCK)
    assert by_size == {"code": 136, "math": 16, "web": 872}
    with pytest.raises(UserError) as caught:
        Mixture({"web": 5000, "rare": 2}, [Phase(0, None)], 0)
    assert str(caught.value).startswith("data.weights=null: ")
    assert "rare" in str(caught.value)


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


# ---------------------------------------------------------------------------------------------------------------
# The settings

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
    "weights of one source": (["data.path=a.bin", "data.weights={web: 1}"], "data.weights=", ""),
    "weight without source": ([SOURCES, "data.weights={wbe: 1}"], "data.weights=", "data.weights={web: 1.0}"),
    "negative": ([SOURCES, "data.weights={web: -1, code: 1}"], "data.weights.web=", "data.weights.web=0"),
    "nothing": ([SOURCES, "data.weights={web: 0}"], "data.weights=", "data.weights={code: 1, web: 1}"),
    "tiny": (
        [SOURCES, "data.weights={web: 1, code: 0.0001}"],
        "data.weights=",
        "data.weights={web: 1.0, code: 0.000978}",
    ),
    "step 0": ([SOURCES, "data.phases=[{from: 0, weights: {web: 1}}]"], "data.phases[0].from=0: ", ""),
    "words": ([SOURCES, "data.phases=[{from: late, weights: {web: 1}}]"], "data.phases[0].from=late: ", ""),
    "beyond the end": ([SOURCES, "data.phases=[{from: 120%, weights: {web: 1}}]"], "data.phases[0].from=120%: ", ""),
    "out of order": (
        [SOURCES, "data.phases=[{from: 9, weights: {web: 1}}, {from: 9, weights: {code: 1}}]"],
        "data.phases[1].from=9: ",
        "",
    ),
    "two beginnings": (
        [SOURCES, "data.weights={web: 1}", "data.phases=[{from: 1, weights: {web: 1}}]"],
        "data.phases[0].from=1: ",
        "",
    ),
    "another key": ([SOURCES, "data.phases=[{at: 9, weights: {web: 1}}]"], "data.phases[0]=", ""),
    "a name": (["data.path={my web: a.bin}"], "data.path={my web: a.bin}: ", "data.path={web: a.bin}"),
    "held out of nothing": ([SOURCES, "data.eval_path={math: a.bin}"], "data.eval_path={math: a.bin}: ", ""),
    "held out of all": (
        [SOURCES, "data.eval_path=a.bin"],
        "data.eval_path=a.bin: ",
        "data.eval_path={web: a.bin}",
    ),
}
"""Overrides, how the message begins, and the setting that it proposes, if any."""


CANNOT_BE_TYPED = pytest.mark.xfail(strict=True, reason="data.weights.web is no key of the command line")


@pytest.mark.parametrize(
    "mistake", [pytest.param(name, marks=CANNOT_BE_TYPED) if name == "negative" else name for name in MISTAKES]
)
def test_mistake_is_refused_and_the_proposal_is_accepted(mistake: str) -> None:
    overrides, beginning, proposal = MISTAKES[mistake]
    with pytest.raises(UserError) as caught:
        check_config(config_of(*overrides), 1, 1)
    assert str(caught.value).startswith(beginning)
    assert caught.value.proposal == proposal
    if proposal:
        check_config(config_of(*merged(overrides, [proposal])), 1, 1)


# ---------------------------------------------------------------------------------------------------------------
# A run


def write_sources(folder: Path) -> str:
    """Write three sources of 40, 12 and 5 samples of 16 tokens, and return the setting."""
    for name, size in {"web": 40, "code": 12, "math": 5}.items():
        text = np.random.default_rng(size).integers(97, 123, 16 * size).astype(np.uint8).tobytes()
        write_shards(folder / name, [text])
    return "data.path={" + ", ".join(f"{name}: {folder / name}/*.bin" for name in ("web", "code", "math")) + "}"


def phases_of(second: int = 2, fourth: str = "{code: 1}") -> str:
    """Return a setting with phases that start at steps 2, 5 (after 256 tokens, at 16 x 4 per step) and 6 (of six)."""
    return (
        f"data.phases=[{{from: {second}, weights: {{web: 1, code: 1}}}}, "
        f"{{from: 'tokens:256', weights: {{math: 3, web: 1}}}}, {{from: 80%, weights: {fourth}}}]"
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

MixedRun = tuple[Path, list[dict[str, Any]], list[str]]


@pytest.fixture(scope="module")
def mixed_run(tmp_path_factory: pytest.TempPathFactory) -> MixedRun:
    """Train six steps on one rank; return the run folder, its lines of metrics, and the settings."""
    folder = tmp_path_factory.mktemp("mixed")
    settings = [*RUN_SETTINGS, write_sources(folder / "data")]
    return folder / "run", fit(folder / "run", *settings, phases_of()), settings


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


def test_the_epochs_of_a_source_cannot_be_logged(mixed_run: MixedRun, tmp_path: Path) -> None:
    """They would replace what was logged."""
    trainer = Trainer(tiny_config(tmp_path / "run", *mixed_run[2]))
    with pytest.raises(UserError) as caught:
        trainer.log("epoch_web", 1.0)
    assert "epoch_web" in str(caught.value)
    trainer.log("epoch_of_curriculum", 1.0)
    trainer.close()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ([phases_of(fourth="{web: 1}")], None),
        ([phases_of(second=3)], ["phase 2", "step 2", "step 3"]),
        (["data.phases=[]"], ["phase 2", "step 2"]),
        ([phases_of(), "data.weights={web: 1}"], ["phase 1", "step 1"]),
        ([phases_of(second=3), "checkpoint.allow_changes=[data.phases]"], None),
    ],
)
def test_future_phases_may_change_and_past_ones_may_not(
    change: list[str], named: list[str] | None, mixed_run: MixedRun, tmp_path: Path
) -> None:
    folder, _, settings = mixed_run
    trainer = Trainer(tiny_config(tmp_path / "run", *merged(settings, change)))
    try:
        checkpoint = folder / "checkpoints" / "step_00000003"
        if named is None:
            assert trainer.load_checkpoint(checkpoint) == 3
        else:
            with pytest.raises(UserError) as caught:
                trainer.load_checkpoint(checkpoint)
            assert all(words in str(caught.value) for words in [*named, "checkpoint.allow_changes=[data.phases]"])
    finally:
        trainer.close()


def test_changed_source_is_named(tmp_path: Path) -> None:
    path = write_sources(tmp_path / "data")
    settings = merged(RUN_SETTINGS, [path, "train.steps=1", "eval.every=0"])
    fit(tmp_path / "run", *settings)
    write_shards(tmp_path / "data" / "code", ["x" * 192], ["y" * 32])
    for permission in ([], ["checkpoint.allow_changes=[data.path]"]):
        trainer = Trainer(tiny_config(tmp_path / "run", *settings, *permission))
        if permission:
            assert trainer.load_checkpoint() == 1
        else:
            with pytest.raises(UserError) as caught:
                trainer.load_checkpoint()
            assert "source code: 1 shard of 193 tokens" in str(caught.value)
            assert "source web" not in str(caught.value)
        trainer.close()


def test_sources_of_different_tokenizers_do_not_mix(tmp_path: Path) -> None:
    setting = write_sources(tmp_path)
    (tmp_path / "math" / "text-00000.bin").unlink()
    write_shards(tmp_path / "math", ["the cat and the hat " * 20], tokenizer=write_bpe(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError) as caught:
        open_source(config_of(setting, "data.seq_len=16").data, None, "train")
    assert all(name in str(caught.value) for name in ("web", "math", "bytes"))
    paths = json.dumps({"web": str(tmp_path / "web" / "*.bin"), "code": "/nowhere"})
    with pytest.raises(UserError) as caught:
        open_source(config_of(f"data.path={paths}").data, 257, "train")
    assert str(caught.value).startswith("source code: data.path=/nowhere: ")


def test_no_source_trains_on_what_another_one_holds_out(tmp_path: Path) -> None:
    write_sources(tmp_path)
    every, code = str(tmp_path / "*" / "*.bin"), str(tmp_path / "code" / "text-00000.bin")
    paths = {"web": every, "math": str(tmp_path / "math")}

    def config(held_out: dict[str, str], *more: str, **other: str) -> Any:
        shown = [f"data.path={json.dumps({**paths, **other})}", f"data.eval_path={json.dumps(held_out)}"]
        return config_of(*shown, "data.seq_len=16", *more).data

    overlapping = [{"math": code}, {"web": every}, {"web": every, "math": every}]
    for held_out in overlapping:
        with pytest.raises(UserError) as caught:
            open_source(config(held_out), 257, "train")
        assert str(caught.value).startswith("source ")
        assert "data.eval_path" in str(caught.value)
    assert open_source(config({"math": code}), 257, "eval") is not None, "nothing is trained on"
    assert open_source(config({"math": code}, "data.weights={math: 1}"), 257, "train") is not None, "web is not used"
    assert open_source(config({"math": code}, web=str(tmp_path / "web")), 257, "train") is not None


def test_repeated_data_is_limited(tmp_path: Path) -> None:
    settings = ["data.seq_len=16", "train.steps=4", "eval.every=0", "data.weights={web: 3, math: 1}"]
    config = config_of(write_sources(tmp_path), *settings)
    source = open_source(config.data, 257, "train")
    times = make_order(source, config).counts(32)["math"] / 5
    assert times > 1
    for limit, is_refused in ((1.0, True), (math.ceil(times), False)):
        limited = config_of(write_sources(tmp_path), *settings, f"data.max_epochs={limit}")
        if not is_refused:
            assert make_order(source, limited).sizes["math"] == 5
            continue
        with pytest.raises(UserError) as caught:
            make_order(source, limited)
        assert str(caught.value).startswith(f"data.max_epochs={limit}: ")
        assert "math" in str(caught.value)
