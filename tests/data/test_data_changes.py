"""Changed data, in which the stored position means nothing: a run does not resume unless this is allowed."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.data import Numbered, tokens_section, write_shards
from tests.helpers.launch import on_ranks, run, start
from tests.helpers.tiny import fit, tiny_config
from trainer import Trainer, UserError
from trainer.config.schema import DataSection
from trainer.data.loader import TrainLoader
from trainer.data.opening import open_source
from trainer.errors import TrainingFailed

TEXTS = [np.random.default_rng(seed).integers(97, 123, 300).astype(np.uint8).tobytes().decode() for seed in range(6)]


def write(folder: Path, *texts: str) -> str:
    return write_shards(folder, *([text] for text in texts))


def settings(path: str, steps: int = 2, *more: str) -> list[str]:
    return ["data.source=tokens", f"data.path={path}", "model.vocab_size=257", f"train.steps={steps}", *more]


def exchanged(folder: Path) -> None:
    for path in [*folder.glob("text-00000.*")]:
        other, aside = path.with_stem("text-00001"), folder / "aside"
        path.rename(aside)
        other.rename(path)
        aside.rename(other)


def gone(folder: Path) -> None:
    for path in folder.glob("text-00002.*"):
        path.unlink()


CHANGES: dict[str, Callable[[Path], object]] = {
    "joined": lambda folder: write(folder, *TEXTS[:4]),
    "gone": gone,
    "longer": lambda folder: write(folder, TEXTS[0], TEXTS[1] * 2, TEXTS[2]),
    "rewritten": lambda folder: write(folder, TEXTS[0], TEXTS[4], TEXTS[2]),
    "nudged": lambda folder: write(folder, TEXTS[0], TEXTS[1][:50] + TEXTS[1][51:] + "x", TEXTS[2]),
    "exchanged": exchanged,
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_of_the_data_is_seen(tmp_path: Path, change: str) -> None:
    data = tokens_section(write(tmp_path / "data", *TEXTS[:3]), seq_len=16)
    before = open_source(data, 257, "train").fingerprint
    assert open_source(data, 257, "train").fingerprint == before
    CHANGES[change](tmp_path / "data")
    assert open_source(data, 257, "train").fingerprint != before


def test_changed_data_is_refused_unless_this_is_allowed(tmp_path: Path, capsys: Any) -> None:
    """Then the run resumes at its position; its next checkpoint knows the new data, and needs no permission."""
    path = write(tmp_path / "data", *TEXTS[:3])
    fit(tmp_path / "run", *settings(path))
    write(tmp_path / "data", *TEXTS[:4])
    for allowed in ([], ["checkpoint.allow_changes=[data.seed]"]):
        with pytest.raises(UserError) as caught:
            fit(tmp_path / "run", *settings(path, 3, *allowed))
        assert "checkpoint.allow_changes=" in str(caught.value)
        assert all(size in str(caught.value) for size in ("3 shards of 903 tokens", "4 shards of 1204 tokens"))
    capsys.readouterr()
    permitted = Trainer(tiny_config(tmp_path / "run", *settings(path, 3, "checkpoint.allow_changes=[data]")))
    assert permitted.load_checkpoint() == 2
    assert permitted.loader.state_dict()["samples"] == 2 * 4
    permitted.close()
    lines = fit(tmp_path / "run", *settings(path, 3, "checkpoint.allow_changes=[data]"))
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3]
    assert "warning: " in capsys.readouterr().err
    fit(tmp_path / "run", *settings(path, 4))
    assert "warning: " not in capsys.readouterr().err


def test_moved_data_counts_as_unchanged(tmp_path: Path, capsys: Any) -> None:
    """Data in another folder, with other file names and modification times."""
    path = write(tmp_path / "data", *TEXTS[:3])
    fit(tmp_path / "run", *settings(path))
    shutil.copytree(tmp_path / "data", tmp_path / "moved", copy_function=shutil.copyfile)
    shutil.rmtree(tmp_path / "data")
    for file in (tmp_path / "moved").iterdir():
        file.rename(file.with_name(f"my-{file.name}"))
    capsys.readouterr()
    moved = str(tmp_path / "moved" / "*.bin")
    fit(tmp_path / "run", *settings(moved, 3, "checkpoint.allow_changes=[data.path]"))
    assert "warning: " not in capsys.readouterr().err


def load(folder: Path, *own: str) -> int | None:
    """Return the step at which a run would go on."""
    trainer = Trainer(tiny_config(folder, *own))
    try:
        return trainer.load_checkpoint()
    finally:
        trainer.close()


@pytest.mark.campaign
def test_other_windows_of_the_same_data_need_only_their_key(tmp_path: Path) -> None:
    path = write(tmp_path / "data", *TEXTS[:3])
    fit(tmp_path / "run", *settings(path))
    changes = {"data.seq_len": "24", "data.documents": "apart", "data.holdout": "0.4"}
    permitted = []
    for key, value in changes.items():
        permitted.append([f"{key}={value}", f"checkpoint.allow_changes=[{key}]"])
        with pytest.raises(UserError) as caught:
            load(tmp_path / "run", *settings(path, 3, *permitted[-1][:1]))
        assert key in str(caught.value)
        assert load(tmp_path / "run", *settings(path, 3, *permitted[-1])) == 2
    write(tmp_path / "data", *TEXTS[:4])
    for change in permitted:
        with pytest.raises(UserError) as caught:
            load(tmp_path / "run", *settings(path, 3, *change))
        assert "3 shards of 903 tokens" in str(caught.value)


def test_a_tokenizer_that_has_moved_is_the_same_and_another_is_not(tmp_path: Path, capsys: Any) -> None:
    """The setting has changed either way; the data have only with other ids, which is said if it is allowed."""
    tokenizers = pytest.importorskip("tokenizers")
    made = []
    for name, words in (("one", "abcdefgh"), ("other", "hgfedcba")):
        vocabulary = {letter: number for number, letter in enumerate([*words, "?", "</s>"])}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "?"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
        (tmp_path / name).mkdir()
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
        made.append(tmp_path / name)
    (tmp_path / "a.txt").write_text("abc fed hag bed " * 40)
    own = [f"data.cache_dir={tmp_path / 'cache'}", "checkpoint.every=2"]
    fit(tmp_path / "run", *settings(str(tmp_path / "a.txt")), *own, f"data.tokenizer={made[0]}")
    moved = made[0].rename(tmp_path / "moved")
    again = [*settings(str(tmp_path / "a.txt"), 4), *own]
    for other, is_warned in ((moved, False), (made[1], True)):
        with pytest.raises(UserError) as caught:
            load(tmp_path / "run", *again, f"data.tokenizer={other}")
        assert f"{made[0]}/tokenizer.json in the checkpoint" in str(caught.value)
        capsys.readouterr()
        permission = "checkpoint.allow_changes=[data.tokenizer]"
        assert load(tmp_path / "run", *again, permission, f"data.tokenizer={other}") == 2
        assert ("warning: " in capsys.readouterr().err) == is_warned


def test_the_library_of_another_python_is_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same one in another folder, on another machine, is not."""
    found = []
    for name, text in (("here", "x"), ("there", "x"), ("updated", "y")):
        (tmp_path / name / "lib").mkdir(parents=True)
        for number in range(60):
            (tmp_path / name / "lib" / f"m{number}.py").write_text(f"{text} = {number}\n")
        monkeypatch.setattr("sysconfig.get_path", lambda _, name=name: str(tmp_path / name / "lib"))
        data = DataSection(source="stdlib", seq_len=8, cache_dir=str(tmp_path / name / "cache"))
        found.append(open_source(data, None, "train").fingerprint)
    assert found[0] == found[1] != found[2]


class Declared(Numbered):
    """A source that says which version of its samples it has."""

    version = "1"

    @property
    def fingerprint(self) -> Any:
        return dataclasses.replace(super().fingerprint, content=self.version)


class OwnData(Trainer):
    """Trains on a source of its own."""

    size, version = 100, "1"

    def build_loader(self) -> TrainLoader:
        source = Declared(self.size)
        source.version = self.version
        return TrainLoader(source, seed=0, global_batch_size=4, micro_batch_size=2)


def test_a_source_of_ones_own_that_has_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Numbered, "seq_len", 2)

    def own(steps: int) -> list[str]:
        return ["data.source=synthetic", "model.vocab_size=257", "data.seq_len=2", f"train.steps={steps}"]

    fit(tmp_path / "run", *own(1), kind=OwnData)
    fit(tmp_path / "run", *own(2), kind=OwnData)
    for field, value in (("size", 101), ("version", "2")):
        with monkeypatch.context() as patch:
            patch.setattr(OwnData, field, value)
            with pytest.raises(UserError) as caught:
                fit(tmp_path / "run", *own(3), kind=OwnData)
            assert "checkpoint.allow_changes=[data]" in str(caught.value)


def test_state_of_the_loader_is_small(tmp_path: Path) -> None:
    source = open_source(tokens_section(write(tmp_path, *TEXTS), seq_len=16), None, "train")
    state = TrainLoader(source, seed=0, global_batch_size=4, micro_batch_size=2).state_dict()
    assert state["samples"] == 0
    assert len(json.dumps(state)) < 300


class OtherData(Trainer):
    """Rank 1 has outdated shards on its node."""

    def build_loader(self) -> TrainLoader:
        folder = self.config.run_dir.parent / str(self.world.rank)
        data = dataclasses.replace(self.config.data, path=str(folder / "*.bin"))
        ranks = {"dp_rank": self.world.rank, "num_dp_ranks": self.world.size}
        source = open_source(data, 257, "train")
        return TrainLoader(source, seed=0, global_batch_size=4, micro_batch_size=2, **ranks)


def outcome(folder: Path) -> str:
    try:
        OtherData(tiny_config(folder / "run", *settings(str(folder / "0" / "*.bin")))).fit()
    except TrainingFailed as error:
        return str(error)
    return "passed"


@pytest.mark.slow
def test_a_rank_with_other_data_is_named(tmp_path: Path) -> None:
    for rank, texts in enumerate((TEXTS[:3], [*TEXTS[:2], TEXTS[4]])):
        write(tmp_path / str(rank), *texts)
    for found in on_ranks(2, outcome, tmp_path):
        assert "rank 1" in found


@pytest.mark.slow
def test_two_ranks_refuse_changed_data_together(tmp_path: Path) -> None:
    path = write(tmp_path / "data", *TEXTS[:3])
    run(tmp_path / "run", *settings(path, 2))
    write(tmp_path / "data", *TEXTS[:4])
    refused = start(tmp_path / "run", *settings(path, 3, "nproc=2")).wait(together=False)
    assert refused.codes == [2, 2]
    assert refused.err.count("checkpoint.allow_changes=[data]'") == 1, refused.err
    assert "Traceback" not in refused.err
