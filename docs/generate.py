"""Generates the reference pages of all settings from the code, and notebooks from the tutorials.

    python docs/generate.py            # write the pages
    python docs/generate.py --check    # only list the stale pages; exits with 1 if there are any

The table in docs/checkpoints.md of the settings that may change when a run resumes is generated too.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config.changes import on_resume
from trainer.config.keys import declared_keys
from trainer.config.messages import type_name
from trainer.config.schema import RunConfig
from trainer.model_spec import ModelSpec
from trainer.objective import all_objectives
from trainer.registry import all_models

FOLDER = Path(__file__).parent
_PAGES = {
    "configuration.md": ("Settings", ("run", "data", "train", "optim", "schedule", "eval")),
    "configuration_scale.md": ("More settings", ("mesh", "fsdp", "checkpoint", "log", "lora", "objective")),
}
_NOTEBOOKS = {
    "notebooks/train_from_scratch.ipynb": "tutorial_scratch.md",
    "notebooks/fine_tune.ipynb": "tutorial_fine_tuning.md",
}
"""The notebooks, and the tutorials that they are generated from."""
_MODELS = "configuration_models.md"
_CHECKPOINTS = "checkpoints.md"
_BEGIN, _END = (
    "<!-- changes on resume: begin, written by python docs/generate.py -->",
    "<!-- changes on resume: end -->",
)
_NOTE = "This page is generated from the code by `python docs/generate.py`."
_INTRO = f"""\
{_NOTE} `--help SECTION` prints the same in a
terminal, and with `recipe=NAME` also the values of that recipe. Set a key on the command line as `section.key=value`,
or in a [recipe file](models.md).

`python -m trainer.run recipe=NAME --print-config` checks a configuration and prints all of its values as a recipe file.
With `--why`, a comment on each value that is not a default says where it came from:

```yaml
data:
  source: tokens  # computed: data.path is given
  holdout: 0.01  # computed: for eval.every, without data.eval_path
optim:
  lr: 0.02  # command line
schedule:
  warmup_steps: 50  # conf/llama_small.yaml
```

A comment names the command line, a recipe file, the `config.yaml` of a run or checkpoint, or the `config.json` of a
model folder. `computed: REASON` is a value that follows from others, from files or from the machine: `derive` in
`trainer/config/derive.py` lists these steps in their order.

Type, limits, what a key needs to have an effect, and whether a resume may change it are declared beside the key, in
`trainer/config/schema.py`; rules about several keys are in `trainer/config/rules.py`.

More settings: [mesh, fsdp, checkpoint, log, lora, objective](configuration_scale.md),
[models](configuration_models.md).
"""


def pages() -> dict[str, str]:
    """Return the content of the generated pages, by file name."""
    all_sections = {section.name for section in dataclasses.fields(RunConfig)}
    listed_sections = {section for _, sections in _PAGES.values() for section in sections}
    missing = all_sections - {"model"} - listed_sections
    assert not missing, f"sections that no page lists: {missing}"
    contents = {}
    for name, (title, sections) in _PAGES.items():
        tables = [_section(section) for section in sections]
        intro = _INTRO if name == "configuration.md" else f"{_NOTE} See also [Settings](configuration.md).\n"
        contents[name] = f"# {title}\n\n{intro}\n" + "\n".join(tables)
    models = [_table(f"model.name={spec.name}", "", declared_keys(spec.config), "model") for spec in _built_in_models()]
    intro = f"{_NOTE} See also [Settings](configuration.md).\n"
    contents[_MODELS] = f"# Fields of the models\n\n{intro}\n" + "\n".join(models)
    before, begin, rest = (FOLDER / _CHECKPOINTS).read_text().partition(_BEGIN)
    _, end, after = rest.partition(_END)
    assert begin, f"{_CHECKPOINTS} has no marker {_BEGIN}"
    assert end, f"{_CHECKPOINTS} has no marker {_END}"
    contents[_CHECKPOINTS] = f"{before}{begin}\n\n{_changes_on_resume()}\n{end}{after}"
    return contents | {name: notebook((FOLDER / page).read_text()) for name, page in _NOTEBOOKS.items()}


def _built_in_models() -> list[ModelSpec]:
    """Return the model specs that `recipes/` registers, by name."""
    specs = sorted(all_models(), key=lambda spec: spec.name)
    return [spec for spec in specs if f"{spec.config.__module__}.".startswith(f"trainer.recipes.{spec.name}.")]


def notebook(page: str) -> str:
    """Return a tutorial as a Jupyter notebook, with cells that run its commands in a shell."""
    cells: list[dict[str, Any]] = []
    for part in re.split(r"((?:^ {4}\S.*\n)+)", page, flags=re.MULTILINE):
        lines = [line.strip() for line in part.strip().splitlines()]
        if not part.startswith("    "):
            cells += [{"cell_type": "markdown", "metadata": {}, "source": part.strip()}] if part.strip() else []
            continue
        source = "\n".join(f"!{line}" for line in lines)
        if lines[0].startswith("{"):
            source = "\n".join(["%%writefile chats.jsonl", *lines * 8])
        source = re.sub(r"^!pip install ", "%pip install -q ", source, flags=re.MULTILINE)
        cells.append({"cell_type": "code", "metadata": {}, "source": source, "outputs": [], "execution_count": None})
    for number, cell in enumerate(cells):
        cell["id"], cell["source"] = f"cell-{number}", cell["source"].splitlines(keepends=True)
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def _changes_on_resume() -> str:
    """Return the table of what happens if a setting differs when a run resumes, by section."""
    columns = {"fixed": ("never", "fixed"), "free": ("free",), "ignored": ("ignored",)}
    lines = ["| section | refused | applies, and is listed at the start | applies |", "|---|---|---|---|"]
    for section, keys in _rules_on_resume().items():
        found = {rule: [key for key, item in keys.items() if item in rules] for rule, rules in columns.items()}
        most = max(columns, key=lambda rule: len(found[rule]))
        others = "all others" if len(found[most]) < len(keys) else "all"
        cells = [others if rule == most else ", ".join(f"`{key}`" for key in found[rule]) for rule in columns]
        lines.append(f"| `{section}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _rules_on_resume() -> dict[str, dict[str, str]]:
    """Return, for the keys of each section, what a resume does with a change (`on_resume`)."""
    keys = declared_keys()
    for spec in _built_in_models():
        keys |= declared_keys(spec.config)
    for objective in all_objectives().values():
        keys |= declared_keys(objective=objective)
    return {
        section.name: {key: on_resume(key, item) for key, item in keys.items() if key.partition(".")[0] == section.name}
        for section in dataclasses.fields(RunConfig)
    }


def _section(name: str) -> str:
    if name == "objective":
        return "\n".join(
            _table(f"objective, for train.objective={kind}", _summary(owner), declared_keys(objective=owner), name)
            for kind, owner in all_objectives().items()
            if dataclasses.fields(owner)
        )
    owner = type(getattr(RunConfig(), name))
    return _table(name, _summary(owner), declared_keys(), name)


def _summary(owner: type) -> str:
    return (owner.__doc__ or "").partition("\n")[0]


def _table(title: str, text: str, keys: Mapping[str, dataclasses.Field[Any]], section: str) -> str:
    header = ["| key | type | default | meaning |", "|---|---|---|---|"]
    lines = [f"## {title}", "", *([text, ""] if text else []), *header]
    for key, item in keys.items():
        owner, _, name = key.partition(".")
        meaning = str(item.metadata.get("meaning", ""))
        if owner == section and (meaning or name != "name"):
            assert meaning, f"{key} has no meaning"
            meaning += f" (needs {item.metadata['needs']})" if "needs" in item.metadata else ""
            kind = str(item.metadata.get("form", type_name(item.type)))
            default = "" if item.default is dataclasses.MISSING else _format(item.default)
            lines.append(f"| `{key}` | {_cell(kind)} | {_cell(default)} | {_cell(meaning)} |")
    return "\n".join(lines) + "\n"


def _format(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def _cell(text: str) -> str:
    """Return the text of a table cell, with the special characters of Markdown and HTML escaped."""
    for char, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|"), ("*", "\\*"), ("_", "\\_")):
        text = text.replace(char, escaped)
    return text


def main(arguments: list[str]) -> int:
    """Write the pages, or only check them, and return the exit code."""
    stale = [name for name, text in pages().items() if _read(FOLDER / name) != text]
    for name in stale:
        if "--check" in arguments:
            print(f"docs/{name} is stale: run python docs/generate.py")
        else:
            (FOLDER / name).write_text(pages()[name])
            print(f"docs/{name}")
    return int(bool(stale) and "--check" in arguments)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
