"""Generates the report page for a coordinate check: how the magnitude of activations depends on a model's width."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from trainer.report.charts import COLORS, RUN_COLORS, chart_style, format_tick
from trainer.report.page import STYLE


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
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
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
