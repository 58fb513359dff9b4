"""Check that a model's activations do not grow with its width (muP's coordinate check).

    python -m trainer.widths recipe=llama_small \\
        optim.base_model='{dim: 48, num_heads: 2, num_kv_heads: 2, ffn_dim: 128}'

Trains the model at each width for a few steps, with and without optim.base_model, and writes a page that shows the mean
magnitude of each layer's output activations before and after these steps.  If activations grow with width, each width
needs a different learning rate.  Exits with 1 if they grow markedly even with optim.base_model.

Source: Yang et al. 2022, "Tensor Programs V", arXiv:2203.03466, appendix D.1.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config import RunConfig, load_config
from trainer.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    CommandParser,
    UserError,
    print_stderr,
    print_stdout,
    run_command,
    setting_error,
)
from trainer.files import writing_to
from trainer.tables import table_lines

if TYPE_CHECKING:
    import torch

    from trainer.report.widths import WidthCurves
    from trainer.trainer import Trainer

MAX_EXPONENT = 0.3
"""The check fails if activations after the steps grow faster than the width to this power.  Without muP, the exponent
is usually 0.5 or more."""


def command_line(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = CommandParser(prog="python -m trainer.widths", description=__doc__)
    parser.add_argument(
        "settings", nargs="+", metavar="section.key=value", help="settings as for a run, with recipe=NAME"
    )
    parser.add_argument(
        "--factors", default="1,2,4,8", help="widths as multiples of those in optim.base_model (default: 1,2,4,8)"
    )
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (default: 10)")
    parser.add_argument("--out", default="widths.html", help="path of the page (default: widths.html)")
    options = parser.parse_intermixed_args(argv)
    return run_command(lambda: _check_widths(options))


def _check_widths(options: argparse.Namespace) -> int:
    recipes = [setting.removeprefix("recipe=") for setting in options.settings if setting.startswith("recipe=")]
    if not recipes:
        raise UserError("recipe: none is given\n  for example: recipe=llama_small")
    settings = [setting for setting in options.settings if not setting.startswith("recipe=")]
    factors, page = _parse_factors(options.factors), Path(options.out)
    if page.suffix not in (".html", ".htm"):
        raise setting_error("--out", page, "must end in .html or .htm", page.with_suffix(".html"))
    if not page.absolute().parent.is_dir():
        raise setting_error("--out", page, f"there is no folder {page.parent}", fix="give a path in one that exists")
    if options.steps < 1:
        raise setting_error("--steps", options.steps, "must be at least 1", 1)
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"run.dir={folder}/run", "checkpoint.resume=none", "train.init_from=null", "schedule.name=constant"]
        fixed += ["schedule.warmup_steps=0", "schedule.warmup_ratio=0", f"train.steps={options.steps}", "eval.every=0"]
        config = load_config(recipes[-1], [*settings, *fixed])
        base = config.optim.base_model
        if base is None:
            example = {"dim": 64, "num_heads": 4, "num_kv_heads": 4, "ffn_dim": 128}
            raise setting_error("optim.base_model", None, "must give the widths to multiply", example=example)
        curves = _measure(config, base, factors)
    from trainer.report.widths import render_widths_page

    html = render_widths_page(f"{config.model.name}: activations by width", curves, options.steps)
    try:
        with writing_to("--out", page, len(html.encode())):
            page.write_text(html)
    except OSError as error:
        raise setting_error(
            "--out", page, f"cannot be written ({error.strerror})", fix="give a writable path"
        ) from error
    rows = [[layer, *(f"width^{curve.exponent(layer):+.2f}" for curve in curves)] for layer in curves[0].layers]
    for line in table_lines((f"after {options.steps} steps", *(curve.name for curve in curves)), rows):
        print_stdout(line)
    print_stdout(str(page))
    layer = max(curves[0].layers, key=curves[0].exponent)
    if not curves[0].exponent(layer) <= MAX_EXPONENT:  # also true for NaN
        growth = f"width^{curves[0].exponent(layer):+.2f}"
        print_stderr(
            f"the activations of {layer} grow as {growth} with optim.base_model: the learning rate will not transfer"
        )
        return EXIT_FAILED
    return EXIT_FINISHED


def _parse_factors(text: str) -> list[int]:
    try:
        factors = sorted({int(part) for part in text.split(",")})
    except ValueError:
        factors = []
    if len(factors) < 2 or factors[0] < 1:
        raise setting_error("--factors", text, "must be two or more whole numbers of at least 1", example="1,2,4")
    return factors


def _measure(config: RunConfig, base: dict[str, int], factors: Sequence[int]) -> list[WidthCurves]:
    """Return the magnitudes of activations at each width: first with `optim.base_model`, then without."""
    from trainer.report.widths import WidthCurves

    name = "dim" if "dim" in base else next(iter(base))
    curves = []
    for title, base_model in (("with optim.base_model", base), ("without", None)):
        magnitudes_by_width = []
        for factor in factors:
            model = replace(config.model, **{field: factor * width for field, width in base.items()})
            magnitudes_by_width.append(
                _train_and_measure(replace(config, model=model, optim=replace(config.optim, base_model=base_model)))
            )
        layers = list(magnitudes_by_width[0][0])
        before, after = ({layer: [pair[i][layer] for pair in magnitudes_by_width] for layer in layers} for i in (0, 1))
        curves.append(WidthCurves(title, name, [factor * base[name] for factor in factors], before, after))
    return curves


def _train_and_measure(config: RunConfig) -> tuple[dict[str, float], dict[str, float]]:
    """Train one model, and return its activation magnitudes before and after the steps."""
    from trainer.trainer import Trainer

    trainer = Trainer(config)
    try:
        batches = iter(trainer.loader)
        first_batches = list(itertools.islice(batches, trainer.num_micro_batches))
        before = _activation_magnitudes(trainer, first_batches[0]["tokens"])
        for number in range(config.train.steps):
            micro_batches = list(itertools.islice(batches, trainer.num_micro_batches)) if number else first_batches
            trainer.train_step(micro_batches)
        return before, _activation_magnitudes(trainer, first_batches[0]["tokens"])
    finally:
        trainer.close()


def _activation_magnitudes(trainer: Trainer, tokens: torch.Tensor) -> dict[str, float]:
    """Return the mean absolute output activation of each module that is a unit or part of one, by the module's name."""
    from torch.utils.hooks import RemovableHandle

    from trainer.model.gradients import evaluation_mode

    magnitudes: dict[str, float] = {}

    def record(name: str, module: object, arguments: object, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        magnitudes[name] = float(tensor.float().abs().mean())

    hooks: list[RemovableHandle] = []
    for unit in trainer.units:
        for name, module in zip(unit.names, unit.modules, strict=True):
            hooks.append(module.register_forward_hook(partial(record, name)))
    with evaluation_mode(trainer.model):
        trainer.model(tokens.to(trainer.world.device))
    for hook in hooks:
        hook.remove()
    return magnitudes


if __name__ == "__main__":
    sys.exit(command_line())
