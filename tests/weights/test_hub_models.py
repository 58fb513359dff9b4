"""Models by name: fetched from a hub on this machine, pinned, resumed, and rejected with one message."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import hf_models
from tests.helpers.commands import meshtrainer
from tests.helpers.fake_hub import FakeHub
from tests.helpers.gate import wait_until
from tests.helpers.launch import TINY, fork, launch, run, start
from trainer import RunConfig, UserError, load_config

pytest.importorskip("huggingface_hub")

NAME = "tiny/llama"
SETTINGS = [
    *(item for item in TINY if not item.startswith("model.")),
    *("recipe=llama_small", "model.name=auto", f"model.path={NAME}", "checkpoint.every=1", "data.source=synthetic"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in Hugging Face's format, in two files of weights."""
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("model") / "m"
    hf_models.model_of("llama").save_pretrained(path, max_shard_size="250KB")
    (path / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    assert len(list(path.glob("*.safetensors"))) == 2
    return path


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with the model, which this process and those that it starts use; they work in `tmp_path`."""
    with FakeHub() as found:
        found.add_folder(NAME, folder)
        for name, value in found.environment(tmp_path / "home", XDG_CACHE_HOME=str(tmp_path / "cache")).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # read from the environment once
        monkeypatch.chdir(tmp_path)
        yield found


def config_of(name: str = NAME, *more: str) -> RunConfig:
    return load_config("llama_small", ["model.name=auto", f"model.path={name}", *more])


@pytest.mark.slow
def test_first_use_then_offline_then_moved(
    hub: FakeHub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes come once for two ranks; the run resumes offline, and with its commit when the branch has moved."""
    run(tmp_path / "run", *SETTINGS, "train.steps=1", "nproc=2")
    repository = hub.repositories["model", NAME]
    commit = repository.refs["main"]
    for path in folder.glob("*.safetensors"):
        assert hub.sent[path.name] == path.stat().st_size
    stored = f"init_from: hf://{NAME}@{commit}\n"
    assert stored in (tmp_path / "run/config.yaml").read_text()
    assert stored in (tmp_path / "run/checkpoints/step_00000001/config.yaml").read_text()

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = len(hub.requests)
    again = run(tmp_path / "run", *SETTINGS, "train.steps=2")
    assert again.of_kind("start")[-1]["resumed_step"] == 1
    assert len(hub.requests) == asked

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    moved = hub.add(NAME, {**repository.commits[commit], "README.md": b"moved"})
    assert stored in config_of(NAME, f"run.dir={tmp_path / 'run'}").to_yaml(), "the run stays with its commit"
    assert f"hf://{NAME}@{moved}" in config_of(NAME, "run.name=other").to_yaml(), "another run begins with the new one"


def test_a_pinned_configuration_means_the_same_elsewhere(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stored name is fetched again into another cache; a name that is there asks nobody."""
    text = config_of().to_yaml()
    (tmp_path / "mine.yaml").write_text(text)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    again = load_config("mine.yaml")
    assert again.to_yaml() == text
    assert str(again.train.init_from).startswith(str(tmp_path / "elsewhere"))
    asked = len(hub.requests)
    assert load_config("mine.yaml") == again
    assert len(hub.requests) == asked


def test_each_revision_of_a_model_stays_with_its_own_commit(hub: FakeHub, tmp_path: Path) -> None:
    """The run does not store `model.path`, but what follows from it."""
    repository = hub.repositories["model", NAME]
    files = repository.commits[repository.refs["main"]]
    commits = {"main": repository.refs["main"], "v2": repository.commit({**files, "README.md": b"2"}, "v2")}

    def load(*more: str) -> str:
        own = ["train.objective=distill", f"model.path={NAME}", f"objective.teacher={NAME}@v2", "run.name=r", *more]
        return load_config("distill", own).to_yaml()

    text = load()
    found = dict(re.findall(r"(\w+): hf://tiny/llama@(\w+)", text))
    assert (found["init_from"], found["teacher"]) == (commits["main"], commits["v2"])
    (tmp_path / "runs/r").mkdir(parents=True)
    (tmp_path / "runs/r/config.yaml").write_text(text)
    for revision in commits:
        repository.commit({**files, "README.md": f"moved {revision}".encode()}, revision)
    assert load() == text
    assert load("checkpoint.resume=none") != text


@pytest.mark.slow
def test_a_plan_fetches_no_weights(hub: FakeHub, folder: Path) -> None:
    planned = meshtrainer(
        "plan", "recipe=llama_small", "model.name=auto", f"model.path={NAME}", "device=cpu", "data.seq_len=64"
    )
    assert planned.code == 0, planned.err
    assert not any(hub.sent[path.name] for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("tiny/missing", "tiny/missing"),
        ("tiny/gated", "/tiny/gated"),
        ("tiny/llama@v9", "v9"),
        ("tiny/pickled", "pytorch_model.bin"),
        ("tiny/ggufs", "tiny/ggufs/q4.gguf"),
        ("hf://datasets/tiny/llama", "datasets/tiny/llama"),
    ],
)
def test_a_name_that_cannot_be_had_is_one_message(hub: FakeHub, name: str, named: str) -> None:
    hub.add("tiny/gated", {"config.json": b"{}"}, is_gated=True)
    hub.add("tiny/pickled", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    hub.add("tiny/ggufs", {"q4.gguf": b"x", "q8.gguf": b"x"})
    with pytest.raises(UserError) as found:
        config_of(name)
    assert str(found.value).startswith(f"model.path={name}: ")
    assert named in str(found.value).removeprefix(f"model.path={name}: ")


def test_a_gated_model_with_access(hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add_folder("tiny/gated", folder, is_gated=True)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    config = config_of("tiny/gated")
    assert config.model.dim == 48
    assert hub.token not in config.to_yaml()


def test_without_a_server_the_copy_in_the_cache_is_used(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HF_HUB_OFFLINE", "1"), ("HF_HUB_OFFLINE", "0")):
        monkeypatch.setenv(name, value)
        hub.is_down = value == "0"
        with pytest.raises(UserError, match=f"^model.path={NAME}: "):
            config_of()
    hub.is_down = False
    first = config_of().to_yaml()
    hub.is_down = True
    assert config_of().to_yaml() == first


def test_a_cut_connection_and_damaged_files_are_mended(hub: FakeHub, folder: Path) -> None:
    part = min(folder.glob("*.safetensors"))
    hub.breaks_after, hub.num_damaged = part.stat().st_size - 1000, 2
    found = Path(str(config_of().train.init_from))
    assert {path.name: path.read_bytes() for path in found.iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }


def test_a_file_that_always_arrives_damaged_is_one_message(hub: FakeHub, tmp_path: Path) -> None:
    hub.num_damaged = 1000
    with pytest.raises(UserError, match=f"^model.path={NAME}: .*damaged") as found:
        config_of()
    assert len(str(found.value).splitlines()) == 2
    snapshots = tmp_path / "home/hub"  # the error does not wait for threads that check another file
    wait_until(lambda: not any(path.exists() for path in snapshots.rglob("snapshots/*/*")), "no damaged file is left")


def test_another_programs_download_is_used_offline(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    huggingface_hub.snapshot_download(NAME, endpoint=hub.url, cache_dir=tmp_path / "home/hub")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = len(hub.requests)
    assert config_of().model.dim == 48
    assert len(hub.requests) == asked


def test_a_folder_here_comes_before_a_name_there(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny").symlink_to(folder.parent)
    assert config_of("tiny/m").train.init_from == str(tmp_path / "tiny/m")
    with pytest.raises(UserError, match=f"^model.path={tmp_path}/tiny/llama: "):
        config_of("tiny/llama")  # there is a folder `tiny`: it was meant to be in there
    assert hub.requests == []


@pytest.mark.slow
def test_a_signal_ends_a_download_and_the_next_start_continues(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    """Within five seconds, with code 75 and without a file that looks complete but is not."""
    hub.delay = 1.5  # so that a file of weights takes longer than that
    stopped = start(tmp_path / "run", *SETTINGS, "train.steps=1")
    wait_until(lambda: hub.sent["model-00001-of-00002.safetensors"] > 0, "the weights are on their way")
    stopped.signal(signal.SIGTERM)
    began = time.monotonic()
    assert stopped.wait().code == 75, stopped.err
    assert time.monotonic() - began < 5
    assert "Traceback" not in stopped.err
    assert not list((tmp_path / "home/hub").rglob("snapshots/*/*.safetensors"))
    hub.delay = 0.0
    sent = hub.sent["config.json"]
    run(tmp_path / "run", *SETTINGS, "train.steps=1")
    assert hub.sent["config.json"] == sent


@pytest.mark.slow
def test_a_signal_ends_the_download_of_any_command(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    """It does not wait until the library has finished a file."""
    hub.delay = 10.0
    stopped = launch([sys.executable, "-m", "trainer.generate", "tiny/llama", "--prompt", "x"], tmp_path)
    wait_until(lambda: hub.sent["model-00001-of-00002.safetensors"] > 0, "the weights are on their way")
    stopped.signal(signal.SIGTERM)
    began = time.monotonic()
    assert stopped.wait().code == 128 + signal.SIGTERM, stopped.err
    assert time.monotonic() - began < 5
    assert not list((tmp_path / "home/hub").rglob("snapshots/*/*.safetensors"))


def fetch(name: str) -> int:
    load_config("llama_small", ["model.name=auto", f"model.path={name}"])
    return 0


@pytest.mark.campaign
def test_killed_ten_times_on_the_way(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    """Four processes together fetch each file once, also after four others were killed in the middle."""
    for _ in range(10):
        hub.delay, before = 0.2, hub.sent["model-00001-of-00002.safetensors"]
        killed = [fork(fetch, [NAME], tmp_path, cwd=tmp_path) for _ in range(4)]
        wait_until(
            lambda before=before: hub.sent["model-00001-of-00002.safetensors"] >= before + (1 << 16), "some of the file"
        )
        for each in killed:
            each.kill()
    hub.delay = 0.0
    hub.requests.clear()
    assert [each.wait().code for each in [fork(fetch, [NAME], tmp_path, cwd=tmp_path) for _ in range(4)]] == [0] * 4
    (found,) = (tmp_path / "home/hub/models--tiny--llama/snapshots").iterdir()
    for path in folder.iterdir():
        assert (found / path.name).read_bytes() == path.read_bytes()
    sent = Counter(line.rpartition("/")[2] for line in hub.requests if line.startswith("GET") and "/resolve/" in line)
    assert set(sent.values()) == {1}
    assert "model-00001-of-00002.safetensors" in sent
