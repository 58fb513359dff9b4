"""Resolves names of Hugging Face Hub repositories to commits, downloads files into the local cache, and uploads models.

`model.path=org/name` and `data.path=hf://datasets/org/name` refer to repositories.  A name is resolved to a commit when
a run first starts, and the run keeps that commit: in its stored configuration, the model is `hf://org/name@<commit>`.
`huggingface_hub` (installed by the `hf` extra) queries the server and fills the cache, where other programs find the
files too; `HF_HOME`, `HF_HUB_CACHE`, `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE` work as usual.  This module
verifies each downloaded file by its checksum.  It also remembers the list of a commit's files, so that a pinned name
whose files are in the cache needs no server.

This module does not import torch, and imports `huggingface_hub` only when a repository is named.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import json
import os
import queue
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from trainer.errors import UserError, print_stderr, reason_of, setting_error
from trainer.files import free_bytes, locked, readable_size, write_atomically

SCHEME = "hf://"

PINS = "MESHTRAINER_HUB_PINS"
"""Environment variable that passes the resolved commits to the ranks that `nproc=N` starts."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_NAME = re.compile(
    r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[^/?]+))?(?:/(?P<path>[^?]*))?(?:\?(?P<options>.*))?"
)
_TRUE_VALUES = ("1", "ON", "YES", "TRUE")
"""Values of HF_HUB_OFFLINE, in upper case, that count as true."""
_MAX_TRIES = 3
"""Maximum number of attempts to query the server, and to download a file that arrives damaged."""
_NUM_CONNECTIONS = 4
"""Maximum number of a repository's files that are downloaded at the same time."""
_DISK_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO),
    *(errno.ENOENT, errno.ENOTDIR, errno.EEXIST),
)
"""Errors of the local disk, as opposed to those of the network."""
_ABANDONED_S = 3600.0
"""Seconds after which an incomplete file that nobody has written to counts as left behind by a killed process."""

Kind = Literal["model", "dataset"]


# ---------------------------------------------------------------------------------------------------------------
# Names


@dataclass(frozen=True)
class HubName:
    """The name of a repository on the Hub, or of files in one.

    repo: `org/name`.
    revision: a branch, tag or commit; None for the default branch.
    path: a file, folder or glob in the repository; empty for all files.
    options: what follows `?` in the name.
    text: the name as the user wrote it, for messages; empty if it did not come from a user.
    """

    kind: Kind
    repo: str
    revision: str | None = None
    path: str = ""
    options: str = ""
    text: str = field(default="", compare=False, repr=False)

    def __str__(self) -> str:
        repo = f"datasets/{self.repo}" if self.kind == "dataset" else self.repo
        revision = f"@{urllib.parse.quote(self.revision, safe='')}" if self.revision else ""
        path, options = f"/{self.path}" if self.path else "", f"?{self.options}" if self.options else ""
        return f"{SCHEME}{repo}{revision}{path}{options}"

    @property
    def shown(self) -> str:
        """The name as the user wrote it or, if no user did, in the form of `str`."""
        return self.text or str(self)

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None


def parse_name(text: str) -> HubName | None:
    """Parse the value of a setting as the name of a Hub repository; return None if it is not such a name.

    `hf://org/name` and `hf://datasets/org/name`, optionally with `@REVISION`, `/PATH` and `?OPTIONS`, are always names.
    `org/name`, optionally with a revision or the path of a .gguf file, is a name unless it is probably a local path:
    that path or a folder `org` exists on this machine, or the text ends like a file name, for example in .safetensors.
    """
    if text.startswith(SCHEME):
        rest = text.removeprefix(SCHEME)
        kind: Kind = "dataset" if rest.startswith("datasets/") else "model"
        match = _NAME.fullmatch(rest.removeprefix("datasets/").removeprefix("models/"))
    else:
        kind, match = "model", _NAME.fullmatch(text)
        if match is None or match["options"] or (match["path"] and not match["path"].lower().endswith(".gguf")):
            return None
        folder = match["repo"].partition("/")[0]
        if os.path.lexists(text) or os.path.isdir(folder) or text.endswith((".pt", ".pth", ".safetensors", ".json")):
            return None
        if match["path"] is None and text.lower().endswith(".gguf"):
            return None
    if match is None:
        return None
    revision = urllib.parse.unquote(match["revision"]) if match["revision"] else None
    return HubName(kind, match["repo"], revision, (match["path"] or "").strip("/"), match["options"] or "", text)


def repo_id_of(text: str) -> str:
    """Return the repository's id, `org/name`, for an hf:// name without a path; return any other text unchanged."""
    name = parse_name(text) if text.startswith(SCHEME) else None
    return text if name is None or name.path else name.repo


def is_hub_data(setting: str) -> bool:
    """Return whether a data setting names a dataset on the Hub."""
    return setting.startswith(SCHEME)


def pinned_name(path: str) -> str | None:
    """Return the pinned name of a file or folder in the Hub's cache, or None for any other path.

    Stored configurations contain these names in place of local paths, so that they are valid on other machines.
    """
    root = str(cache_folder())
    if not path.startswith(f"{root}/"):
        return None
    parts = path[len(root) + 1 :].rstrip("/").split("/")
    kind, _, repo = parts[0].partition("--")
    if len(parts) < 3 or parts[1] != "snapshots" or kind not in ("models", "datasets") or "--" not in repo:
        return None
    return str(HubName(kind.removesuffix("s"), repo.replace("--", "/"), parts[2], "/".join(parts[3:])))  # type: ignore[arg-type]


def cached_path(name: HubName) -> Path | None:
    """Return the cached path of a pinned name, or None if it is not in the cache."""
    path = _snapshot(name, name.revision or "") / name.path
    return path if name.is_pinned and path.exists() else None


def cache_folder() -> Path:
    """Return the Hub's cache folder, as `huggingface_hub` would, but without importing it."""
    if folder := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(os.path.expandvars(folder)).expanduser().absolute()
    home = os.environ.get("HF_HOME")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expandvars(home or f"{base}/huggingface")).expanduser().absolute() / "hub"


def _repository_folder(name: HubName) -> Path:
    return cache_folder() / f"{name.kind}s--{name.repo.replace('/', '--')}"


def _snapshot(name: HubName, commit: str) -> Path:
    return _repository_folder(name) / "snapshots" / commit


def default_revision(name: HubName) -> str:
    """Return the revision of a name, or the default branch if it has none."""
    return name.revision or "main"


# ---------------------------------------------------------------------------------------------------------------
# Pins: the commits to which names were resolved

_resolved: dict[str, str] = {}
"""The commits to which this process has resolved names, by `_pin_key`."""


def pins_for_children() -> str:
    """Return the value of the environment variable `PINS` for child processes."""
    return json.dumps(_resolved)


def commits_of_run(
    stored_config: Mapping[str, Any], names: Mapping[str, HubName], parts: Mapping[str, Sequence[str]] | None = None
) -> dict[str, str]:
    """Return the commits that a resumed run keeps, by setting, for the settings whose name has another revision.

    A setting keeps the commit that the run has stored for it, or else the one of a setting with the same name.  Two
    revisions of a repository therefore stay apart.

    stored_config: the run's configuration; empty for a new run.
    names: the names in the present configuration, by setting, such as `model.path` or `data.path.SOURCE`.
    parts: settings that a run may store only as the values of others, which are looked up if they are not in `names`.
    """
    stored, kept = _pinned_names(stored_config), dict[str, str]()
    for key, name in names.items():
        others = (other for other in (parts or {}).get(key, ()) if other not in names)
        for pinned in filter(None, map(stored.get, (key, *others))):
            if (pinned.kind, pinned.repo) == (name.kind, name.repo) and not name.is_pinned:
                kept.setdefault(key, str(pinned.revision))
    by_name = {_pin_key(names[key]): commit for key, commit in kept.items()}
    shared = {key: by_name[_pin_key(name)] for key, name in names.items() if _pin_key(name) in by_name}
    return shared | kept


def _pinned_names(tree: Mapping[str, Any], prefix: str = "") -> dict[str, HubName]:
    """Return the pinned names in a stored configuration, by setting."""
    found: dict[str, HubName] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= _pinned_names(value, f"{prefix}{key}.")
        elif isinstance(value, str) and value.startswith(SCHEME):
            name = parse_name(value)
            if name is not None and name.is_pinned:
                found[f"{prefix}{key}"] = name
    return found


def pinned_by_parent(name: HubName) -> str | None:
    """Return the commit to which the parent process has resolved a name, or None."""
    try:
        commit = json.loads(os.environ.get(PINS, "{}")).get(_pin_key(name))
    except (ValueError, AttributeError):
        return None
    return commit if isinstance(commit, str) else None


def _pin_key(name: HubName) -> str:
    return str(replace(name, path="", options="", revision=default_revision(name)))


# ---------------------------------------------------------------------------------------------------------------
# A commit of a repository


@dataclass(frozen=True)
class HubFile:
    """A file in a commit: its path, its size in bytes, and its checksum, which also names its blob in the cache.

    checksum: SHA-256 for a file in Git LFS, git's SHA-1 for any other; empty if only another program has downloaded
        the file.
    """

    path: str
    size: int
    checksum: str


class Repository:
    """A repository at one commit: its list of files, and its snapshot folder in the cache."""

    def __init__(self, name: HubName, commit: str, files: Sequence[HubFile], setting: str) -> None:
        self.name, self.files, self._setting = replace(name, revision=commit), files, setting
        self.folder = _snapshot(name, commit)

    def missing(self, files: Iterable[HubFile]) -> list[HubFile]:
        """Return the files that are not in the cache."""
        return [file for file in files if not (self.folder / file.path).exists()]

    def fetch(self, files: Iterable[HubFile]) -> None:
        """Download the missing files.  One process per machine downloads while the others wait.

        If the process is killed, complete files stay, and the next start downloads the others.  Raises UserError if
        the server denies access or cannot be reached, or if the files cannot be stored.
        """
        files = list(files)
        if not self.missing(files):
            return
        library, folder = import_library(self._setting, self.name), _repository_folder(self.name)
        try:
            if _is_offline(library):
                raise library.errors.OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
            _metadata_folder(self.name).mkdir(parents=True, exist_ok=True)
            with locked(_metadata_folder(self.name) / "fetch"):
                if missing := self.missing(files):
                    self._download(library, missing)
        except UserError:
            raise
        except Exception as error:  # its type depends on the versions of the library and its HTTP client
            if not _is_disk_error(error):
                raise as_user_error(error, self.name, self._setting) from error
            rule = f"cannot be stored in {folder} ({reason_of(error)})"
            fix = "set HF_HOME to a folder that is writable, on a disk with enough space"
            raise setting_error(self._setting, self.name.shown, rule, fix=fix) from error

    def _download(self, library: Any, missing: Sequence[HubFile]) -> None:
        for leftover in (_repository_folder(self.name) / "blobs").glob("*.incomplete"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - leftover.stat().st_mtime > _ABANDONED_S:
                    leftover.unlink()
        total, free = sum(file.size for file in missing), free_bytes(cache_folder())
        if total > free:
            rule = f"needs {readable_size(total)} in {cache_folder()}, {readable_size(free)} are free"
            fix = "free some space there, or set HF_HOME to a folder on another disk"
            raise setting_error(self._setting, self.name.shown, rule, fix=fix)
        description = missing[0].path if len(missing) == 1 else f"{len(missing)} files"
        print_stderr(f"fetching {self.name}: {description}, {readable_size(total)}, into {self.folder}")
        _in_daemon_threads(lambda file: self._download_file(library, file), missing)

    def _download_file(self, library: Any, file: HubFile) -> None:
        """Download a file until its content matches its checksum."""
        for _ in range(_MAX_TRIES):
            library.hf_hub_download(
                self.name.repo,
                file.path,
                repo_type=self.name.kind,
                revision=self.name.revision,
                cache_dir=cache_folder(),
                endpoint=endpoint(library),
            )
            path = self.folder / file.path
            blob = path.resolve()
            if _checksum(blob, file) == file.checksum:
                return
            path.unlink()
            blob.unlink(missing_ok=True)
        rule = f"{file.path} arrives damaged: its checksum is wrong"
        raise setting_error(self._setting, self.name.shown, rule, fix="try again later, or set HF_ENDPOINT to a mirror")


def _in_daemon_threads(download: Callable[[HubFile], None], files: Sequence[HubFile]) -> None:
    """Download files in _NUM_CONNECTIONS threads, and raise the first error.

    The error does not wait for the other threads, as it would for those of an executor: the library finishes a file
    before it gives up.
    """
    waiting: queue.SimpleQueue[HubFile] = queue.SimpleQueue()
    for file in files:
        waiting.put(file)
    results: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    is_abandoned = threading.Event()

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while not is_abandoned.is_set():
                file = waiting.get_nowait()
                try:
                    download(file)
                except BaseException as error:
                    results.put(error)
                    return
                results.put(None)

    for _ in range(min(_NUM_CONNECTIONS, len(files))):
        threading.Thread(target=work, name="hub-download", daemon=True).start()
    try:
        for _ in files:
            if (error := results.get()) is not None:
                raise error
    finally:
        is_abandoned.set()


def _checksum(path: Path, hub_file: HubFile) -> str:
    """Return the checksum of a downloaded file, of the kind that the repository has for it."""
    is_lfs = len(hub_file.checksum) == 64
    digest = hashlib.sha256() if is_lfs else hashlib.sha1(f"blob {path.stat().st_size}\0".encode())
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def open_repository(name: HubName, setting: str, kept_commit: str | None = None) -> Repository:
    """Resolve `name` to a commit, and return its repository at that commit.

    A commit is used as given.  Any other revision is `kept_commit` in a resumed run (see `commits_of_run`).  Otherwise
    it is looked up among the commits that the parent process has resolved, then on the server.  If the server cannot be
    reached, the cached commit is used, and a message is printed.  With HF_HUB_OFFLINE the server is not contacted.

    Raises UserError, naming `setting`, if the repository or revision does not exist, if access is restricted, or if the
    server cannot be reached and the cache does not have the revision.
    """
    commit = name.revision if name.is_pinned else kept_commit or pinned_by_parent(name)
    if commit is not None and (listed := _read_file_list(name, commit)) is not None:
        return _pin(name, commit, listed, setting)
    library = import_library(setting, name)
    try:
        if _is_offline(library):
            raise library.errors.OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
        commit, files = _query_server(library, name, commit)
    except Exception as error:
        is_down = is_temporary(error) or isinstance(error, library.errors.OfflineModeIsEnabled)
        commit = commit or _commit_in_cache(name)
        cached = _read_file_list(name, commit) or _list_cached_files(name, commit) if is_down and commit else None
        if cached is None or commit is None:
            raise as_user_error(error, name, setting) from error
        if not _is_offline(library):
            print_stderr(f"{name}: {_reason(error)}; using commit {commit[:12]} from the cache")
        return _pin(name, commit, cached, setting)
    with contextlib.suppress(OSError):  # the cache may be complete and read-only
        _metadata_folder(name).mkdir(parents=True, exist_ok=True)
        rows = [[file.path, file.size, file.checksum] for file in files]
        write_atomically(_file_list_path(name, commit), json.dumps(rows))
        if not name.is_pinned:
            reference = _repository_folder(name) / "refs" / default_revision(name)
            reference.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(reference, commit)
    return _pin(name, commit, files, setting)


def _pin(name: HubName, commit: str, files: Sequence[HubFile], setting: str) -> Repository:
    """Record the commit to which `name` was resolved, and return the repository at that commit."""
    _resolved[_pin_key(name)] = commit
    return Repository(name, commit, files, setting)


def _query_server(library: Any, name: HubName, commit: str | None) -> tuple[str, list[HubFile]]:
    """Query the server for the commit of a name, and its files; return both.  Raises the library's errors."""
    api = library.HfApi(endpoint=endpoint(library))
    revision, num_tries = commit or name.revision, 0
    while True:
        try:
            info = api.repo_info(name.repo, revision=revision, repo_type=name.kind, files_metadata=True, timeout=10)
            break
        except Exception as error:
            num_tries += 1
            if num_tries == _MAX_TRIES or not is_temporary(error) or (commit or _commit_in_cache(name)) is not None:
                raise
            time.sleep(1.0)
    files = []
    for sibling in info.siblings or []:
        checksum = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
        size = sibling.lfs.size if sibling.lfs is not None else sibling.size
        if Path(sibling.rfilename).is_absolute() or ".." in Path(sibling.rfilename).parts or not checksum:
            continue
        files.append(HubFile(sibling.rfilename, int(size or 0), str(checksum)))
    return str(info.sha), sorted(files, key=lambda file: file.path)


def _metadata_folder(name: HubName) -> Path:
    return _repository_folder(name) / ".meshtrainer"


def _file_list_path(name: HubName, commit: str) -> Path:
    return _metadata_folder(name) / f"{commit}.json"


def _read_file_list(name: HubName, commit: str) -> list[HubFile] | None:
    """Return the cached list of a commit's files, or None if this machine has never queried it."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        rows = json.loads(_file_list_path(name, commit).read_text())
        return [HubFile(path, size, checksum) for path, size, checksum in rows]
    return None


def _list_cached_files(name: HubName, commit: str) -> list[HubFile] | None:
    """Return the files of a commit that are in the cache, whoever stored them, or None."""
    folder = _snapshot(name, commit)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [HubFile(str(path.relative_to(folder)), path.stat().st_size, "") for path in files] or None


def _commit_in_cache(name: HubName) -> str | None:
    """Return the cached commit of a branch or tag, or None."""
    with contextlib.suppress(OSError):
        return (_repository_folder(name) / "refs" / default_revision(name)).read_text().strip()
    return None


# ---------------------------------------------------------------------------------------------------------------
# Models

_SMALL_FILES = (
    *("*.json", "*.jinja", "*.txt", "*.model", "README.md", "LICENSE*"),
    "additional_chat_templates/*",
)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def fetch_model(name: HubName, setting: str, kept_commit: str | None, with_weights: bool) -> Path:
    """Download the missing files of a model; return its folder in the cache, or the file that `name` names.

    kept_commit: see `open_repository`.
    with_weights: whether to download the weights too, or only the small files.  A file that `name` names, such as a
        .gguf file, is always downloaded.

    Raises UserError, naming `setting`.
    """
    repository = open_repository(name, setting, kept_commit)
    files = repository.files
    if name.path:
        chosen = [file for file in files if file.path == name.path]
        if not chosen:
            ggufs = [file.path for file in files if file.path.lower().endswith(".gguf")]
            rule = f"{repository.name.repo} has no file {name.path}"
            raise setting_error(setting, name.shown, rule, fix=f"name one of {', '.join(ggufs)}" if ggufs else "")
        repository.fetch(chosen)
        return repository.folder / name.path
    weights = _weight_files(files)
    if not weights:
        ggufs = [file.path for file in files if file.path.lower().endswith(".gguf")]
        pickles = [file.path for file in files if "/" not in file.path and file.path.endswith(_PICKLES)]
        if ggufs:
            rule = "has only GGUF weights"
            raise setting_error(setting, name.shown, rule, proposal=f"{name.repo}/{ggufs[0]}")
        if pickles:
            rule = f"has no safetensors, only {', '.join(pickles[:3])}: pickle files are not read, as they can run code"
            raise setting_error(setting, name.shown, rule, fix="name a revision or a copy that has safetensors")
    small = [file for file in files if any(_matches(file.path, pattern) for pattern in _SMALL_FILES)]
    repository.fetch(small)
    if with_weights:
        repository.fetch(weights)
    return repository.folder


def lacks_weights(folder: Path) -> bool:
    """Return whether a folder in the cache lacks weight files that its repository's cached file list contains."""
    text = pinned_name(str(folder))
    name = parse_name(text) if text else None
    if name is None or name.path:
        return False
    weights = _weight_files(_read_file_list(name, str(name.revision)) or [])
    return any(not (folder / file.path).exists() for file in weights)


def _weight_files(files: Sequence[HubFile]) -> list[HubFile]:
    """Return a model's safetensors files, without files that repeat its weights in another layout."""
    at_root = [file for file in files if file.path.endswith(".safetensors") and "/" not in file.path]
    standard = [file for file in at_root if file.path.startswith("model")]
    return standard or [file for file in at_root if not file.path.startswith("adapter")] or at_root


def _matches(path: str, pattern: str) -> bool:
    return path.count("/") == pattern.count("/") and fnmatchcase(path, pattern)


# ---------------------------------------------------------------------------------------------------------------
# Publishing


def upload(folder: Path, extra_files: Mapping[str, bytes], repo: str, setting: str, is_private: bool) -> str:
    """Upload the files in a folder and `extra_files` (contents by name) as one commit to the model `repo`.

    Creates the repository if it does not exist.  Returns the URL of the commit.  Raises UserError, naming `setting`, if
    `repo` is not the name of a model, or if the server refuses or cannot be reached.
    """
    name = parse_name(f"{SCHEME}{repo}")
    if name is None or name.kind != "model" or name.path or name.revision:
        raise setting_error(setting, repo, "must be a model's name on the Hugging Face Hub", proposal="me/my-model")
    name = replace(name, text=repo)
    library = import_library(setting, name)
    api = library.HfApi(endpoint=endpoint(library))
    try:
        api.create_repo(repo, private=is_private or None, exist_ok=True, repo_type="model")
        files: dict[str, Path | bytes] = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*"))}
        added = [
            library.CommitOperationAdd(path_in_repo=path, path_or_fileobj=content)
            for path, content in {**files, **extra_files}.items()
            if isinstance(content, bytes) or content.is_file()
        ]
        commit = api.create_commit(repo, added, commit_message="Exported by meshtrainer", repo_type="model")
    except Exception as error:
        if _is_disk_error(error):
            raise
        raise as_user_error(error, name, setting, is_upload=True) from error
    return str(commit.commit_url)


# ---------------------------------------------------------------------------------------------------------------
# The library, and its errors


def import_library(setting: str, name: HubName) -> Any:
    """Import `huggingface_hub` and return it.  Raises UserError, naming `setting`, if it is not installed."""
    try:
        library = importlib.import_module("huggingface_hub")
        for module in ("constants", "errors"):
            importlib.import_module(f"huggingface_hub.{module}")
    except ImportError as error:
        rule = "names a repository of the Hugging Face Hub, which needs the library huggingface_hub"
        raise setting_error(setting, name.shown, rule, fix="pip install 'meshtrainer[hf]'") from error
    return library


def endpoint(library: Any) -> str:
    """Return the URL of the server: `HF_ENDPOINT`, or else the Hub's."""
    return (os.environ.get("HF_ENDPOINT") or str(library.constants.ENDPOINT)).rstrip("/")


def _is_offline(library: Any) -> bool:
    value = os.environ.get("HF_HUB_OFFLINE")
    return bool(library.constants.HF_HUB_OFFLINE) if value is None else value.upper() in _TRUE_VALUES


def as_user_error(error: Exception, name: HubName, setting: str, is_upload: bool = False) -> UserError:
    """Return the UserError for an error that the library raised: the server's reason, and what to do.

    is_upload: whether the error occurred during an upload.
    """
    library: Any = importlib.import_module("huggingface_hub")
    errors, server, kind = library.errors, endpoint(library), name.kind
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # why the library looked for the file in the cache
    page = f"{server}/{'datasets/' if kind == 'dataset' else ''}{name.repo}"
    login = "log in with `hf auth login`, or set HF_TOKEN"
    if is_upload and (_status(error) in (401, 403) or isinstance(error, errors.LocalTokenNotFoundError)):
        rule = f"{server} denies write access ({_reason(error)})"
        return setting_error(setting, name.shown, rule, fix=f"{login}, with a token that may write to {name.repo}")
    if isinstance(error, errors.GatedRepoError):
        rule = f"is gated: {server} requires permission to access this {kind}"
        return setting_error(setting, name.shown, rule, fix=f"ask for access at {page}, and {login}")
    if isinstance(error, errors.RepositoryNotFoundError):
        rule = f"{server} has no {kind} {name.repo}, or you have no access to it"
        return setting_error(setting, name.shown, rule, fix=f"check the name; if it is private, {login}")
    if isinstance(error, errors.RevisionNotFoundError):
        rule = f"{kind} {name.repo} has no revision {default_revision(name)}"
        return setting_error(setting, name.shown, rule, fix=f"see {page}/tree/main for its branches and tags")
    if isinstance(error, errors.OfflineModeIsEnabled):
        rule = f"is not in the cache, {cache_folder()}, and HF_HUB_OFFLINE is set"
        return setting_error(setting, name.shown, rule, fix="unset it once to download, or download on another machine")
    if isinstance(error, errors.HFValidationError):
        return setting_error(
            setting, name.shown, f"is not a valid Hub name ({_reason(error)})", proposal="Qwen/Qwen3-0.6B"
        )
    if _status(error) in (401, 403):
        rule = f"{server} denies access ({_reason(error)})"
        return setting_error(setting, name.shown, rule, fix=f"{login}, with a token that may read {name.repo}")
    if is_temporary(error):
        rule = f"{server} cannot be reached ({_reason(error)})"
        fix = "try again later, set HF_ENDPOINT to a mirror, or give a local folder"
        return setting_error(setting, name.shown, rule, fix=fix)
    return setting_error(setting, name.shown, f"{server} reports an error ({_reason(error)})", fix=f"see {page}")


def is_temporary(error: Exception) -> bool:
    """Return whether a retry may help: the server or the network is down, or a download was corrupted."""
    status = _status(error)
    if status is not None:
        return status >= 500 or status in (408, 425, 429)
    if isinstance(error, ValueError) or type(error).__name__ in ("OfflineModeIsEnabled", "LocalTokenNotFoundError"):
        return False
    library = type(error).__module__.partition(".")[0]
    return isinstance(error, OSError) or library in ("httpx", "httpx2", "httpcore", "requests")


def _status(error: Exception) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _reason(error: Exception) -> str:
    status = _status(error)
    if status is not None:
        return f"the server says {status}"
    said = getattr(error, "server_message", None)
    return (" ".join(said.split()) if said else reason_of(error)).rstrip(".")


def _is_disk_error(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in _DISK_ERRORS
