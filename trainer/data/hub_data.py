"""Finds and fetches the dataset files on the Hugging Face Hub that an hf:// URL names, and pins the URL to a commit.

    hf://datasets/org/name                                   the `train` split of the default configuration
    hf://datasets/org/name?config=en&split=validation        another configuration or split
    hf://datasets/org/name@refs%2Fconvert%2Fparquet/en/*     files of a revision, selected by path, folder or glob
    hf://datasets/org/name?column=content                    the column with the text, in place of `data.text_key`

Configurations and splits are those declared in the repository's README.md, or else those suggested by the paths of its
files, as in the `datasets` library: https://huggingface.co/docs/hub/datasets-data-files-configuration.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import yaml

from trainer import hub
from trainer.data.records import DOCUMENT_SUFFIXES, InputFile, kind_of
from trainer.errors import setting_error

if TYPE_CHECKING:
    from trainer.config.schema import DataSection

_OPTIONS = ("config", "split", "column")

_SPLITS = {
    "train": "train|training",
    "validation": "validation|valid|dev|val",
    "test": "test|testing|eval|evaluation",
}
"""For each split, the words in a file's path that identify it, as in `data/train-00000-of-00002.parquet`."""


@dataclass(frozen=True)
class HubData:
    """The files that the URL of a dataset names.

    repository: the repository, at one commit.
    files: the repository's entries for the files, in the order in which they are read.
    column: the name of the column with the text, or None for `data.text_key`.
    """

    repository: hub.Repository
    files: Sequence[hub.HubFile]
    column: str | None

    def paths(self) -> list[str]:
        """Return the files' paths in the cache, whether or not the files have been fetched."""
        return [str(self.repository.folder / file.path) for file in self.files]

    def inputs(self, key: str) -> list[InputFile]:
        """Return the files that hold documents, identified by their checksums.

        key: the setting that names the dataset, for messages.
        """
        inputs = []
        for file, path in zip(self.files, self.paths(), strict=True):
            kind, compression = kind_of(file.path) or ("tokens", "")
            if kind != "tokens":
                inputs.append(InputFile(path, kind, compression, file.size, 0, key, file.checksum))
        return inputs

    def names(self) -> list[hub.HubName]:
        """Return the name of each file on the Hub."""
        return [replace(self.repository.name, path=file.path, options="") for file in self.files]

    def settings(self, data: DataSection) -> DataSection:
        """Return the data settings, with `data.text_key` replaced by the column that the URL specifies, if any."""
        return data if self.column is None else replace(data, text_key=self.column)

    def fetch(self) -> None:
        """Download the files that are missing.  Raises UserError; see `hub.Repository.fetch`."""
        self.repository.fetch(self.files)


def find_data(url: str, key: str) -> HubData:
    """Return the files that the URL of a dataset names.  Downloads at most the list of files and README.md.

    Raises UserError that names the setting `key` if no files are found.
    """
    name = _parse(url, key)
    options = dict(urllib.parse.parse_qsl(name.options, keep_blank_values=True))
    repository = hub.open_repository(name, key)
    if name.path:
        chosen = [
            file
            for file in repository.files
            if f"{file.path}/".startswith(f"{name.path}/") or fnmatchcase(file.path, name.path)
        ]
        if unused := [option for option in ("config", "split") if option in options]:
            rule = f"names files by their path, so it cannot also name a {' or a '.join(unused)}"
            raise setting_error(key, url, rule, fix=f"leave out the path, or {' and '.join(unused)}")
    else:
        chosen = _files_of_split(repository, options.get("config"), options.get("split", "train"), url, key)
    usable = [file for file in chosen if _is_data(file.path)]
    if not usable:
        paths = ", ".join(file.path for file in (chosen or repository.files)[:8])
        rule = f"names no file that ends in {DOCUMENT_SUFFIXES}; there are {paths or 'none'}"
        raise setting_error(key, url, rule, fix=f"name a path in it: hf://datasets/{name.repo}/PATH")
    return HubData(repository, usable, options.get("column"))


def _parse(url: str, key: str) -> hub.HubName:
    name = hub.parse_name(url)
    if name is None or name.kind != "dataset":
        rule = "is not a dataset on the Hugging Face Hub"
        raise setting_error(key, url, rule, proposal="hf://datasets/roneneldan/TinyStories")
    for option in urllib.parse.parse_qs(name.options, keep_blank_values=True):
        if option not in _OPTIONS:
            raise setting_error(key, url, f"has no option {option}; the options are {', '.join(_OPTIONS)}")
    return name


def _files_of_split(
    repository: hub.Repository, config: str | None, split: str, url: str, key: str
) -> list[hub.HubFile]:
    """Return the files of one split, according to README.md or the paths of the files.

    config: the configuration; None for the default one.

    Raises UserError if there is no such configuration or split.
    """
    declared = _declared_configs(repository)
    if declared:
        names = [str(declaration.get("config_name", "default")) for declaration in declared]
        marked = [name for name, declaration in zip(names, declared, strict=True) if declaration.get("default")]
        default = marked[0] if marked else None
        default = default or ("default" if "default" in names else names[0] if len(names) == 1 else None)
        chosen = config or default
        if chosen is None or chosen not in names:
            rule = f"has the configurations {', '.join(names)}" + (
                f", not {config}" if config else "; name one of them"
            )
            raise setting_error(key, url, rule, proposal=_with_option(url, "config", names[0]))
        patterns = _split_patterns(declared[names.index(chosen)])
        if patterns is not None:
            if split not in patterns:
                rule = f"has the splits {', '.join(patterns)}, not {split}"
                raise setting_error(key, url, rule, proposal=_with_option(url, "split", next(iter(patterns))))
            return [file for pattern in patterns[split] for file in repository.files if _matches(file.path, pattern)]
        config = None
    files = [file for file in repository.files if _is_data(file.path)]
    if config is not None:
        files_in_config = [file for file in files if config in file.path.split("/")[:-1]]
        if not files_in_config:
            folders = sorted({file.path.split("/")[0] for file in files if "/" in file.path})
            rule = f"has no configuration {config}" + (f"; its folders are {', '.join(folders)}" if folders else "")
            raise setting_error(key, url, rule)
        files = files_in_config
    existing = {}
    for name, words in _SPLITS.items():
        pattern = re.compile(rf"(?:^|[-._ 0-9/])(?:{words})(?:[-._ 0-9/]|$)")
        if split_files := [file for file in files if pattern.search(file.path.lower())]:
            existing[name] = split_files
    if not existing:
        existing = {"train": files}
    if split not in existing:
        rule = f"has the splits {', '.join(existing)}, not {split}"
        raise setting_error(key, url, rule, proposal=_with_option(url, "split", next(iter(existing))))
    return existing[split]


_NOT_DATA = ("README.md", "LICENSE.txt", "dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
"""Names of files that hold no documents, despite their suffix."""


def _is_data(path: str) -> bool:
    kind, name = kind_of(path), path.rpartition("/")[2]
    return kind is not None and kind[0] != "tokens" and name not in _NOT_DATA and not name.startswith(".")


def _matches(path: str, pattern: str) -> bool:
    """Return whether a path matches a pattern from README.md, in which `**` crosses folders and `*` does not."""
    expression = re.escape(pattern.removeprefix("./"))
    expression = expression.replace(r"\*\*/", "(?:.*/)?").replace(r"\*\*", ".*").replace(r"\*", "[^/]*")
    return re.fullmatch(expression, path) is not None


def _declared_configs(repository: hub.Repository) -> list[Mapping[str, Any]]:
    """Return the configurations that README.md declares.  There may be none."""
    from huggingface_hub.repocard import metadata_load  # slow to import

    readme = next((file for file in repository.files if file.path == "README.md"), None)
    if readme is None:
        return []
    repository.fetch([readme])
    try:
        metadata = metadata_load(repository.folder / "README.md") or {}
    except (ValueError, yaml.YAMLError):  # it has none that can be read
        return []
    configs = metadata.get("configs")
    return [config for config in configs if isinstance(config, Mapping)] if isinstance(configs, list) else []


def _split_patterns(config: Mapping[str, Any]) -> dict[str, list[str]] | None:
    """Return the patterns for the files of each split of a declared configuration, or None if it names no files."""
    files = config.get("data_files")
    folder = str(config.get("data_dir") or "").strip("/")
    if files is None:
        return {"train": [f"{folder}/**"]} if folder else None
    if isinstance(files, Mapping) and "path" not in files:  # the paths by split
        files = [{"split": split, "path": paths} for split, paths in files.items()]
    patterns: dict[str, list[str]] = {}
    for entry in files if isinstance(files, list) else [files]:
        split, paths = (entry.get("split"), entry.get("path")) if isinstance(entry, Mapping) else (None, entry)
        for path in paths if isinstance(paths, list) else [paths]:
            if isinstance(path, str):
                patterns.setdefault(str(split or "train"), []).append(f"{folder}/{path}" if folder else path)
    return patterns


def _with_option(url: str, option: str, value: str) -> str:
    location, _, query = url.partition("?")
    other_options = [(name, text) for name, text in urllib.parse.parse_qsl(query) if name != option]
    return f"{location}?{urllib.parse.urlencode([*other_options, (option, value)])}"
