"""A report as files, as a table on the terminal, and beside another one."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from dataclasses import astuple
from pathlib import Path
from typing import Literal

from jinja2 import Environment, PackageLoader
from rich.table import Table
from rich.text import Text

from ..demo import parting
from ..errors import InputError
from ..storage import write_atomically
from .plots import plots
from .results import Cell, Report

CAPTIONS = {
    "scores.png": "Score of each cell, one row at a time and in batches",
    "logits.png": "The largest difference of a logit of each row against the number of its pads",
    "first_token.png": "Where generated answers part from those of the lone rows",
}
LEGEND = (
    "Each cell compares batches with the same rows one at a time, by the same model, data type and level. Drift: score "
    "in batches less score one at a time, with its 95 % paired bootstrap interval. |Δ logit|: absolute difference of "
    "a logit at a real token. |Δ log-prob|: absolute difference of the log-probability of the next token. Means are of "
    "the prompt / along the reference answer (or without one the lone answer) laid behind it."
)


def write(report: Report, directory: Path) -> None:
    """Write ``report.json``, ``report.md``, ``report.html`` and the pictures, each whole or not at all. The HTML holds
    its pictures and needs no network; all text of models and data in it is escaped."""
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / "report.json", _encoded(report.to_json()))  # first: the rest follows from it
    pictures = plots(report)
    for name, content in pictures.items():
        write_atomically(directory / name, content)
    environment = Environment(
        loader=PackageLoader("rope_pad_fix.drift"),
        autoescape=lambda name: name is not None and ".html" in name,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["markdown"] = _markdown
    texts = {
        "report": report,
        "summary": summary(report),
        "facts": facts(report),
        "header": header(report),
        "rows": [(cell, line(report, cell)) for cell in report.cells],
        "captions": CAPTIONS,
        "legend": LEGEND,
        "parting": parting,
        "pictures": {name: base64.b64encode(content).decode() for name, content in pictures.items()},
    }
    for name in ("report.html", "report.md"):
        write_atomically(directory / name, _encoded(environment.get_template(f"{name}.j2").render(texts)))


def read(path: Path) -> Report:
    """The report in a ``report.json``, or in the directory that holds one.

    Raises:
        InputError: it cannot be read.
    """
    try:
        path = path / "report.json" if path.is_dir() else path
        return Report.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: cannot be read: it is not UTF-8") from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (AttributeError, IndexError, RecursionError) as error:
        raise InputError(f"{path}: a damaged drift report: {error}") from error


def exceeding(report: Report, limit: float) -> list[Cell]:
    """Cells whose absolute drift is more than a limit. Without references there is no drift, and there are none."""
    return [cell for cell in report.cells if cell.drift is not None and not abs(cell.drift) <= limit]


def summary(report: Report) -> str:
    """The report in one sentence or two."""
    cells = report.cells
    changed = [cell for cell in cells if cell.rows_changed]
    text = f"Answers change in {len(changed)} of {len(cells)} cells."
    scored = [cell for cell in cells if cell.drift is not None]
    if scored:
        worst = max(scored, key=lambda cell: abs(cell.drift or 0.0))
        if worst.drift:
            text += f" The largest drift of {report.metrics[0]} is {worst.drift:+.4f}: {worst.setting}."
        else:
            text += f" No cell drifts in {report.metrics[0]}."
    return text


def facts(report: Report) -> str:
    """What was run, and where."""
    where = report.environment
    answers = f"{report.max_new_tokens} new tokens at most, greedy" if report.max_new_tokens else "by log-likelihood"
    versions = ", ".join(f"{name} {where[name]}" for name in ("torch", "transformers", "rope-pad-fix") if name in where)
    machine = f"{where.get('date', '')}, {where.get('machine', '')}, {where.get('threads', '?')} threads"
    return (
        f"{report.cells[0].n} rows of {report.data}, task {report.task}, {answers}; order of rows: {report.order}; "
        f"seed {report.seed}. {machine}, {versions}."
    )


def header(report: Report) -> list[str]:
    """Names of the columns of `line`."""
    metric = [report.metrics[0], "drift"] if report.metrics else []
    settings = ["dtype", "attention", "level", "path", "padding", "batch"]
    differences = ["largest |Δ logit|", "mean", "|Δ log-prob|"]
    return [*settings, *metric, "rows changed", "first token", *differences, "pads", "tokens/s", "memory"]


def line(report: Report, cell: Cell) -> list[str]:
    """One cell as text, for a table."""
    texts = [*map(str, astuple(cell.setting))]
    if report.metrics:
        metric = report.metrics[0]
        low, high = cell.drift_interval or (0.0, 0.0)
        interval = f" [{low:+.3f}, {high:+.3f}]" if (low, high) != (0.0, 0.0) else ""
        texts += [f"{cell.single[metric]:.3f} → {cell.batched[metric]:.3f}", f"{_signed(cell.drift)}{interval}"]
    both = [part for part in (cell.prompt, cell.continuation) if part is not None]
    first = "" if cell.median_first_token is None else f"{cell.median_first_token:g}"
    return [
        *texts,
        f"{cell.rows_changed} of {cell.n}",
        first,
        _small(_largest(part.largest_logit for part in both)),
        " / ".join(_small(part.mean_logit) for part in both),
        " / ".join(_small(part.mean_log_prob) for part in both),
        f"{cell.padding_fraction:.0%}",
        f"{cell.single_tokens_per_second:.0f} → {cell.tokens_per_second:.0f}",
        f"{cell.peak_memory / 2**30:.2f} GiB",
    ]


def table(report: Report) -> Table:
    """The cells, for the terminal; what all have in common stands below."""
    names, lines = header(report), [line(report, cell) for cell in report.cells]
    constant = [i for i in range(6) if i not in (2, 4) and len({row[i] for row in lines}) == 1]
    dropped = {*constant, *map(names.index, ("first token", "mean", "|Δ log-prob|", "memory"))}
    common = ", ".join(f"{names[i]} {lines[0][i]}" for i in constant)
    shown = Table(
        title=Text(f"Drift of {report.model}\n{summary(report)}", style="table.title"),
        caption=Text("\n".join(filter(None, (common, facts(report)))), style="table.caption"),
    )
    for i, name in enumerate(names):
        if i not in dropped:
            heading = Text(name.replace(" ", "\n", 1))
            justify: Literal["left", "right"] = "left" if i < 6 else "right"
            shown.add_column(heading, justify=justify, overflow="fold", no_wrap=name == "level")
    for cell, row in zip(report.cells, lines, strict=True):
        texts = [Text(text) for i, text in enumerate(row) if i not in dropped]
        shown.add_row(*texts, style="" if cell.rows_changed else "green")
    return shown


def comparison(old: Report, new: Report) -> Table:
    """The cells that two reports share, side by side, and those that only one has.

    Raises:
        InputError: they measure different things.
    """
    for name in ("task", "metrics"):
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            raise InputError(f"the reports differ in {name}, {before!r} and {after!r}: they cannot be compared")
    mine = {cell.setting: cell for cell in old.cells}
    theirs = {cell.setting: cell for cell in new.cells}
    title = Text(f"{old.model} → {new.model}", style="table.title")
    shown = Table(title=title, caption="speed-up: tokens/s, new over old")
    for name in ("cell", "drift", "rows changed", "largest |Δ logit|", "speed-up"):
        shown.add_column(name, justify="left" if name == "cell" else "right")
    for setting in dict.fromkeys((*mine, *theirs)):
        before_cell, after_cell = mine.get(setting), theirs.get(setting)
        if before_cell is None or after_cell is None:
            shown.add_row(Text(str(setting)), "only new" if before_cell is None else "only old", style="dim")
            continue
        pair = (before_cell, after_cell)
        earlier, later = before_cell.tokens_per_second, after_cell.tokens_per_second
        shown.add_row(
            Text(str(setting)),
            " → ".join(_signed(cell.drift) for cell in pair),
            " → ".join(f"{cell.rows_changed} of {cell.n}" for cell in pair),
            " → ".join(_small(_largest(cell.largest_logit)) for cell in pair),
            f"{later / earlier:.2f}x" if earlier else "-",
        )
    return shown


def _signed(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:+.4f}" if value else "0"


def _small(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _largest(values: Iterable[float]) -> float:
    """The largest value, 0 of none; NaN if there is one."""
    return max(values, key=lambda value: (value != value, value), default=0.0)


def _markdown(text: str) -> str:
    """Text that is safe in a cell of a Markdown table, on one line."""
    return re.sub(r"([\\`*|<])", r"\\\1", " ".join(text.split()))


def _encoded(text: str) -> bytes:
    """As UTF-8; lone surrogates, which data can hold, as the escapes that JSON has for them."""
    return text.encode(errors="backslashreplace")
