"""Counts the files entered by six paths through the code, by tracing a tiny run.

    python -m tests.walks            # print each path: its files, in the order in which they are entered
    python -m tests.walks --write    # also write the numbers of files into docs/architecture.md

A path begins when its entry function is called and ends when that returns.  A file of `trainer/` counts if a function
defined in it is called in between, on the main thread of rank 0 or on a thread that is started in between.  Code that
runs because a module is imported does not count, and neither do files in other folders, such as `recipes/`, and a few
files that are used everywhere (`EXCLUDED`).  The run has two ranks on CPUs, so that the model is sharded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "architecture.md"
SOURCE = REPOSITORY / "trainer"
BEGIN, END = "<!-- walks: begin, written by python -m tests.walks --write -->", "<!-- walks: end -->"
EXCLUDED = ("errors.py", "files.py", "stopping.py", "tables.py")
"""Files that do not count, because they are used everywhere."""


@dataclass(frozen=True)
class Walk:
    """A path through the code: its title, and the function at whose call it begins."""

    title: str
    entry: str


WALKS = {
    "step": Walk("the maths of a step, without the model's own code", "`Trainer.train_step()`"),
    "save": Walk("a synchronous save", "`Trainer.save_checkpoint(wait=True)`"),
    "resume": Walk("a resume", "`Trainer.load_checkpoint()`"),
    "text": Walk("raw text to a sample", "`Trainer.build_loader()`, up to the first micro-batch"),
    "weights": Walk("a Hugging Face folder to sharded weights", "`load_initial_weights()`"),
    "config": Walk("a configuration value", "`load_config()` and `check_config()`"),
}


@contextmanager
def walk(name: str, files: dict[str, list[str]]) -> Iterator[None]:
    """Add to `files`, under `name`, the files that this thread and threads started in the block enter during it."""
    found: dict[str, None] = {}
    importing = threading.local()

    def record_file(frame: FrameType, event: str, argument: Any) -> None:
        depth = getattr(importing, "depth", 0)
        if frame.f_code.co_name == "<module>" and event in ("call", "return"):
            importing.depth = max(0, depth + (1 if event == "call" else -1))
        elif event == "call" and depth == 0:
            found.setdefault(frame.f_code.co_filename)

    threading.setprofile(record_file)
    sys.setprofile(record_file)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    inside = [Path(file).relative_to(SOURCE).as_posix() for file in list(found) if Path(file).is_relative_to(SOURCE)]
    files[name] = [file for file in inside if file not in EXCLUDED]


def traced(name: str, function: Callable[..., Any], files: dict[str, list[str]]) -> Callable[..., Any]:
    """Return `function` with each call traced as the walk `name`."""

    def call(*arguments: Any) -> Any:
        with walk(name, files):
            return function(*arguments)

    return call


def trace_walks(folder: Path) -> dict[str, list[str]]:
    """Train, save, resume and import weights on this rank; return the files of each walk."""
    import torch

    from tests.helpers.tiny import tiny_config
    from trainer import Trainer, load_config
    from trainer import trainer as assembly
    from trainer.config import check_config
    from trainer.export import export_checkpoint

    files: dict[str, list[str]] = {}
    rank = int(os.environ["RANK"])
    overrides = ["fsdp.prefetch_forward=2", "run.selfcheck=false", "log.sample_tokens=0"]
    with walk("config", files):
        check_config(load_config("llama_small", overrides), 2, 2)

    def config(name: str, *own: str) -> Any:
        text = ["data.source=tokens", f"data.path={folder / 'words.txt'}", f"data.cache_dir={folder / f'cache{rank}'}"]
        sizes = ["model.vocab_size=257", "mesh.shard=2", "train.micro_batch_size=1"]
        saving = ["checkpoint.every=0", "eval.every=0"]
        return tiny_config(folder / name, *overrides, *text, *sizes, *saving, *own)

    world = SimpleNamespace(rank=rank, size=2, device=torch.device("cpu"))
    unbuilt = SimpleNamespace(config=config("run"), world=world)
    with walk("text", files):
        next(iter(Trainer.build_loader(unbuilt)))
    trainer = Trainer(config("run"))
    with mock.patch.object(Trainer, "train_step", traced("step", Trainer.train_step, files)):
        next(trainer.steps())
    with walk("save", files):
        saved = trainer.save_checkpoint(wait=True)
    trainer.close()
    trainer = Trainer(config("run"))
    with walk("resume", files):
        assert trainer.load_checkpoint() == 1
    trainer.close()

    exported = folder / f"exported{rank}"
    export_checkpoint(saved, exported)
    load = traced("weights", assembly.load_initial_weights, files)
    with mock.patch.object(assembly, "load_initial_weights", load):
        trainer = Trainer(config("tuned", f"train.init_from={exported}"))
        trainer.load_checkpoint()
    trainer.close()
    return files


def count_files() -> dict[str, list[str]]:
    """Return the files of each walk, of rank 0 of a run on two ranks."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as listener:
        folder = Path(name)
        (folder / "words.txt").write_text("".join(f"line {number} of a text\n" for number in range(2000)))
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.close()
        group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = []
        for rank in range(2):
            env = os.environ | group | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "tests.walks", "--rank", name]
            ranks.append(subprocess.Popen(command, env=env, cwd=REPOSITORY, stdout=subprocess.DEVNULL))
        if sum([abs(process.wait()) for process in ranks]):  # all of them are waited for
            sys.exit("a rank failed")
        return json.loads((folder / "walks0.json").read_text())


def table(files: dict[str, list[str]]) -> str:
    """Return the number of files of each walk, in Markdown."""
    rows = [f"| {one.title} | {one.entry} | {len(files[name])} |" for name, one in WALKS.items()]
    return "\n".join(["| path | from the call of | files |", "|---|---|---|", *rows])


def with_table(page: str, files: dict[str, list[str]]) -> str:
    """Return the page with the table between the markers."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    assert pattern.search(page), f"{PAGE} has no markers"
    return pattern.sub(lambda _: f"{BEGIN}\n\n{table(files)}\n\n{END}", page)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table into docs/architecture.md")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank is not None:
        files = trace_walks(chosen.rank)
        (chosen.rank / f"walks{os.environ['RANK']}.json").write_text(json.dumps(files))
        sys.stdout.flush()
        os._exit(0)  # a device mesh that is still alive may abort the interpreter's exit
    files = count_files()
    for name, one in WALKS.items():
        print(f"{one.title}: {len(files[name])} files, from the call of {one.entry}")
        for number, file in enumerate(files[name], start=1):
            print(f"  {number:2} {file}")
    if chosen.write:
        PAGE.write_text(with_table(PAGE.read_text(), files))


if __name__ == "__main__":
    main()
