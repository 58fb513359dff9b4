"""Shards and text at a URL: the same samples as from local files, whatever happens to the connection or the process."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.data import content_of, read_all, texts_in, tokens_section, write_shards, write_texts
from tests.helpers.faults import small_disk
from tests.helpers.gate import wait_until
from tests.helpers.launch import fork, run, start
from trainer import UserError
from trainer.data.opening import open_source
from trainer.data.source import Source
from trainer.prepare import prepare

fsspec = pytest.importorskip("fsspec")


class UnreliableHandler(SimpleHTTPRequestHandler):
    """A web server that fails for names in `trouble`: for each name a list of failures, one per request."""

    trouble: dict[str, list[str]]
    asked: Counter[str]
    gate: threading.Event
    stalled: threading.Event
    pause_s: list[float]
    headers_seen: list[str]

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        self.asked[name] += 1
        self.headers_seen.append(self.headers.get("Authorization", ""))
        time.sleep(self.pause_s[0])
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
        for number in range(100 if how == "drips" else 0):
            self.wfile.write(content[number : number + 1])
            self.wfile.flush()
            self.stalled.set()
            if self.gate.wait(0.2):
                break
        if how == "stalls":
            self.stalled.set()
            self.gate.wait()
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


class Server:
    def __init__(self, folder: Path) -> None:
        self.trouble: dict[str, list[str]] = {}
        self.asked: Counter[str] = Counter()
        self.gate, self.stalled = threading.Event(), threading.Event()
        self.pause_s, self.headers_seen = [0.0], list[str]()
        handler = type("Handler", (UnreliableHandler,), {**vars(self)})
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
    """A folder of four shards."""
    write_shards(tmp_path / "there", *([f"{number} " * size] for number, size in enumerate((300, 400, 500, 600))))
    return tmp_path / "there"


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    found = Server(folder)
    yield found
    found.close()


def opened(cache: Path, path: object, **more: Any) -> Source:
    return open_source(tokens_section(path, seq_len=16, cache_dir=str(cache), **more), 257, "train")


def same(one: Source, other: Source) -> bool:
    """Return whether two sources have the same samples, and would resume each other's runs."""
    mine, theirs = read_all(one), read_all(other)
    return one.fingerprint == other.fingerprint and all(np.array_equal(mine[name], theirs[name]) for name in theirs)


def refusal_of(tmp_path: Path, path: str) -> str:
    with pytest.raises(UserError) as caught:
        opened(tmp_path / "cache", path)
    assert str(caught.value).startswith(f"data.path={path}: ")
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------------
# Shards


@pytest.mark.parametrize("path", ["/", "/text-*.bin", "/text-00002.bin"])
@pytest.mark.parametrize("kind", ["http", "memory"])
def test_shards_at_a_url_are_those_of_the_folder(
    tmp_path: Path, folder: Path, server: Server, kind: str, path: str
) -> None:
    url = server.url
    if kind == "memory":
        url = f"memory://{tmp_path.name}"
        fsspec.filesystem("memory").put(f"{folder}/", f"/{tmp_path.name}/", recursive=True)
    assert same(opened(tmp_path / "cache", url + path), opened(tmp_path / "cache", f"file://{folder}{path}"))


def test_a_lost_connection_and_wrong_bytes_change_nothing(tmp_path: Path, folder: Path, server: Server) -> None:
    """What was received is compared with its checksum, and fetched again."""
    names = [f"text-{number:05d}.bin" for number in range(3)]
    server.trouble.update({names[0]: ["drops"] * 2, names[1]: ["other bytes"] * 2, names[2]: ["503"] * 2})
    assert same(opened(tmp_path / "cache", f"{server.url}/"), opened(tmp_path / "cache", folder))
    assert not any(server.trouble.values())


def read(url: str, cache: Path) -> int:
    read_all(opened(cache, url))
    return 0


@pytest.mark.slow
def test_a_shard_is_downloaded_once_for_all_processes_of_a_machine(
    tmp_path: Path, folder: Path, server: Server
) -> None:
    processes = [fork(read, [f"{server.url}/", tmp_path / "cache"], tmp_path) for _ in range(2)]
    assert [process.wait().code for process in processes] == [0, 0]
    assert {name: server.asked[name] for name in server.asked if name.endswith(".bin")} == {
        path.name: 1 for path in folder.glob("*.bin")
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "a.jsonl"])
def test_a_download_killed_in_its_middle_is_not_taken_for_complete(
    tmp_path: Path, folder: Path, server: Server, name: str
) -> None:
    write_texts(folder / "a.jsonl", [f"{n} documents" for n in range(90)])
    server.trouble[name or "text-00001.bin"] = ["stalls"]
    killed = fork(read, [f"{server.url}/{name}", tmp_path / "cache"], tmp_path)
    wait_until(lambda: server.stalled.is_set() or not killed.is_running, "the middle of a download")
    killed.kill()
    server.gate.set()
    assert same(opened(tmp_path / "cache", f"{server.url}/{name}"), opened(tmp_path / "here", folder / name))
    # It may have been about to remove the lock file of a download that was complete: nobody holds that lock.
    assert not [left for left in leftovers(tmp_path / "cache") if not left.endswith(".lock")]


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["", "text/"])
def test_a_download_killed_at_twenty_random_moments(tmp_path: Path, folder: Path, server: Server, name: str) -> None:
    """Four processes then continue at once, download each missing file once, and leave nothing behind."""
    (folder / "text").mkdir()
    for number in range(9):
        write_texts(folder / "text" / f"{number}.jsonl", [f"{number} and {n} documents" for n in range(90)])
    moment, num_in_the_middle = random.Random(3), 0
    for number in range(20):
        cache = tmp_path / f"cache-{number}"
        server.pause_s[0] = 0.4
        killed = fork(read, [f"{server.url}/{name}", cache], tmp_path)
        time.sleep(moment.uniform(0.5, 3.0))
        killed.kill()
        num_in_the_middle += bool(cache.exists() and leftovers(cache))
        server.pause_s[0] = 0.0
        server.asked.clear()
        processes = [fork(read, [f"{server.url}/{name}", cache], tmp_path) for _ in range(4)]
        assert [process.wait().code for process in processes] == [0] * 4
        assert not [file for file, count in server.asked.items() if file.endswith((".bin", ".jsonl")) and count > 1]
        assert same(opened(cache, f"{server.url}/{name}"), opened(tmp_path / "here", folder / name))
        assert not leftovers(cache)
    assert num_in_the_middle >= 5


def leftovers(cache: Path) -> list[str]:
    """Return the hidden files in a cache, and those of text that is already tokenized."""
    return [name for name in content_of(cache) if "/." in f"/{name}" or name.endswith((".part", ".tmp", ".jsonl"))]


def test_shards_are_found_again_without_the_server(tmp_path: Path, folder: Path, server: Server) -> None:
    opened(tmp_path / "cache", f"{server.url}/")
    server.close()
    assert same(opened(tmp_path / "cache", f"{server.url}/"), opened(tmp_path / "cache", folder))


def test_a_damaged_copy_is_downloaded_again(tmp_path: Path, folder: Path, server: Server) -> None:
    opened(tmp_path / "cache", f"{server.url}/")
    for copy in (tmp_path / "cache").rglob("text-00001.bin"):
        copy.write_bytes(copy.read_bytes()[:-1] + b"x")
    assert same(opened(tmp_path / "cache", f"{server.url}/"), opened(tmp_path / "cache", folder))
    assert server.asked["text-00001.bin"] == 2


def test_a_manifest_may_have_a_query_and_headers_come_from_the_environment(
    tmp_path: Path, folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(tmp_path / "a.jsonl", [f"{n} documents" for n in range(90)])
    prepare([str(tmp_path / "a.jsonl")], str(folder / "new"), holdout=0.1)
    monkeypatch.setitem(fsspec.config.conf, "http", {"client_kwargs": {"headers": {"Authorization": "Bearer x"}}})
    there = opened(tmp_path / "cache", f"{server.url}/new.manifest.json?version=3")
    assert same(there, opened(tmp_path / "cache", folder / "new.manifest.json"))
    assert set(server.headers_seen) == {"Bearer x"}


@pytest.mark.parametrize("path", ["?version=3", "text-*.bin?version=3", "folder?version=3"])
def test_a_query_names_one_file(tmp_path: Path, server: Server, path: str) -> None:
    assert "one file or a manifest" in refusal_of(tmp_path, f"{server.url}/{path}")
    assert not server.asked


@pytest.mark.slow
def test_shards_on_a_full_disk_are_one_message(tmp_path: Path, folder: Path, server: Server) -> None:
    write_shards(folder, ["a long document " * 4000])
    with small_disk(tmp_path / "disk", "64k") as disk:
        reader = fork(read, [f"{server.url}/", disk], tmp_path).wait()
        assert reader.code == 1
        assert "mount the bucket" in reader.err or f"data.cache_dir={disk}: " in reader.err
        assert str(disk) in reader.err
        assert not [path for path in disk.rglob("*.bin*") if path.stat().st_size > 10_000]


@pytest.mark.parametrize("path", ["absent.bin", "absent-*.bin", "absent.jsonl", "absent/"])
def test_a_url_where_nothing_is(tmp_path: Path, server: Server, path: str) -> None:
    assert refusal_of(tmp_path, f"{server.url}/{path}")


@pytest.mark.campaign
def test_a_server_and_a_protocol_that_do_not_exist(tmp_path: Path, server: Server) -> None:
    assert "text-00000.bin" in refusal_of(tmp_path, f"{server.url}/text-00000.json"), "the nearest file"
    assert refusal_of(tmp_path, "nowhere://x/y.bin")
    server.close()
    assert refusal_of(tmp_path, f"{server.url}/text-00000.bin")


# ---------------------------------------------------------------------------------------------------------------
# Text


@pytest.mark.campaign
def test_text_at_a_url_gives_the_same_shards_as_local_files(tmp_path: Path, folder: Path, server: Server) -> None:
    """Each file is fetched once, and not kept; a later start needs no server."""
    inside = folder / "text"
    inside.mkdir()
    write_texts(inside / "a.jsonl", [f"{n} documents" for n in range(90)])
    (inside / "b.txt").write_text("another document " * 20)
    server.trouble.update({"b.txt": ["503"]})

    def shards(cache: Path) -> list[bytes]:
        return [content for name, content in sorted(content_of(cache).items()) if name.endswith((".bin", ".idx"))]

    here = opened(tmp_path / "here", inside)
    assert same(opened(tmp_path / "fetched", f"{server.url}/text/"), here)
    assert shards(tmp_path / "fetched") == shards(tmp_path / "here")
    assert not any(b"another document" in content for content in content_of(tmp_path / "fetched").values())
    server.close()
    assert same(opened(tmp_path / "fetched", f"{server.url}/text/"), here)


def test_prepare_treats_text_at_a_url_like_local_files(tmp_path: Path, server: Server, folder: Path) -> None:
    """Local and remote files in the order in which they are named."""
    files = [
        write_texts(place / f"{name}.jsonl", [f"{name} document {n}" for n in range(20)])
        for place, name in ((tmp_path, "a"), (folder, "b"))
    ]
    prepare([str(files[0]), str(files[1])], str(tmp_path / "here" / "text"), holdout=0.2)
    prepare([str(files[0]), f"{server.url}/b.jsonl"], str(tmp_path / "fetched" / "text"), holdout=0.2)
    here, fetched = content_of(tmp_path / "here"), content_of(tmp_path / "fetched")
    del here["text.manifest.json"], fetched["text.manifest.json"]  # it says where the text was
    assert here == fetched
    with pytest.raises(UserError) as caught:
        prepare([f"{server.url}/absent.txt"], str(tmp_path / "absent" / "text"))
    assert str(caught.value).startswith(f"INPUT={server.url}/absent.txt: ")
    assert not (tmp_path / "absent").exists()


PAGE = "<!DOCTYPE html><html><body>Please log in</body></html>"


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.jsonl", PAGE, "a.jsonl"),
        ("a.txt", f"\n  {PAGE}", "a.txt"),
        ("a.jsonl", '{"text": "one"}\n{"text": \n', "a.jsonl:2"),
    ],
)
def test_a_page_in_place_of_text_is_named_by_url_and_not_kept(
    name: str, content: str, named: str, tmp_path: Path, folder: Path, server: Server
) -> None:
    (folder / name).write_text(content)
    with pytest.raises(UserError) as caught:
        opened(tmp_path / "cache", f"{server.url}/{name}")
    assert f"{server.url}/{named}" in str(caught.value)
    assert str(tmp_path / "cache") not in str(caught.value)
    assert not any(kept.endswith((name, ".bin")) for kept in content_of(tmp_path / "cache"))


def test_names_that_are_escaped_in_a_url(tmp_path: Path, folder: Path, server: Server) -> None:
    """Spaces, non-ASCII letters and URL metacharacters: from an index page, by a glob, and as given."""
    names = ["a b.txt", "ä.txt", "100%.txt", "c#d.txt", "e?f.txt", "g%20h.txt"]
    (folder / "odd").mkdir()
    for name in names:
        (folder / "odd" / name).write_text(f"the text of {name} " * 20)

    def found(number: int, path: str) -> list[str]:
        prepare([f"{server.url}/odd/{path}"], str(tmp_path / f"{number}"))
        return sorted(texts_in(*tmp_path.glob(f"{number}-*.bin")))

    texts = sorted(f"the text of {name} " * 20 for name in names)
    assert found(1, "") == found(2, "*.txt") == texts
    assert found(3, "ä.txt") == [texts[-1]]
    assert found(4, "a b.txt") == found(5, "a%20b.txt") == ["the text of a b.txt " * 20]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how"), [("a.jsonl", "stalls"), ("text-00001.bin", "drips")])
def test_a_start_that_waits_for_a_server_can_be_stopped(
    tmp_path: Path, folder: Path, server: Server, name: str, how: str
) -> None:
    write_texts(folder / "a.jsonl", ["some text"] * 2000)
    server.trouble[name] = [how] * 9
    own = ["model.vocab_size=257", f"data.path={server.url}/{name}", f"data.cache_dir={tmp_path / 'cache'}"]
    waiting = start(tmp_path / "run", *own, "train.steps=2")
    wait_until(lambda: server.stalled.is_set() or not waiting.is_running, "the middle of a download")
    asked_at = time.monotonic()
    waiting.signal(signal.SIGTERM)
    assert waiting.wait().code == 75
    assert time.monotonic() - asked_at < 5
    server.trouble.clear()
    server.gate.set()
    assert run(tmp_path / "run", *own, "train.steps=2").train("step") == [1, 2]
