"""Remote shards and text: the same samples as from local files despite connection problems, with bounded disk space."""

from __future__ import annotations

import email.message
import itertools
import math
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from tests.data.test_data import write_shards
from tests.data.test_ingest import texts_of
from tests.helpers.faults import start as start_faulty
from tests.helpers.gate import wait_until
from tests.helpers.ranks import run_tiny, tiny_overrides
from tests.lifecycle.test_lifecycle import Ranks
from trainer.config import DataSection
from trainer.data.loader import TrainLoader
from trainer.data.mixture import MixedSource
from trainer.data.opening import find_shards, open_source
from trainer.data.remote import transport
from trainer.data.shards import Shard, ShardManifest, manifest_rows
from trainer.data.source import Source, SyntheticSource, sample_content
from trainer.distributed.channel import StepSync
from trainer.errors import UserError
from trainer.lifecycle import lifecycle
from trainer.prepare import prepare

SIZES = range(300, 700, 50)
"""Tokens of the shards: eight of them."""


class UnreliableHandler(SimpleHTTPRequestHandler):
    """A web server that fails for names in `trouble`: for each name a list of failures, one per request."""

    trouble: dict[str, list[str]]
    asked: Counter[str]
    gate: threading.Event
    on_request: Any

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        self.asked[name] += 1
        self.on_request(name)
        left = self.trouble.get(name, [])
        how = left.pop(0) if left else "whole"
        if how == "503":
            self.send_error(503)
            return
        if how == "whole":
            super().do_GET()
            return
        content = Path(self.translate_path(self.path)).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if how == "other bytes":
            self.wfile.write(content[:-1] + bytes([content[-1] ^ 1]))
            return
        self.wfile.write(content[: len(content) // 2])
        self.wfile.flush()
        if how == "stalls":
            self.gate.wait()
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


class Server:
    def __init__(self, folder: Path) -> None:
        self.trouble: dict[str, list[str]] = {}
        self.asked: Counter[str] = Counter()
        self.gate = threading.Event()
        self.on_request: Any = lambda _: None
        shared = {name: getattr(self, name) for name in ("trouble", "asked", "gate")}
        handler = type("Handler", (UnreliableHandler,), shared)
        handler.on_request = lambda _, name: self.on_request(name)  # type: ignore[attr-defined]
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a reader that goes away
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.gate.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of shards and their manifest."""
    rng = np.random.default_rng(0)
    inside = tmp_path / "there"
    inside.mkdir()
    write_shards(inside, *([rng.bytes(size // 3), rng.bytes(size - size // 3)] for size in SIZES))
    shards = [Shard(path) for path in sorted(inside.glob("*.bin"))]
    ShardManifest(
        *shards[0].info.shared_properties,
        train=manifest_rows(shards, inside),
        held_out=[],
        train_content=sample_content(shards),
    ).write(inside / "manifest.json")
    return inside


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(transport, "MAX_PAUSE_S", 0.0)
    found = Server(folder)
    yield found
    found.close()


def opened(tmp_path: Path, path: object, **more: Any) -> Source:
    data = DataSection(
        source="tokens",
        path=path if isinstance(path, dict) else str(path),
        seq_len=16,
        cache_dir=str(tmp_path / "cache"),
        **more,  # type: ignore[arg-type]
    )
    return open_source(data, 257, "train")


def batches(source: Source, count: int, rank: int = 0, num_ranks: int = 1) -> list[dict[str, Any]]:
    loader = TrainLoader(source, seed=3, global_batch_size=8, micro_batch_size=2, dp_rank=rank, num_dp_ranks=num_ranks)
    found = list(islice(loader, count))
    loader.close()
    return found


def same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    return all(a.keys() == b.keys() and all((a[k] == b[k]).all() for k in a) for a, b in zip(one, other, strict=True))


def kept(tmp_path: Path) -> int:
    """Return how many bytes of shards are in the cache."""
    return sum(path.stat().st_size for path in (tmp_path / "cache" / "shards").iterdir())


# A test that waits for samples does so as long as they take: these are all events.


@pytest.mark.parametrize("documents", ["joined", "masked"])
def test_stalling_and_dropping_connection_changes_nothing(
    tmp_path: Path, folder: Path, server: Server, documents: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has space for half of the data, and never exceeds it."""
    monkeypatch.setattr(transport, "STALL_S", 1.0)  # a busy machine takes more than 0.2 s to answer
    names = sorted(path.name for path in folder.glob("*.bin"))
    server.trouble.update(
        {names[0]: ["drops", "503"], names[1]: ["stalls"], names[2]: ["other bytes"], "manifest.json": ["503"]}
    )
    half = sum(path.stat().st_size for suffix in ("bin", "idx") for path in folder.glob(f"*.{suffix}")) // 2
    most: list[int] = []
    server.on_request = lambda name: most.append(kept(tmp_path) if name.endswith(".bin") else 0)
    there = opened(tmp_path, server.url, cache_gib=half / 2**30, documents=documents)
    here = opened(tmp_path, folder, documents=documents)
    assert there.fingerprint == here.fingerprint
    assert same(batches(there, 100), batches(here, 100))
    assert max(most) <= half
    assert kept(tmp_path) <= half
    assert {len(each) for each in server.trouble.values()} == {0}
    said = capsys.readouterr().err
    for word in ("connection was lost after", "stalled", "checksum", "503"):
        assert word in said
    assert sum(server.asked[name] for name in names) > 2 * len(names)  # or there was room for all


def test_each_shard_is_downloaded_once_per_machine_and_in_advance(tmp_path: Path, folder: Path, server: Server) -> None:
    sources = [opened(tmp_path, server.url) for _ in range(2)]
    for source in sources:
        for shard in source.shards:  # type: ignore[attr-defined]
            object.__setattr__(shard, "cache_settings", _OwnCache(shard.cache_settings.folder, id(source)))
    here = opened(tmp_path, folder)
    found: dict[int, bool] = {}

    def read(rank: int) -> None:
        found[rank] = same(batches(sources[rank], 40, rank, 2), batches(here, 40, rank, 2))

    threads = [threading.Thread(target=read, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: True, 1: True}
    assert {count for name, count in server.asked.items() if name.endswith(".bin")} == {1}


class _OwnCache:
    """As if of another process: no lock of this one's is shared."""

    caches: dict[int, Any] = {}

    def __init__(self, folder: Path, owner: int) -> None:
        from trainer.data.remote.cache import RemoteFileCache

        self.cache = self.caches.setdefault(owner, RemoteFileCache(folder, None))


def test_next_shards_are_prefetched(tmp_path: Path, server: Server) -> None:
    source = opened(tmp_path, server.url)
    loader = TrainLoader(source, seed=3, global_batch_size=1, micro_batch_size=1)
    steps, own = iter(loader.next_samples(all_ranks=True)[None]), slice(0, 1)
    asked = threading.Event()
    server.on_request = lambda name: asked.set() if name.endswith(".bin") else None
    indices = source.follow(itertools.repeat(np.array([0])), steps, own)
    next(indices)
    assert asked.wait(60)  # though nothing has been read
    indices.close()  # type: ignore[attr-defined]


def test_partial_download_of_a_killed_process_is_not_used(tmp_path: Path, folder: Path, server: Server) -> None:
    source = opened(tmp_path, server.url, cache_gib=1)
    inside = tmp_path / "cache" / "shards"
    for shard in source.shards:  # type: ignore[attr-defined]
        (inside / f".{shard.tokens.name}.part").write_bytes(b"the beginning")
    (inside / ".of-another-99.bin.part").write_bytes(b"what none wants any more")
    assert same(batches(source, 60), batches(opened(tmp_path, folder), 60))
    assert not list(inside.glob("*.part"))


@pytest.mark.parametrize("path", ["", "/manifest.json", "/text-*.bin"])
@pytest.mark.parametrize("kind", ["http", "memory"])
def test_every_way_to_name_shards(tmp_path: Path, folder: Path, server: Server, kind: str, path: str) -> None:
    url = server.url
    if kind == "memory":
        url = f"memory://{tmp_path.name}"
        fsspec.filesystem("memory").put(f"{folder}/", f"/{tmp_path.name}/", recursive=True)
    if path == "" and kind == "memory":
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}/manifest.json")
    there, here = opened(tmp_path, url + path), opened(tmp_path, f"file://{folder}")
    assert there.fingerprint == here.fingerprint
    places = np.arange(len(here))
    assert np.array_equal(there.batch(places)[0], here.batch(places)[0])  # type: ignore[index]


def test_mixture_of_local_and_remote_sources(tmp_path: Path, folder: Path, server: Server) -> None:
    there = opened(tmp_path, {"a": server.url, "b": str(folder)})
    here = opened(tmp_path, {"a": str(folder), "b": str(folder)})
    assert isinstance(there, MixedSource)
    assert same(batches(there, 60), batches(here, 60))


def test_mistakes(tmp_path: Path, folder: Path, server: Server) -> None:
    def refused(path: str, words: str, **more: Any) -> None:
        with pytest.raises(UserError, match=words):
            opened(tmp_path, path, **more)

    refused(f"{server.url}/absent.json", "404")
    refused(f"{server.url}/absent-*.bin", "contains neither token shards .* nor text")
    refused(f"{server.url}/absent.jsonl", "404")
    name = min(path.name for path in folder.glob("*.bin"))
    refused(f"{server.url}/{name.replace('.bin', '.json')}", f"did you mean data.path=.*{name}")
    refused(server.url, "data.cache_gib=1e-09: must hold the largest shard\n  nearest legal", cache_gib=1e-9)
    refused("nowhere://x/y.bin", "nowhere")
    port = server.url.rpartition(":")[2]
    server.close()
    refused(f"http://127.0.0.1:{port}/{name}", "refused")


RECORDS = '[{"text": "one"}, {"text": "two"}]'
ONLY_COMPRESSED = r"uncompressed \.json file cannot be read from a URL"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (
            "a.json",
            rf"{ONLY_COMPRESSED}, .*\n  to fix: download it and give its path, or give it as .jsonl or .json.gz",
        ),
        ("*.json", ONLY_COMPRESSED),
        ("b.bin", r"a token file cannot be read from a URL here\n  to fix: download it .* and give its path"),
        ("sub", r"there is no text\n  to fix: give files that end in \.txt, \.md, \.jsonl, \.csv, .*\.json\.gz"),
        ("c.xls", r"404.*; it was read as a folder, because its name does not end in \.txt"),
    ],
)
def test_files_that_prepare_cannot_read_from_a_url(path: str, words: str, tmp_path: Path) -> None:
    with serving_other_files(tmp_path / "served") as url, pytest.raises(UserError, match=words) as raised:
        prepare([f"{url}/{path}"], str(tmp_path / "out" / "text"))
    assert str(raised.value).startswith(f"INPUT={url}/{path}: ")
    assert ".bin" not in str(raised.value) or path == "b.bin", "it is accepted in local files only"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("a.json", ONLY_COMPRESSED),
        ("settings.json", "is neither a manifest of token shards nor a file of documents"),
        ("*.json", r"contains neither token shards .*\n  to fix: give files that end in \.txt, \.md, \.jsonl, \.csv, "),
        (
            "b.bin",
            r"b\.json cannot be read.*404.*\n  to fix: check the URL; .* another trainer .* only from a local path",
        ),
        (
            "shards",
            r"the metadata of a shard, .*b\.json cannot be read.*404.*\n  to fix: check the URL; .* another trainer",
        ),
        ("c.xls", r"404.*; it was read as a folder"),
    ],
)
def test_files_that_a_run_cannot_read_from_a_url(path: str, words: str, tmp_path: Path) -> None:
    with serving_other_files(tmp_path / "served") as url, pytest.raises(UserError, match=words) as raised:
        opened(tmp_path, f"{url}/{path}")
    assert str(raised.value).startswith(f"data.path={url}/{path}: ")


@contextmanager
def serving_other_files(folder: Path) -> Iterator[str]:
    """A web server with files that are no shards of this project."""
    (folder / "sub").mkdir(parents=True)
    for name in ("a.json", "sub/a.json"):
        (folder / name).write_text(RECORDS)
    (folder / "settings.json").write_text('{"a": 1}')
    (folder / "shards").mkdir()
    for name in ("b.bin", "shards/b.bin"):
        (folder / name).write_bytes(bytes(100))
    (folder / "c.xls").write_text("1")
    server = Server(folder)
    try:
        yield server.url
    finally:
        server.close()


PAGE = "<!DOCTYPE html><html><body>Please log in</body></html>"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", PAGE, r"is a web page \(HTML\), despite its name; does the server require a login\?"),
        ("a.txt", f"\n  {PAGE}", r"is a web page \(HTML\)"),
        ("a.jsonl", '{"text": "one"}\n{"text": \n', r"a\.jsonl:2: is not JSON"),
    ],
)
def test_invalid_remote_text_is_named_by_url_and_not_kept(
    name: str, content: str, words: str, tmp_path: Path, folder: Path, server: Server
) -> None:
    (folder / name).write_text(content)
    with pytest.raises(UserError, match=words) as raised:
        opened(tmp_path, f"{server.url}/{name}")
    assert f"{server.url}/{name}" in str(raised.value)
    assert str(tmp_path / "cache") not in str(raised.value)
    assert not list((tmp_path / "cache" / "text").glob(f"*{name}*"))


def test_html_page_is_text_if_its_name_says_so(tmp_path: Path, folder: Path, server: Server) -> None:
    (folder / "a.html").write_text(PAGE * 20)
    assert len(opened(tmp_path, f"{server.url}/a.html"))


def test_redirect_loop_is_one_line() -> None:
    reason = urllib.request.HTTPRedirectHandler.inf_msg + "Found"
    assert "\n" in reason
    error = urllib.error.HTTPError("http://x", 302, reason, email.message.Message(), None)
    assert transport._reason(error).startswith(
        "the server says 302 The HTTP server returned a redirect error that would lead"
    )
    assert "\n" not in transport._reason(error)


def test_remote_text_gives_the_same_shards_as_local_files(
    tmp_path: Path, folder: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = folder / "text"
    inside.mkdir()
    (inside / "a.jsonl").write_text("".join(f'{{"text": "{n} documents"}}\n' for n in range(90)))
    (inside / "b.txt").write_text("another document " * 20)
    server.trouble.update({"a.jsonl": ["whole", "drops"], "b.txt": ["503"]})
    memory = fsspec.filesystem("memory")
    memory.put(str(inside), "/of-text", recursive=True)

    def shards(cache: Path) -> list[bytes]:
        return [path.read_bytes() for path in sorted(cache.glob("cache/tokens-*/*")) if path.name != "manifest.json"]

    here = opened(tmp_path / "here", inside)
    for name, url in (("http", f"{server.url}/text/"), ("memory", "memory://of-text/*.*")):
        there = opened(tmp_path / name, url)
        assert same(batches(there, 40), batches(here, 40))
        assert shards(tmp_path / name) == shards(tmp_path / "here")
        assert not list((tmp_path / name / "cache" / "text").iterdir())
    before = server.asked["a.jsonl"]
    assert same(batches(opened(tmp_path / "http", f"{server.url}/text/"), 9), batches(here, 9))
    assert server.asked["a.jsonl"] == before + 1, "whether it is still the same"
    server.close()
    there = opened(tmp_path / "http", f"{server.url}/text/")
    assert same(batches(there, 9), batches(here, 9)), "its tokens are here, whether the server is or not"
    assert "assuming that it has not changed since the last check" in capsys.readouterr().err
    with pytest.raises(UserError, match="cannot be read"):
        opened(tmp_path / "another", f"{server.url}/text/")


def test_prepare_treats_remote_text_like_local_files(
    tmp_path: Path, folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local and remote files in the order in which they are named; no downloaded file is left."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lines = [[f'{{"text": "{name} document {number}"}}' for number in range(20)] for name in "ab"]
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, own in zip(files, lines, strict=True):
        path.write_text("\n".join(own) + "\n")
    (folder / "b.jsonl").write_text(files[1].read_text())
    server.trouble["b.jsonl"] = ["drops"]
    prepare(list(map(str, files)), str(tmp_path / "here" / "text"), holdout=0.2)
    report = prepare([str(files[0]), f"{server.url}/b.jsonl"], str(tmp_path / "fetched" / "text"), holdout=0.2)
    assert "train: " in report
    here, there = (
        {path.name: path.read_bytes() for path in (tmp_path / side).iterdir()} for side in ("here", "fetched")
    )
    assert here == there
    assert not list((tmp_path / "cache").rglob("*b.jsonl*"))
    absent = r"INPUT=http\S*/absent.txt: cannot be read \(the server says 404 .*\)\n  to fix: check the URL$"
    with pytest.raises(UserError, match=absent):
        prepare([f"{server.url}/absent.txt"], str(tmp_path / "absent" / "text"))
    assert not (tmp_path / "absent").exists()


def test_names_that_are_escaped_in_a_url(tmp_path: Path, folder: Path, server: Server) -> None:
    """Spaces, non-ASCII letters and URL metacharacters: from an index page, by a glob, and as given."""
    names = ["a b.txt", "ä.txt", "100%.txt", "c#d.txt", "e?f.txt", "g%20h.txt"]
    texts = sorted(f"the text of {name} " * 20 for name in names)
    (folder / "odd").mkdir()
    for name in names:
        (folder / "odd" / name).write_text(f"the text of {name} " * 20)

    def found(path: str) -> list[str]:
        data = DataSection(source="tokens", path=f"{server.url}/odd/{path}", cache_dir=str(tmp_path / "cache"))
        return sorted(texts_of(find_shards(data.path, data, "data.path").train))

    assert found("") == found("*.txt") == texts
    assert found("ä.txt") == [texts[-1]]
    assert found("a b.txt") == found("a%20b.txt") == ["the text of a b.txt " * 20]


class Stalling(SyntheticSource):
    """Samples that do not come after the first step."""

    checks_ids = waits_for_storage = True

    def __init__(self, come: threading.Event) -> None:
        super().__init__(seq_len=4, vocab_size=50, seed=0, split="train")
        self.come, self.left = come, 8

    def batch(self, indices: Any) -> Any:
        self.left -= len(indices)
        time.sleep(0.01)  # nothing is ready when it is asked for
        if self.left < 0:
            self.come.wait()
        return super().batch(indices)


@pytest.mark.slow
@pytest.mark.parametrize("is_late", [True, False], ids=["this rank's data are late", "another rank's are"])
def test_step_without_data_is_abandoned_on_a_stop(is_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However early the next micro-batch is requested: a rank that read it itself could not stop."""
    monkeypatch.setattr(lifecycle, "DATA_TIMEOUT_S", -1.0)
    monkeypatch.setattr("trainer.data.loader._IDLE_CALLER_S", math.inf)
    come, asked, said = threading.Event(), threading.Event(), []
    source = Stalling(come)
    loader = TrainLoader(source, seed=0, global_batch_size=8, micro_batch_size=2)
    step_sync = StepSync(Ranks([[0, 0, not is_late]]))  # type: ignore[arg-type]
    left = lifecycle.StepAbandoner(step_sync, loader, None, asked.is_set)
    if is_late:
        for _ in range(4):
            next(loader)
        asked.set()
    state = loader.state_dict()
    with left.guard():
        for _ in range(4):
            next(loader)
        step_sync.all_reduce(1, 2)
        said.append("the step is taken")
    come.set()
    asked.clear()
    assert not said
    assert loader.state_dict() == state
    wanted = loader.next_samples()[:2]
    tokens, _ = SyntheticSource(4, 50, 0, "train").batch(wanted)
    assert (next(loader)["tokens"].numpy() == tokens).all()
    loader.close()


@pytest.mark.slow
def test_run_that_waits_for_a_lost_connection_stops_and_saves(tmp_path: Path, folder: Path, server: Server) -> None:
    server.on_request = lambda name: server.gate.wait() if name.endswith(".bin") else None
    path = f"data.path={{a: {folder}, b: {server.url}}}"
    phases = ("data.weights={a: 1}", "data.phases=[{from: 3, weights: {b: 1}}]", "data.holdout=0")
    common = ("train.steps=6", "model.vocab_size=257", "data.source=tokens", path, *phases, "eval.every=0")
    run = start_faulty(tmp_path / "run", "recipe=llama_small", *tiny_overrides(*common), ranks=2)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count('"train"') == 2, "the last step that has data")
    for process in run.processes:
        os.kill(process.pid, signal.SIGTERM)
    assert run.ran().exit_code == 75
    assert (tmp_path / "run" / "checkpoints" / "step_00000002").is_dir()


@pytest.mark.slow
def test_an_evaluation_that_waits_for_a_lost_connection_is_abandoned(
    tmp_path: Path, folder: Path, server: Server
) -> None:
    """It is made up for after the next start, once the connection is back."""
    server.on_request = lambda name: server.gate.wait() if name.endswith(".bin") else None
    common = ("model.vocab_size=257", "data.source=tokens", f"data.path={folder}", f"data.eval_path={server.url}")
    settings = ["recipe=llama_small", *tiny_overrides("train.steps=4", "eval.every=2", "eval.steps=1", *common)]
    run = start_faulty(tmp_path / "run", *settings, ranks=2)
    wait_until(lambda: any(name.endswith(".bin") for name in list(server.asked)), "the evaluation to ask for its data")
    for process in run.processes:
        os.kill(process.pid, signal.SIGTERM)
    assert run.ran().exit_code == 75
    server.gate.set()
    again = run_tiny(tmp_path / "run", *settings[1:], "nproc=2")
    assert again.exit_code == 0
    assert [line["step"] for line in again.metrics if line["kind"] == "eval"] == [2, 4]


@pytest.mark.slow
def test_losses_equal_those_of_local_shards(tmp_path: Path, folder: Path, server: Server) -> None:
    server.trouble.update({path.name: ["drops"] for path in folder.glob("*.bin")})
    common = ("train.steps=12", "model.vocab_size=257", "nproc=2", "data.source=tokens", "data.holdout=0")
    half = sum(SIZES) * 2 / 2**30 / 2
    there = run_tiny(
        tmp_path / "a", *common, f"data.path={server.url}", f"data.cache_dir={tmp_path}/c", f"data.cache_gib={half}"
    )
    here = run_tiny(tmp_path / "b", *common, f"data.path={folder}")
    assert there.exit_code == here.exit_code == 0
    assert there.train("loss") == here.train("loss")
