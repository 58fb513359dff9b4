"""Runs shared by many tests: each is trained only once, by the first pytest worker that needs it.

A test that only reads uses the fixture directly; one that resumes or damages the run uses a copy (`copy_to`).
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.chats import CHATML, conversation, write_tokenizer
from tests.helpers.launch import Run, on_ranks, run

STEPS = 12
SAVED_STEPS = (4, 8, 12)
EVALUATED_STEPS = (6, 12)

SHARED = [
    f"train.steps={STEPS}",
    "checkpoint.every=4",
    "checkpoint.keep_last=0",
    "data.documents=apart",
    "eval.every=6",
    "eval.steps=2",
    "log.prompts=[def]",
    "log.prompt_tokens=4",
    "log.norms_every=4",
]
"""What the shared runs have besides the tiny model. Each row has one document, so that ranks have different numbers of
targets."""

MESHES = {"one": ["nproc=1"], "two": ["nproc=2"], "four": ["nproc=4", "mesh.replicate=2", "train.micro_batch_size=1"]}
"""The meshes of the shared runs on text: 1, 2 and 2 x 2 ranks."""


class SharedRun(Run):
    """A finished run. Started again with `overrides` it has nothing to do; with more steps, it continues."""

    def __init__(self, folder: Path, overrides: Sequence[str], out: str, err: str) -> None:
        super().__init__(folder, [_Ended()], folder)
        self.overrides = list(overrides)
        self._printed = {"0.out": out, "0.err": err}

    def copy_to(self, folder: Path, up_to: int = STEPS) -> Path:
        """Return a copy, as if the run had been killed after the save of step `up_to` and before the next."""
        shutil.copytree(self.folder, folder)
        for step in SAVED_STEPS:
            if step > up_to:
                shutil.rmtree(folder / "checkpoints" / f"step_{step:08d}")
        return folder


@dataclass(frozen=True)
class _Ended:
    exitcode: int = 0


def write_chats(folder: Path, number: int = 40) -> list[str]:
    """Write conversations of many lengths, and a tokenizer; return the settings that train on them."""
    words = ["Hi", "Yes", "No", "two", "four", "Bye"]
    chats = [
        conversation(
            *(" ".join(words[(chat + turn + k) % 6] for k in range(1 + (7 * chat + turn) % 5)) for turn in range(4))
        )
        for chat in range(number)
    ]
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return [
        "data.source=chat",
        f"data.path={path}",
        f"data.tokenizer={write_tokenizer(folder / 'tokenizer', CHATML)}",
        f"data.cache_dir={folder / 'cache'}",
        "data.seq_len=96",
        "model.vocab_size=128",
    ]


def write_chat_model(folder: Path) -> None:
    """Write a tiny Llama in transformers' format, with a tokenizer and a chat template."""
    from tests.helpers import hf_models

    hf_models.folder_of(folder, "llama", vocab_size=128)
    write_tokenizer(folder, CHATML)


def _shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all workers of pytest-xdist share."""
    base = factory.getbasetemp()
    return base.parent if base.name.startswith("popen-") else base


def _train(name: str, overrides: Sequence[str], factory: pytest.TempPathFactory) -> SharedRun:
    base = _shared_folder(factory)
    folder, printed = base / f"shared-{name}", base / f"shared-{name}.json"
    with open(base / f"shared-{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not printed.exists():
            shutil.rmtree(folder, ignore_errors=True)  # left by a worker that was killed
            trained = run(folder, *overrides)
            printed.write_text(json.dumps([trained.out, trained.err]))
    return SharedRun(folder, overrides, *json.loads(printed.read_text()))


@pytest.fixture(scope="session")
def one(tmp_path_factory: pytest.TempPathFactory) -> SharedRun:
    """A run of tiny llama_small on text, on one rank: 12 steps with saves, evaluations, a prompt and norms."""
    return _train("one", [*SHARED, *MESHES["one"]], tmp_path_factory)


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> SharedRun:
    """The same run on two ranks."""
    return _train("two", [*SHARED, *MESHES["two"]], tmp_path_factory)


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> SharedRun:
    """The same run on 2 x 2 ranks."""
    return _train("four", [*SHARED, *MESHES["four"]], tmp_path_factory)


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> SharedRun:
    """A model folder fine-tuned on chats with adapters (LoRA), on one rank: 12 steps, saved at 4, 8 and 12."""
    base = _shared_folder(tmp_path_factory) / "shared-chat-input"
    with open(base.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / "written").exists():
            shutil.rmtree(base, ignore_errors=True)
            base.mkdir()
            on_ranks(1, write_chat_model, base / "model")
            write_chats(base)
            (base / "written").touch()
    settings = [
        "recipe=sft",
        f"model.path={base / 'model'}",
        f"data.path={base / 'chats.jsonl'}",
        f"data.cache_dir={base / 'cache'}",
        "data.seq_len=96",
        "lora.rank=4",
        "train.epochs=null",
        f"train.steps={STEPS}",
        "train.global_batch_size=4",
        "train.micro_batch_size=2",
        "checkpoint.every=4",
        "checkpoint.keep_last=0",
        "eval.every=6",
        "data.holdout=0.1",
        "log.prompts=[Hi]",
        "log.prompt_tokens=4",
        "run.threads=1",
        "run.device=cpu",
    ]
    return _train("chat", settings, tmp_path_factory)
