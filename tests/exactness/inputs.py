"""The data and weights that the rows of the table and the pairs of the compatibility page are trained on."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

from tests.exactness.table import ALL_KINDS, BASE
from tests.helpers.chats import CHATML, conversation, write_tokenizer

_WORDS = ["Hi", "Yes", "No", "two", "four", "Bye"]


def _text(number: int) -> str:
    return " ".join(_WORDS[(number + k) % 6] for k in range(1 + number % 5))


def write_data(folder: Path) -> None:
    """Write documents of many lengths, chats, preference pairs, labelled answers and texts, and a chat tokenizer."""
    numbers = range(40)
    prompts, answers = [_text(3 * number) for number in numbers], [_text(number) for number in numbers]
    contents: dict[str, list[dict[str, Any]]] = {
        "documents": [{"text": f"{number}: {_text(number)}. " * (1 + number % 3)} for number in range(400)],
        "others": [{"text": f"{_text(number)}, or {_text(number + 1)}?"} for number in range(200)],
        "chats": [{"messages": conversation(*(_text(n + turn) for turn in range(2 + 2 * (n % 2))))} for n in numbers],
        "pairs": [
            {"prompt": prompts[n], "chosen": answers[n], "rejected": answers[(n + 1) % len(answers)]} for n in numbers
        ],
        "labelled": [{"prompt": prompts[n], "completion": answers[n], "label": n % 3 != 0} for n in numbers],
        "classes": [{"text": answers[n], "label": n % 2} for n in numbers],
    }
    for name, lines in contents.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_tokenizer(folder / "tokenizer", CHATML)


def write_weights(folder: Path, name: str) -> None:
    """Write weights of a kind of model into `folder / "weights"`, in Hugging Face's format. Needs the data."""
    from tests.helpers import hf_models
    from trainer import Trainer, load_config
    from trainer.export import export_checkpoint

    kind = ALL_KINDS[name]
    target = folder / "weights" / name
    if kind.transformers_model:
        hf_models.folder_of(target, kind.transformers_model, **dict(kind.changes))
        (target / "chat_template.jinja").unlink()
        (target / "tokenizer_config.json").unlink()
        return
    run_dir = folder / "weights" / f"{name}-run"
    own = [f"model.name={name}", *kind.fields, "run.selfcheck=false", f"run.dir={run_dir}", "optim.lr=0.0"]
    trainer = Trainer(load_config("llama_small", [*(item.format(folder=folder) for item in BASE), *own]))
    next(islice(trainer.steps(), 1))
    saved = trainer.save_checkpoint(wait=True)
    trainer.close()
    export_checkpoint(saved, target)
