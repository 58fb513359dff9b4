"""Models by name: fetched from a hub on this machine, pinned, resumed, and rejected with one message."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import hf_models
from tests.helpers.commands import meshtrainer
from tests.helpers.fake_hub import FakeHub
from tests.helpers.gate import wait_until
from tests.helpers.launch import TINY, fork, run
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
    monkeypatch.setenv("HF_HOME", str(tmp_path / "elsewhere"))
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


def test_a_cut_connection_and_a_damaged_partial_file_are_mended(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    part = min(folder.glob("*.safetensors"))
    content = part.read_bytes()
    blobs = tmp_path / "home/hub/models--tiny--llama/blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(content).hexdigest()}.part").write_bytes(b"\0" * 1000)
    hub.breaks_after = len(content) - 1000
    found = Path(str(config_of().train.init_from))
    assert (found / part.name).read_bytes() == content
    assert not list(blobs.glob("*.part"))


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


def fetch(name: str) -> int:
    load_config("llama_small", ["model.name=auto", f"model.path={name}"])
    return 0


@pytest.mark.campaign
def test_killed_ten_times_on_the_way(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    """A large file is fetched by two processes that are killed again and again; each byte is sent about once."""
    content = random.Random(0).randbytes(6 << 20)
    hub.add("big/file", {"config.json": (folder / "config.json").read_bytes(), "model.safetensors": content})
    hub.delay = 0.01
    blobs = tmp_path / "home/hub/models--big--file/blobs"

    def received() -> int:
        return sum(path.stat().st_size for path in blobs.glob("*.part"))

    for _ in range(10):
        before = received()
        both = [fork(fetch, ["big/file"], tmp_path, cwd=tmp_path) for _ in range(2)]
        wait_until(lambda before=before: received() >= before + (1 << 18), "more of the file")
        for each in both:
            each.kill()
    hub.delay = 0.0
    with pytest.raises(UserError):  # these bytes are no weights, which is found when all of them are there
        config_of("big/file")
    (blob,) = (path for path in blobs.iterdir() if path.stat().st_size == len(content))
    assert blob.read_bytes() == content
    lost = hub.sent["model.safetensors"] - len(content)
    # Sockets hold up to some 100 KB that are on their way when a process dies. From the last start, it would be 256 KB.
    assert 0 <= lost < 10 * (1 << 17)
