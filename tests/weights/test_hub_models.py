"""Models by name: fetched from a hub on this machine, pinned, resumed, and rejected with one message."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.fake_hub import FakeHub
from tests.helpers.forked import REPOSITORY
from tests.helpers.ranks import TINY
from trainer import hub
from trainer.config import RunConfig, compare_configs, load_config
from trainer.errors import UserError

pytest.importorskip("huggingface_hub")

NAME = "tiny/llama"
SETTINGS = [
    *(item for item in TINY if not item.startswith("model.")),
    *("train.steps=2", "checkpoint.every=1", "data.source=synthetic", "run.name=r"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in Hugging Face's format, in two files of weights."""
    from safetensors.torch import load_file, save_file

    from tests.helpers.hf_models import folder_of

    path = folder_of(tmp_path_factory.mktemp("model") / "m", "llama")
    (path / "tokenizer_config.json").unlink()
    (path / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for part, held in parts.items():
        save_file({name: tensors[name] for name in held}, path / part, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: part for part, held in parts.items() for name in held}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "model.safetensors").unlink()
    return path


@pytest.fixture
def fake(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with the model, which this process and those that it starts use; they work in `tmp_path`."""
    with FakeHub() as found:
        found.add_folder(NAME, folder)
        for name, value in found.environment(tmp_path / "home", XDG_CACHE_HOME=str(tmp_path / "cache")).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # read from the environment once
        monkeypatch.chdir(tmp_path)
        yield found


def run(*arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainer.run", "recipe=llama_small", "model.name=auto", *SETTINGS, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout_s)


def config_of(name: str = NAME, *more: str) -> object:
    return load_config("llama_small", ["model.name=auto", f"model.path={name}", *more])


def weight_bytes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}


@pytest.mark.slow
def test_first_use_then_offline_then_moved(fake: FakeHub, folder: Path) -> None:
    """The bytes come once for two ranks; the run resumes offline, and with its commit when the branch has moved."""
    ran = run(f"model.path={NAME}", "nproc=2")
    assert ran.returncode == 0, ran.stderr
    commit = fake.repositories["model", NAME].refs["main"]
    assert {name: fake.sent[name] for name in weight_bytes(folder)} == weight_bytes(folder)
    assert f"hf://{NAME}@{commit}" in ran.stdout + ran.stderr  # the start block says where the weights are from
    stored = Path("runs/r/config.yaml").read_text()
    assert f"init_from: hf://{NAME}@{commit}\n" in stored
    (checkpoint,) = Path("runs/r/checkpoints").glob("step_00000002")
    assert f"init_from: hf://{NAME}@{commit}\n" in (checkpoint / "config.yaml").read_text()

    os.environ["HF_HUB_OFFLINE"] = "1"
    asked = len(fake.requests)
    ran = run(f"model.path={NAME}", "train.steps=3")
    assert ran.returncode == 0, ran.stderr
    assert "resumed" in ran.stdout + ran.stderr
    assert len(fake.requests) == asked

    os.environ["HF_HUB_OFFLINE"] = "0"
    files = {**fake.repositories["model", NAME].commits[commit], "README.md": b"moved"}
    moved = fake.add(NAME, files)
    ran = run(f"model.path={NAME}", "train.steps=4")
    assert ran.returncode == 0, ran.stderr
    assert f"this run stays with commit {commit[:12]}" in ran.stderr
    assert f"init_from: hf://{NAME}@{commit}\n" in Path("runs/r/config.yaml").read_text()
    assert f"hf://{NAME}@{moved}" in config_of(NAME, "run.name=other").to_yaml()  # another run begins with the new one


def test_a_pinned_configuration_means_the_same_elsewhere(fake: FakeHub, tmp_path: Path) -> None:
    """The stored name is fetched again into another cache; a name that is there asks nobody."""
    text = config_of().to_yaml()
    Path("mine.yaml").write_text(text)
    os.environ["HF_HOME"] = str(tmp_path / "elsewhere")
    again = load_config("mine.yaml")
    assert again.to_yaml() == text.replace("name: llama_small", "name: llama_small")
    assert str(again.train.init_from).startswith(str(tmp_path / "elsewhere"))
    asked = len(fake.requests)
    assert load_config("mine.yaml") == again
    assert len(fake.requests) == asked


def test_each_revision_of_a_model_stays_with_its_own_commit(fake: FakeHub) -> None:
    """The run does not store `model.path`, but what follows from it."""
    repository = fake.repositories["model", NAME]
    files = repository.commits[repository.refs["main"]]
    commits = {"main": repository.refs["main"], "v2": repository.commit({**files, "README.md": b"2"}, "v2")}

    def load(*more: str) -> RunConfig:
        own = ["train.objective=distill", f"model.path={NAME}", f"objective.teacher={NAME}@v2", "run.name=r", *more]
        return load_config("distill", own)

    config = load()
    text = config.to_yaml()
    found = dict(re.findall(r"(\w+): hf://tiny/llama@(\w+)", text))
    assert found == {"init_from": commits["main"], "tokenizer": commits["main"], "teacher": commits["v2"]}
    Path("runs/r").mkdir(parents=True)
    Path("runs/r/config.yaml").write_text(text)
    for revision in commits:
        repository.commit({**files, "README.md": f"moved {revision}".encode()}, revision)
    assert load().to_yaml() == text
    assert load("checkpoint.resume=none").to_yaml() != text
    older = text.replace(f"hf://{NAME}@{commits['v2']}", config.objective.teacher)  # a path in the cache
    Path("runs/r/config.yaml").write_text(older)
    assert load().to_yaml() == text != older
    assert compare_configs(load(), older) == ([], [])


def test_a_plan_fetches_no_weights(fake: FakeHub, folder: Path) -> None:
    config = load_config("llama_small", ["model.name=auto", f"model.path={NAME}"], needs_weights=False)
    assert config.model.dim == 48
    assert not any(fake.sent[name] for name in weight_bytes(folder))
    assert config.train.init_from is not None, "weights that exist are not taken for random ones"


MESSAGES = {
    "tiny/missing": r"model\.path=tiny/missing: \S+ has no model tiny/missing, or you have no access to it\n  to fix",
    "tiny/gated": r"model\.path=tiny/gated: is gated: .*\n  to fix: ask for access at \S+/tiny/gated, and log in",
    "tiny/llama@v9": r"model\.path=tiny/llama@v9: model tiny/llama has no revision v9\n  to fix: see",
    "tiny/pickled": r"model\.path=tiny/pickled: has no safetensors, only pytorch_model\.bin: pickle files are not read",
    "tiny/ggufs": r"model\.path=tiny/ggufs: has only GGUF weights\n  for example: \S+tiny/ggufs/q4\.gguf",
    "hf://datasets/tiny/llama": r"model\.path=hf://datasets/tiny/llama: names a data set, not a model",
}


@pytest.mark.parametrize("name", list(MESSAGES))
def test_a_name_that_cannot_be_had_is_one_message(fake: FakeHub, name: str) -> None:
    fake.add("tiny/gated", {"config.json": b"{}"}, is_gated=True)
    fake.add("tiny/pickled", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    fake.add("tiny/ggufs", {"q4.gguf": b"x", "q8.gguf": b"x"})
    with pytest.raises(UserError) as found:
        config_of(name)
    assert re.match(MESSAGES[name], str(found.value)), found.value


@pytest.mark.slow
def test_a_wrong_name_ends_with_2_and_one_message(fake: FakeHub) -> None:
    ran = run("model.path=tiny/lama")
    assert ran.returncode == 2
    assert ran.stderr.startswith("error: model.path=tiny/lama: ")
    assert ran.stderr.count("\n") == 2
    assert not Path("runs").exists()


def test_a_gated_model_with_access(fake: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.add_folder("tiny/gated", folder, is_gated=True)
    monkeypatch.setenv("HF_TOKEN", fake.token)
    assert config_of("tiny/gated").model.dim == 48
    assert fake.token not in config_of("tiny/gated").to_yaml()


def test_offline_without_a_copy_and_a_server_that_is_down(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"is not in the cache, \S+, and HF_HUB_OFFLINE is set\n  to fix: unset it"):
        config_of()
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(hub, "_sleep", lambda seconds: None)
    fake.is_down = True
    with pytest.raises(UserError, match=r"cannot be reached \(the server says 503\)\n  to fix: try again"):
        config_of()
    fake.is_down = False
    first = config_of().to_yaml()
    fake.is_down = True
    assert config_of().to_yaml() == first  # the copy in the cache is used, and a line says so
    assert "the server says 503; using commit" in capsys.readouterr().err


def test_a_cut_connection_and_damage_are_mended(
    fake: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A broken connection resumes at the byte where it broke.  A partial file that is damaged is fetched again."""
    part = next(iter(weight_bytes(folder)))
    content = (folder / part).read_bytes()
    blobs = tmp_path / "home/hub/models--tiny--llama/blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(content).hexdigest()}.part").write_bytes(b"\0" * 1000)
    fake.breaks_after = 1 << 15
    monkeypatch.setattr(hub, "_sleep", lambda seconds: None)
    found = Path(str(config_of().train.init_from))
    assert (found / part).read_bytes() == content
    assert not list(blobs.glob("*.part"))


def test_another_programs_download_is_used_offline(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    huggingface_hub.snapshot_download(NAME, endpoint=fake.url, cache_dir=hub.cache_folder())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = len(fake.requests)
    assert config_of().model.dim == 48
    assert len(fake.requests) == asked


def test_a_folder_here_comes_before_a_name_there(fake: FakeHub, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny").symlink_to(folder.parent)
    with pytest.raises(UserError, match=r"config\.json: cannot be read"):
        config_of("tiny/llama")  # there is a folder `tiny`: it was meant to be in there
    assert config_of("tiny/m").train.init_from == str(tmp_path / "tiny/m")
    assert fake.requests == []


@pytest.mark.campaign
@pytest.mark.slow
def test_killed_ten_times_on_the_way(fake: FakeHub, folder: Path, tmp_path: Path) -> None:
    """A large file is fetched by two processes that are killed again and again; each byte is sent about once."""
    content = random.Random(0).randbytes(6 << 20)
    fake.add("big/file", {"config.json": b"{}", "model.safetensors": content})
    script = (
        "from trainer import hub\n"
        "found = hub.fetch_model(hub.parse_name('big/file'), 'model.path', None, True)\nprint(found, flush=True)"
    )
    fake.delay = 0.01
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    blobs = tmp_path / "home/hub/models--big--file/blobs"

    def received() -> int:
        return sum(path.stat().st_size for path in blobs.glob("*.part"))

    for _ in range(10):
        before = received()
        both = [subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) for _ in range(2)]
        until = time.monotonic() + 60
        while received() < before + (1 << 18) and time.monotonic() < until:
            time.sleep(0.01)
        for each in both:
            each.send_signal(signal.SIGKILL)
            each.wait()
        assert received() > before
    fake.delay = 0.0
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert (Path(done.stdout.strip()) / "model.safetensors").read_bytes() == content
    lost = fake.sent["model.safetensors"] - len(content)
    assert 0 <= lost < 10 * (1 << 16), "what was on its way when a process died is sent again, and nothing else"
