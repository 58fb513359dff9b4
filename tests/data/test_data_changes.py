"""Changed data, in which the stored position is not valid: a run does not resume unless this is allowed."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.test_data import Numbered, make_loader, without_checksums, write_shards
from tests.helpers.ranks import run_ranks, run_tiny
from tests.helpers.tiny import fit, tiny_config
from trainer import Trainer, UserError
from trainer.checkpoint.reader import advice_for
from trainer.config import DataSection, compare_configs, load_config
from trainer.data import opening
from trainer.data.loader import TrainLoader
from trainer.data.opening import open_source
from trainer.data.stdlib import SourceFile, StdlibCorpus

TEXTS = [bytes(np.random.default_rng(seed).integers(97, 123, 300).tolist()) for seed in range(6)]


def write(folder: Path, *texts: bytes) -> str:
    folder.mkdir(exist_ok=True)
    return write_shards(folder, *([text] for text in texts))


def settings(path: str, steps: int = 2, *more: str) -> list[str]:
    return ["data.source=tokens", f"data.path={path}", "model.vocab_size=257", f"train.steps={steps}", *more]


def rewritten(folder: Path) -> None:
    write(folder, TEXTS[0], TEXTS[4], TEXTS[2])


def nudged(folder: Path) -> None:
    """Change half a page of three shards of 602 bytes each."""
    content = bytearray((folder / "text-00001.bin").read_bytes())
    content[100:400] = content[101:401]
    (folder / "text-00001.bin").write_bytes(content)
    without_checksums(folder)


def exchanged(folder: Path) -> None:
    for suffix in (".bin", ".idx", ".json"):
        first, second, aside = folder / f"text-00000{suffix}", folder / f"text-00001{suffix}", folder / "aside"
        first.rename(aside)
        second.rename(first)
        aside.rename(second)


def gone(folder: Path) -> None:
    for path in folder.glob("text-00002.*"):
        path.unlink()


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "joined": (lambda folder: write(folder, *TEXTS[:4]), r"3 shards of 903 tokens .* 4 shards of 1204 tokens"),
    "gone": (gone, r"3 shards of 903 tokens .* 2 shards of 602 tokens"),
    "longer": (lambda folder: write(folder, TEXTS[0], TEXTS[1] * 2, TEXTS[2]), r"3 shards of 903 .* 1203 tokens"),
    "rewritten": (rewritten, r"3 shards of 903 tokens in the checkpoint, the same number now, with different content"),
    "nudged": (nudged, ".* with different content"),
    "exchanged": (exchanged, ".* with different content"),
}


@pytest.mark.slow
def test_a_tokenizer_that_has_moved_is_allowed(tmp_path: Path) -> None:
    """Its setting belongs to the data section, but the data's own metadata show that the tokenizer is the same."""
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
    common = [f"data.cache_dir={tmp_path / 'cache'}", "checkpoint.every=2"]
    own = [*settings(str(tmp_path / "a.txt")), *common]
    fit(tmp_path / "run", *own, f"data.tokenizer={made[0]}")
    moved = made[0].rename(tmp_path / "moved")
    again = [*settings(str(tmp_path / "a.txt"), 4), *common]
    with pytest.raises(
        UserError, match=r"data\.tokenizer: .*/one/tokenizer\.json in the checkpoint(.|\n)*different content"
    ):
        fit(tmp_path / "run", *again, f"data.tokenizer={made[1]}")
    with pytest.raises(UserError, match=r"data\.tokenizer: .*/one/tokenizer\.json in the checkpoint, .*/moved/"):
        fit(tmp_path / "run", *again, f"data.tokenizer={moved}")
    allowed = "checkpoint.allow_changes=[data.tokenizer]"
    assert fit(tmp_path / "run", *again, allowed, f"data.tokenizer={moved}")[-1]["step"] == 4


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_of_the_data_is_seen(tmp_path: Path, change: str) -> None:
    data = DataSection(source="tokens", path=write(tmp_path / "data", *TEXTS[:3]), seq_len=16, holdout=0.1)

    def loader() -> TrainLoader:
        return TrainLoader(open_source(data, 257, "train"), seed=0, global_batch_size=4, micro_batch_size=2)

    stored = json.loads(json.dumps(loader().state_dict()))
    assert loader().changes_from(stored, frozenset()) == ([], [])
    alter, words = CHANGES[change]
    alter(tmp_path / "data")
    (refused,), told = loader().changes_from(stored, frozenset({"data.seed", "data.seq_len", "model"}))
    assert re.match(f"data: {words}", refused)
    assert refused.endswith("(allow it: checkpoint.allow_changes=[data])")
    assert told == []
    refused_none, (told_one,) = loader().changes_from(stored, frozenset({"data"}))
    assert (refused_none, told_one) == ([], refused.replace(REFUSAL, " (allowed by checkpoint.allow_changes)"))


def test_keys_to_allow_are_listed_once() -> None:
    """A key is not listed if its entire section is."""
    unfit = [f"data, source {name}: 1 sample{REFUSAL}" for name in ("web", "code")]
    unfit.append("data.phases: phase 2 (allow it: checkpoint.allow_changes=[data.phases])")
    found = advice_for(["data.path: a in the checkpoint, b now", "run.seed: 1 in the checkpoint, 2 now"], unfit)
    assert found.endswith("or allow it: 'checkpoint.allow_changes=[run.seed,data]'"), found


REFUSAL = " (allow it: checkpoint.allow_changes=[data])"


@pytest.mark.slow
def test_changed_data_is_rejected(tmp_path: Path, capsys: Any) -> None:
    """If allowed, the run resumes on them; the next checkpoint has their fingerprint, and needs no permission."""
    path = write(tmp_path / "data", *TEXTS[:3])
    fit(tmp_path / "run", *settings(path))
    write(tmp_path / "data", *TEXTS[:4])
    refused = Trainer(tiny_config(tmp_path / "run", *settings(path, 3)))
    with pytest.raises(UserError, match=r"data: 3 shards of 903 tokens") as caught:
        refused.fit()
    refused.close()
    assert str(caught.value).endswith("'checkpoint.allow_changes=[data]'")
    capsys.readouterr()
    lines = fit(tmp_path / "run", *settings(path, 3, "checkpoint.allow_changes=[data]"))
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3]
    assert capsys.readouterr().err.count("warning: ") == 1
    fit(tmp_path / "run", *settings(path, 4))
    assert "warning" not in capsys.readouterr().err


@pytest.mark.slow
def test_position_is_kept_if_changed_data_is_allowed(tmp_path: Path) -> None:
    path = write(tmp_path / "data", *TEXTS[:3])
    fit(tmp_path / "run", *settings(path))
    write(tmp_path / "data", *TEXTS[:4])
    trainer = Trainer(tiny_config(tmp_path / "run", *settings(path, 4, "checkpoint.allow_changes=[data.path]")))
    assert trainer.load_checkpoint() == 2
    assert isinstance(trainer.loader, TrainLoader)
    assert trainer.loader.samples == 2 * 4
    trainer.close()


@pytest.mark.slow
def test_moved_data_counts_as_unchanged(tmp_path: Path, capsys: Any) -> None:
    """Data in another folder, with other file names and modification times."""
    path = write(tmp_path / "data", *TEXTS[:3])
    fit(tmp_path / "run", *settings(path))
    shutil.move(tmp_path / "data", tmp_path / "moved")
    for file in (tmp_path / "moved").iterdir():
        file.rename(file.with_name(f"my-{file.name}"))
        os.utime(file.with_name(f"my-{file.name}"), (1, 1))
    moved = str(tmp_path / "moved" / "*.bin")
    fit(tmp_path / "run", *settings(moved, 3, "checkpoint.allow_changes=[data.path]"))
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"seq_len": 24}, {"pack": False}, {"holdout": 0.4}])
def test_new_sequence_length_on_the_same_data_needs_only_its_key(tmp_path: Path, change: dict[str, Any]) -> None:
    data = DataSection(source="tokens", path=write(tmp_path / "data", *TEXTS[:3]), seq_len=20)

    def loader(data: DataSection) -> TrainLoader:
        return TrainLoader(open_source(data, 257, "train"), seed=0, global_batch_size=4, micro_batch_size=2)

    stored = loader(data).state_dict()
    other = dataclasses.replace(data, **change)
    allowed = frozenset({f"data.{key}" for key in change})
    assert loader(other).changes_from(stored, allowed) == ([], [])
    (line,), _ = loader(other).changes_from(stored, frozenset())
    assert re.match(r"data: \d+ samples in the checkpoint, \d+ samples now", line)
    write(tmp_path / "data", *TEXTS[:4])
    (line,), _ = loader(other).changes_from(stored, allowed)
    assert line.startswith("data: 3 shards")


@pytest.mark.campaign
def test_checkpoint_without_fingerprint(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """A run resumes from it with one warning, and the next checkpoint has a fingerprint."""
    path = write(tmp_path / "data", *TEXTS[:3])
    with monkeypatch.context() as before:
        before.setattr(TrainLoader, "state_dict", lambda loader: {"samples": loader.samples})
        fit(tmp_path / "run", *settings(path))
    capsys.readouterr()
    fit(tmp_path / "run", *settings(path, 3))
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1
    assert "step_00000002: does not record its training data" in warnings[0]
    fit(tmp_path / "run", *settings(path, 4))
    assert "warning" not in capsys.readouterr().err


def test_state_is_small_and_readable_by_earlier_versions(tmp_path: Path) -> None:
    path = write(tmp_path, *TEXTS)
    source = open_source(DataSection(source="tokens", path=path, seq_len=16), None, "train")
    loader = TrainLoader(source, seed=0, global_batch_size=4, micro_batch_size=2)
    state = loader.state_dict()
    assert state["samples"] == 0
    assert len(str(state)) < 300
    loader.load_state_dict({"samples": 8})
    assert loader.samples == 8


class OtherPython(StdlibCorpus):
    """The standard library of another Python version, with different source text and modification times."""

    texts = (b"x = 1\n" * 500, b"y = 2\n" * 500)

    def __init__(self) -> None:
        """Use the given texts instead of files."""
        self._folder = Path("python")
        self._files = tuple(SourceFile(f"{n}.py", len(text), hash(text)) for n, text in enumerate(self.texts))

    def documents(self, split: Any) -> list[bytes]:
        return list(self.texts)


@pytest.mark.slow
def test_different_python_version_counts_as_changed_data(tmp_path: Path, monkeypatch: Any) -> None:
    stdlib = ["data.source=stdlib", "model.vocab_size=257", f"data.cache_dir={tmp_path}/cache"]
    monkeypatch.setattr(opening, "StdlibCorpus", OtherPython)
    fit(tmp_path / "run", *stdlib, "train.steps=1")
    shutil.rmtree(tmp_path / "cache")  # another machine, with the same Python
    fit(tmp_path / "run", *stdlib, "train.steps=2")
    monkeypatch.setattr(OtherPython, "texts", (b"x = 1\n" * 500, b"y = 3\n" * 500))
    updated = Trainer(tiny_config(tmp_path / "run", *stdlib, "train.steps=3"))
    with pytest.raises(UserError, match=r"data: 1 shard of .* the same number now, with different content"):
        updated.fit()
    updated.close()


def test_custom_source_that_has_grown_is_rejected() -> None:
    stored = make_loader(num_samples=100).state_dict()
    refused, told = make_loader(num_samples=100).changes_from(stored, frozenset())
    assert (refused, told) == ([], [])
    refused, told = make_loader(num_samples=101).changes_from(stored, frozenset())
    assert len(refused) == 1
    assert refused[0].startswith("data: 100 samples in the checkpoint, 101 samples now")
    assert make_loader(num_samples=101).changes_from(stored, frozenset({"data"}))[0] == []


def test_custom_source_may_provide_a_fingerprint() -> None:
    class DeclaredModel(Numbered):
        version = "1"

        @property
        def fingerprint(self) -> Any:
            return dataclasses.replace(super().fingerprint, content=self.version)

    def loader() -> TrainLoader:
        return TrainLoader(DeclaredModel(10), seed=0, global_batch_size=2, micro_batch_size=1)

    stored = loader().state_dict()
    assert loader().changes_from(stored, frozenset())[0] == []
    DeclaredModel.version = "2"
    assert "different content" in loader().changes_from(stored, frozenset())[0][0]


def test_whole_sections_may_be_allowed_to_change() -> None:
    stored = load_config("llama_small").to_yaml()
    changed = ["data.seq_len=128", "data.seed=4", "model.dim=48"]

    def refused(allowed: str) -> list[str]:
        return compare_configs(load_config("llama_small", [*changed, f"checkpoint.allow_changes={allowed}"]), stored)[0]

    assert [line.partition(":")[0] for line in refused("[data]")] == ["model.dim"]
    assert [line.partition(":")[0] for line in refused("[model]")] == ["data.seq_len", "data.seed"]
    assert refused("[data,model]") == []


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
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


@pytest.mark.slow
def test_ranks_with_different_data_are_named(tmp_path: Path) -> None:
    for rank, texts in enumerate((TEXTS[:3], [*TEXTS[:2], TEXTS[4]])):
        write(tmp_path / str(rank), *texts)
    for found in run_ranks(2, outcome, tmp_path):
        assert found.startswith("TrainingFailed: self-check: rank 1: reads from position 0 of an order of"), found


@pytest.mark.slow
def test_two_ranks_reject_changed_data_together(tmp_path: Path) -> None:
    path = write(tmp_path / "data", *TEXTS[:3])
    run_tiny(tmp_path / "run", *settings(path, 2, "nproc=2"))
    write(tmp_path / "data", *TEXTS[:4])
    ran = run_tiny(tmp_path / "run", *settings(path, 3, "nproc=2"), exit_code=2)
    assert ran.stderr.count("'checkpoint.allow_changes=[data]'\n") == 1, ran.stderr
    assert "Traceback" not in ran.stderr
