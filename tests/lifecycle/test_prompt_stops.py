"""A signal at any moment before the first step ends a run within seconds and leaves nothing; the next start trains.

Moments are random; each failure names its seed. MESHTRAINER_TEST_MOMENTS=N draws N moments for each kind of run.
`python -m tests.lifecycle.test_prompt_stops FOLDER KIND N` runs N random cases and prints the duration of each.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.test_processes import processes_of
from tests.helpers.chats import CHATML, conversation, write_tokenizer
from tests.helpers.forked import popen
from tests.helpers.gate import wait_until
from tests.helpers.ranks import CommandResult, tiny_overrides
from tests.lifecycle.test_random_signals import draws

pytestmark = pytest.mark.slow

KINDS = ("chats", "raw text", "remote text", "remote shards", "hf folder", "lora", "dpo")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LIMIT_S = 5.0
BUSY_S = 15.0
"""The limit in the normal suite, where other tests may keep the machine busy."""

# ---------------------------------------------------------------------------------------------------------------
# The runs


def write_chats(path: Path, count: int) -> None:
    words = ["Hi", "Yes", "No", "two", "four", "Bye"]
    with open(path, "w") as file:
        for number in range(count):
            turns = [" ".join(words[(number + turn + k) % 6] for k in range(1 + number % 5)) for turn in range(4)]
            file.write(json.dumps({"messages": conversation(*turns)}) + "\n")


def write_pairs(path: Path, count: int) -> None:
    with open(path, "w") as file:
        for number in range(count):
            answers = [[{"role": "assistant", "content": text}] for text in ("Yes", "No")]
            prompt = conversation("two and " * (1 + number % 7))
            file.write(json.dumps({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}) + "\n")


def write_model(folder: Path) -> Path:
    from tests.weights.test_pretrained import SOURCE, folder_of

    return write_tokenizer(folder_of(folder, config=replace(SOURCE, vocab_size=128)), CHATML, eos_token="<|im_end|>")


class SlowHandler(SimpleHTTPRequestHandler):
    """Sends a file in pieces, some 20 a second."""

    def copyfile(self, source: Any, outputfile: Any) -> None:
        while block := source.read(50_000):
            outputfile.write(block)
            outputfile.flush()
            time.sleep(0.05)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def slow_server(folder: Path, handler: type[SimpleHTTPRequestHandler] = SlowHandler) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    server.daemon_threads, server.handle_error = True, lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass(frozen=True)
class Material:
    """Data and models shared by all cases; each case has a separate cache and run folder."""

    folder: Path
    url: str

    def settings(self, kind: str) -> list[str]:
        chats = ["data.source=chat", f"data.tokenizer={self.folder / 'model'}", "model.vocab_size=128"]
        model = [f"model.path={self.folder / 'model'}", "data.seq_len=64", "train.global_batch_size=4"]
        quick = ["run.threads=1", "log.every=1", "eval.every=0", "checkpoint.every=0", "train.micro_batch_size=2"]
        path = f"data.path={self.folder / 'chats.jsonl'}"
        text = ["data.source=tokens", "model.vocab_size=257"]
        return {
            "chats": ["recipe=llama_small", *tiny_overrides(*chats, path, "data.seq_len=96")],
            "raw text": ["recipe=llama_small", *tiny_overrides(*text, f"data.path={self.folder / 'raw.txt'}")],
            "remote text": ["recipe=llama_small", *tiny_overrides(*text, f"data.path={self.url}/short.txt")],
            "remote shards": ["recipe=llama_small", *tiny_overrides(*text, f"data.path={self.url}/shards-00000.bin")],
            "hf folder": ["recipe=sft", *model, *quick, path],
            "lora": ["recipe=sft", *model, *quick, path, "lora.rank=4"],
            "dpo": ["recipe=dpo", *model, *quick, f"data.path={self.folder / 'pairs.jsonl'}"],
        }[kind]


@contextmanager
def materials(folder: Path) -> Iterator[Material]:
    from tests.data.test_data import write_shards

    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        rng = np.random.default_rng(0)
        write_chats(folder / "chats.jsonl", 4000)
        write_pairs(folder / "pairs.jsonl", 2000)
        words = [b"one ", b"two ", b"three\n\n"]
        for name, count in (("raw.txt", 3_000_000), ("short.txt", 400_000)):
            (folder / name).write_bytes(b"".join(words[n] for n in rng.integers(0, 3, count)))
        write_shards(folder, [rng.bytes(2_000_000)], name="shards")
        write_model(folder / "model")
    with slow_server(folder) as url:
        yield Material(folder, url)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Material]:
    with materials(tmp_path_factory.mktemp("material")) as found:
        yield found


# ---------------------------------------------------------------------------------------------------------------
# One draw


def start(material: Material, kind: str, folder: Path, *more: str) -> Any:
    own = [f"run.dir={folder / 'run'}", f"data.cache_dir={folder / 'cache'}"]
    return popen([sys.executable, "-m", "trainer.run", *material.settings(kind), *own, *more])


def has_a_handler(pid: int, number: signal.Signals) -> bool:
    found = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(found and int(found[1], 16) >> (number - 1) & 1)


def half_files(folder: Path) -> list[str]:
    """Return the files that are only half written, and what says that a run is alive."""
    names = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path) for path in names if re.search(r"\.tmp$|\.part$|^\..*\.\d+$|^\.owner\.json", path.name)]


@dataclass(frozen=True)
class Drawn:
    number: signal.Signals
    ranks: int
    is_group: bool
    after_s: float
    wall_s: float
    stderr: str


def stop_at_random(
    material: Material, kind: str, seed: int, folder: Path, number: signal.Signals, span: float
) -> Drawn:
    """Send a signal at a random moment of the start; check all but the time that it took."""
    drawn = random.Random(f"{kind} {seed} {number.name}")
    ranks, after_s, is_group = drawn.choice([1, 1, 2]), drawn.uniform(0.0, span), drawn.random() < 0.3
    process = start(material, kind, folder, "train.steps=1000000", f"nproc={ranks}")
    wait_until(lambda: has_a_handler(process.pid, number), "its handlers")
    time.sleep(after_s)
    began = time.monotonic()
    os.killpg(process.pid, number) if is_group else process.send_signal(number)
    _, stderr = process.communicate(timeout=120)
    result = Drawn(number, ranks, is_group, after_s, time.monotonic() - began, stderr)
    said = f"{kind}, seed {seed}: {result}"
    assert process.returncode == 75, f"exit code {process.returncode}; {said}"
    assert "Traceback" not in stderr, said
    wait_until(lambda: not processes_of(folder), "the end of all processes", 15)
    assert not half_files(folder), f"{half_files(folder)}; {said}"
    if (folder / "run" / "status.json").exists():
        assert CommandResult(75, "", "", folder / "run").status["state"] == "stopped", said
    process = start(material, kind, folder, "train.steps=2", f"nproc={ranks}")
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, f"the next start: {stderr}\n{said}"
    return result


def seconds_to_the_first_step(material: Material, kind: str, folder: Path) -> float:
    """Return how long an undisturbed start takes here and now, from the moment that it catches signals."""
    process = start(material, kind, folder, "train.steps=2")
    wait_until(lambda: has_a_handler(process.pid, signal.SIGTERM), "its handlers")
    began, metrics = time.monotonic(), folder / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and '"step": 1,' in metrics.read_text(), "its first step")
    process.communicate(timeout=120)
    return time.monotonic() - began


@pytest.fixture(scope="module")
def spans(material: Material, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    return {kind: seconds_to_the_first_step(material, kind, tmp_path_factory.mktemp("undisturbed")) for kind in KINDS}


@pytest.mark.parametrize(
    "kind", ["chats", *(pytest.param(kind, marks=pytest.mark.campaign) for kind in ("remote text", "dpo"))]
)
def test_a_signal_before_the_first_step(kind: str, material: Material, tmp_path: Path) -> None:
    found = stop_at_random(material, kind, 0, tmp_path, SIGNALS[KINDS.index(kind) % 3], 4.0)
    assert found.wall_s < BUSY_S, found


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", draws(50))
@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_at_any_moment_before_the_first_step(kind: str, seed: int, material: Material, tmp_path: Path) -> None:
    found = stop_at_random(material, kind, seed, tmp_path, SIGNALS[seed % 3], 8.0)
    assert found.wall_s < LIMIT_S, found


def by_hand(folder: Path, kinds: list[str], seeds: range) -> None:
    with materials(folder / "material") as material:
        for kind in kinds:
            span = seconds_to_the_first_step(material, kind, folder / f"undisturbed-{kind}")
            print(f"{kind}: {span:.1f} s to the first step", flush=True)
            for seed in seeds:
                own = folder / f"{kind.replace(' ', '-')}-{seed}"
                try:
                    found: object = stop_at_random(material, kind, seed, own, SIGNALS[seed % 3], span)
                except (AssertionError, Exception) as error:
                    found = f"FAILED {error}"
                if isinstance(found, Drawn):
                    line = f"{found.number.name} ranks={found.ranks} group={found.is_group} after {found.after_s:.2f} s"
                    found = f"{line}: {found.wall_s:.2f} s, {found.stderr.strip().splitlines()[-1:]}"
                print(f"{kind} {seed}: {found}", flush=True)


if __name__ == "__main__":
    by_hand(Path(sys.argv[1]), list(KINDS) if sys.argv[2] == "all" else [sys.argv[2]], range(*map(int, sys.argv[3:])))
