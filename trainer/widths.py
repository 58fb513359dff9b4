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
import base64
import io
import itertools
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

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
from trainer.report.figures import COLORS, RUN_COLORS, chart_style, format_tick
from trainer.tables import table_lines

if TYPE_CHECKING:
    import torch

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


# ---------------------------------------------------------------------------------------------------------------
# The page


@dataclass(frozen=True)
class WidthCurves:
    """Mean absolute activations of each layer at several widths of a model, in one parametrization."""

    name: str
    """The parametrization, such as `with optim.base_model`."""
    field: str
    """The model field whose values are `widths`; the other fields of `optim.base_model` are scaled with it."""
    widths: Sequence[int]
    at_init: Mapping[str, Sequence[float]]
    """The activations at initialization: one number per width, by layer."""
    after_steps: Mapping[str, Sequence[float]]
    """The activations after the training steps, in the same form."""

    @property
    def layers(self) -> list[str]:
        return list(self.after_steps)

    def exponent(self, layer: str) -> float:
        """Return the fitted exponent p: after the steps, the layer's activations grow roughly as width ** p."""
        return float(np.polyfit(np.log(self.widths), np.log(self.after_steps[layer]), 1)[0])


_STYLE = (resources.files("trainer.report") / "page.css").read_text(encoding="utf-8")


def render_widths_page(title: str, curves: Sequence[WidthCurves], steps: int) -> str:
    """Return a self-contained HTML page with a chart and a table that compare the parametrizations."""
    picture = base64.b64encode(draw_widths(curves, steps)).decode()
    headers = "".join(f"<th>{escape(curve.name)}</th>" for curve in curves)
    rows = "".join(
        f"<tr><td>{escape(layer)}</td>"
        + "".join(f"<td>{curve.exponent(layer):+.2f}</td>" for curve in curves)
        + "</tr>"
        for layer in curves[0].layers
    )
    text = (
        f"Mean absolute activation of each layer, at initialization and after {steps} steps. "
        "If a layer's line slopes upward after the steps but not at initialization, its updates grow with the width, "
        "and wider models need a lower learning rate."
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><main>\n"
        f'<header><h1>{escape(title)}</h1><p class="muted">{escape(text)}</p></header>\n'
        f'<section class="card"><img style="width: 100%" alt="{escape(title)}" src="data:image/png;base64,{picture}">'
        f'</section>\n<section class="card"><h2>Growth exponent p: activations ~ width^p</h2>'
        f"<table><thead><tr><th>layer</th>{headers}</tr></thead><tbody>{rows}</tbody></table></section>\n"
        f"<footer>Written {time.strftime('%Y-%m-%d %H:%M:%S')} by meshtrainer.</footer></main></body></html>\n"
    )


def draw_widths(curves: Sequence[WidthCurves], steps: int) -> bytes:
    """Return a PNG with two charts per parametrization: the activations at initialization, and after the steps."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    with chart_style():
        figure = Figure(figsize=(11.5, 3.3 * len(curves)), dpi=130, facecolor="white", layout="constrained")
        grid = figure.subplots(len(curves), 2, sharex=True, sharey=True, squeeze=False)
        for row, curve in zip(grid, curves, strict=True):
            for axes, when, magnitudes in zip(
                row,
                ("at initialization", f"after {steps} steps"),
                (curve.at_init, curve.after_steps),
                strict=True,
            ):
                for number, (layer, values) in enumerate(magnitudes.items()):
                    color = COLORS[RUN_COLORS[number % len(RUN_COLORS)]]
                    axes.plot(curve.widths, values, "o-", color=color, markersize=3, linewidth=1.3, label=layer)
                axes.set_title(f"{curve.name}, {when}", loc="left", fontweight="bold", pad=7)
                axes.set_xscale("log")
                axes.set_yscale("log")
                axes.set_xticks(curve.widths, [str(width) for width in curve.widths])
                axes.xaxis.set_minor_locator(NullLocator())
                axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value)))
                axes.yaxis.set_minor_formatter(NullFormatter())
                axes.grid(axis="y")
                axes.set_xlabel(f"model.{curve.field}")
        grid[0][1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8.0)
        file = io.BytesIO()
        figure.savefig(file, format="png")
    return file.getvalue()


if __name__ == "__main__":
    sys.exit(command_line())
