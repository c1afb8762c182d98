"""The pictures of a drift report, as PNG."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .results import STOCK, Cell, Report

# Okabe and Ito's colours, which can be told apart with any kind of colour vision.
_COLOURS = {STOCK: "#d55e00", "positions": "#e69f00", "padding_free": "#0072b2", "batch_invariant": "#009e73"}
_DPI = 144
_MANY = 8  # levels and settings in a legend, beyond which only levels are told apart


def plots(report: Report) -> dict[str, bytes]:
    """By file name, the pictures of a report."""
    return {"scores.png": _scores(report), "logits.png": _logits(report), "first_token.png": _first_token(report)}


def labels(report: Report) -> list[str]:
    """Names of the cells, without what they have in common."""
    parts = [[*map(str, astuple(cell.setting)[:-1]), f"batch {cell.setting.batch_size}"] for cell in report.cells]
    varying = [i for i in range(6) if len({row[i] for row in parts}) > 1] or [2, 4]
    return [", ".join(row[i] for i in varying) for row in parts]


def _scores(report: Report) -> bytes:
    """Single against batched, a line for each cell; without references, rows changed."""
    names, cells = labels(report), report.cells
    places = range(len(cells), 0, -1)
    colours = [_COLOURS[cell.setting.level] for cell in cells]

    def draw(axes: Any) -> None:
        axes.set_yticks(places, names, fontsize=8)
        axes.set_ylim(0.4, len(cells) + 0.6)
        axes.grid(axis="x", alpha=0.3)
        if not report.metrics:
            axes.barh(places, [cell.rows_changed for cell in cells], color=colours, height=0.6)
            axes.set_xlim(0, max(1, *(cell.rows_changed for cell in cells)) * 1.1)
            axes.set_xlabel(f"rows whose answer changed, of {cells[0].n}")
            return
        metric = report.metrics[0]
        for y, cell, colour in zip(places, cells, colours, strict=True):
            single, batched = cell.single[metric], cell.batched[metric]
            low, high = cell.drift_interval or (0.0, 0.0)
            axes.plot([single + low, single + high], [y, y], color=colour, alpha=0.35, linewidth=5)
            axes.plot(single, y, "o", color="white", markeredgecolor="black", markersize=8, zorder=3)
            axes.plot(batched, y, "o", color=colour, markersize=5, zorder=4)
        axes.plot([], [], "o", color="white", markeredgecolor="black", markersize=8, label="one row at a time")
        axes.plot([], [], "o", color="gray", markersize=5, label="in batches")
        axes.plot([], [], color="gray", alpha=0.5, linewidth=5, label="95 % interval of the drift")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=8, frameon=False)
        axes.set_xlabel(f"{metric} (n = {cells[0].n})")

    return _drawn(draw, 1.6 + 0.3 * len(cells))


def _logits(report: Report) -> bytes:
    """The largest difference of a logit of each row against its padding, on a logarithmic scale that has a zero."""
    everything = [d for cell in report.cells for d in cell.largest_logit if 0 < d < math.inf]
    floor = min(everything, default=1e-6) / 4

    def draw(axes: Any) -> None:
        for name, colour, marker, cells in _series(report):
            x = [pads for cell in cells for pads in cell.padding]
            y = [difference for cell in cells for difference in cell.largest_logit]
            axes.scatter(x, y, s=14, alpha=0.6, color=colour, marker=marker, label=name, linewidths=0)
        axes.set_yscale("symlog", linthresh=floor, linscale=0.5)
        axes.set_ylim(-floor / 4, max(everything, default=1e-6) * 4)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.grid(alpha=0.3)
        axes.set_xlabel("pads in front of or behind the row (tokens)")
        axes.set_ylabel("largest |Δ logit| of the row")
        _legend(axes)

    return _drawn(draw, 4.2)


def _first_token(report: Report) -> bytes:
    """Where answers part, over the cells of a series."""
    series = [
        (name, colour, [token for cell in cells for token in cell.first_tokens])
        for name, colour, _, cells in _series(report)
    ]
    series = [one for one in series if one[2]]

    def draw(axes: Any) -> None:
        axes.set_xlabel("first generated token that differs, counted from 0")
        axes.set_ylabel("rows")
        if not series:
            axes.text(0.5, 0.5, "no generated answer changed", ha="center", va="center", transform=axes.transAxes)
            axes.set_xticks([])
            axes.set_yticks([])
            return
        last = max(max(tokens) for _, _, tokens in series)
        width = max(1, (last + 1) // 32)
        bins = [edge - 0.5 for edge in itertools.takewhile(lambda e: e <= last + width, itertools.count(0, width))]
        axes.hist(
            [tokens for *_, tokens in series],
            bins=bins,
            stacked=True,
            color=[colour for _, colour, _ in series],
            label=[name for name, *_ in series],
            edgecolor="white",
            linewidth=0.5,
        )
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_xlim(-1, max(10, last + 1))
        axes.grid(axis="y", alpha=0.3)
        _legend(axes)

    return _drawn(draw, 4.2)


def _series(report: Report) -> list[tuple[str, str, str, list[Cell]]]:
    """Cells that are drawn alike, with name, colour and marker: by level and data type, or if too many by level."""
    keys = dict.fromkeys((cell.setting.level, cell.setting.dtype) for cell in report.cells)
    by_level = len(keys) > _MANY
    markers = dict(zip(dict.fromkeys(dtype for _, dtype in keys), "os^", strict=False))
    found = []
    for level, dtype in dict.fromkeys((level, "") for level, _ in keys) if by_level else keys:
        cells = [c for c in report.cells if c.setting.level == level and dtype in ("", c.setting.dtype)]
        found.append((f"{level}, {dtype}" if dtype else level, _shade(level, dtype), markers.get(dtype, "o"), cells))
    return found


def _shade(level: str, dtype: str) -> str:
    """The colour of a level, paler for other data types than float32."""
    strength = {"bfloat16": 0.62, "float16": 0.4}.get(dtype, 1.0)
    numbers = (int(_COLOURS[level][i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - strength * (255 - number)):02x}" for number in numbers)


def _legend(axes: Any) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)


def _drawn(draw: Callable[[Any], None], height: float) -> bytes:
    figure = Figure(figsize=(8.5, height), dpi=_DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    draw(figure.add_subplot())
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
