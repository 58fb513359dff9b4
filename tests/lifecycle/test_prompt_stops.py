"""A signal at any moment before the first step ends a run and leaves nothing half done; the next start trains."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.chats import conversation
from tests.helpers.faults import Fault, processes_of, wait_until_it_catches
from tests.helpers.gate import wait_until
from tests.helpers.launch import on_ranks, run, start, tiny
from tests.helpers.runs import write_chat_model, write_chats

pytestmark = pytest.mark.slow

KINDS = ("chats", "text", "hf folder", "lora", "dpo")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a model, which take seconds to read."""
    folder = tmp_path_factory.mktemp("material")
    write_chats(folder, 4000)
    pairs = [
        {
            "prompt": conversation("two and " * (1 + number % 7)),
            "chosen": [{"role": "assistant", "content": "Yes"}],
            "rejected": [{"role": "assistant", "content": "No"}],
        }
        for number in range(2000)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    words = [b"one ", b"two ", b"three\n\n"]
    (folder / "raw.txt").write_bytes(b"".join(words[n] for n in np.random.default_rng(0).integers(0, 3, 3_000_000)))
    on_ranks(1, write_chat_model, folder / "model")
    return folder


def settings_of(kind: str, material: Path) -> list[str]:
    model = [f"model.path={material / 'model'}", "data.seq_len=64", "train.global_batch_size=4", "run.device=cpu"]
    model += ["run.threads=1", "log.every=1", "eval.every=0", "checkpoint.every=0", "train.micro_batch_size=2"]
    chats = f"data.path={material / 'chats.jsonl'}"
    tokenizer = [f"data.tokenizer={material / 'tokenizer'}", "model.vocab_size=128", "data.seq_len=96"]
    return {
        "chats": ["recipe=llama_small", *tiny("data.source=chat", chats, *tokenizer)],
        "text": ["recipe=llama_small", *tiny(f"data.path={material / 'raw.txt'}", "model.vocab_size=257")],
        "hf folder": ["recipe=sft", *model, chats],
        "lora": ["recipe=sft", *model, chats, "lora.rank=4"],
        "dpo": ["recipe=dpo", *model, f"data.path={material / 'pairs.jsonl'}"],
    }[kind]


def half_files(folder: Path) -> list[Path]:
    """Return files that are half written, and marks of a run that is alive."""
    endings = (".tmp", ".part")
    return [path for path in folder.rglob("*") if path.name.endswith(endings) or path.name == ".owner.json"]


def test_chats_are_tokenized_on_after_a_stop(tmp_path: Path) -> None:
    """A piece that is complete stays, and the run is as if there had been no stop."""
    write_chats(tmp_path, 600)
    chats = tmp_path / "chats.jsonl"
    records = [{**json.loads(line), "unread": "x" * 12_000} for line in chats.read_text().splitlines()]
    chats.write_text("".join(json.dumps(record) + "\n" for record in records))  # two pieces, of 3.6 MB each
    own = [*settings_of("chats", tmp_path), "model.name=tests.helpers.custom_recipes:llama_faulty", "train.steps=3"]
    plain_cache, cache = tmp_path / "plain-cache", tmp_path / "own-cache"
    noted = Fault(tmp_path / "plain-notes", below=plain_cache)
    plain = run(tmp_path / "plain", *own, f"data.cache_dir={plain_cache}", variables=noted.variables)
    place = next(number for number, operation in enumerate(noted.files()) if "/00001" in operation)
    fault = Fault(tmp_path / "notes", {f"file {place}": "SIGTERM"}, below=cache)
    stopped = run(tmp_path / "run", *own, f"data.cache_dir={cache}", code=75, variables=fault.variables)
    assert "Traceback" not in stopped.err
    assert half_files(tmp_path) == []
    (done,) = cache.rglob("*.done")
    before = done.stat().st_ino
    assert run(tmp_path / "run", *own, f"data.cache_dir={cache}").train("loss") == plain.train("loss")
    assert done.stat().st_ino == before, "it is not built again"
    assert len(list(cache.rglob("*.done"))) == 2


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_at_any_moment_before_the_first_step(kind: str, seed: int, material: Path, tmp_path: Path) -> None:
    """Moments are random; each failure names its seed. A signal may also come after the first step."""
    drawn, number = random.Random(f"{kind} {seed}"), SIGNALS[seed % 3]
    own = [*settings_of(kind, material), f"data.cache_dir={tmp_path / 'cache'}", f"nproc={drawn.choice([1, 1, 2])}"]
    stopped = start(tmp_path / "run", *own, "train.steps=1000000", fresh=True)
    wait_until_it_catches(stopped.pids[0], signal.SIGTERM)  # Python itself catches SIGINT from the beginning
    time.sleep(drawn.uniform(0.0, 8.0))
    stopped.signal(number)
    assert stopped.wait().code == 75, stopped.err
    assert "Traceback" not in stopped.err
    wait_until(lambda: not processes_of(tmp_path), "the end of all processes")
    assert half_files(tmp_path) == []
    if (tmp_path / "run" / "status.json").exists():
        assert stopped.status["state"] == "stopped"
    run(tmp_path / "run", *own, f"train.steps={2 + max(stopped.steps_saved, default=0)}")
