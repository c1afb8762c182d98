"""The files of a report, its tables, and reports side by side."""

import dataclasses
import io
import itertools
import json
import os
import re

import pytest
from PIL import Image
from rich.console import Console

from rope_pad_fix.drift import Cell, ChangedRow, Difference, InputError, Report, Setting
from rope_pad_fix.drift.report import comparison, exceeding, read, table, write

DAMAGED = '{"schema_version": 1, "cells": [{"drift_interval": [], "continuation": null}]}'
HOSTILE = "<script>alert('x')</script> & | ```"


def cell(level="stock", dtype="float32", padding="left", changed=2, scored=True, **more):
    drift = -0.05 * changed if scored else None
    fields = {
        "setting": Setting(dtype, "sdpa", level, "ids", padding, 8),
        "n": 10,
        "single": {"f1": 0.5, "exact_match": 0.25} if scored else {},
        "batched": {"f1": 0.5 + drift, "exact_match": 0.25} if scored else {},
        "drift": drift,
        "drift_interval": (drift - 0.1, drift + 0.1) if changed and scored else (0.0, 0.0) if scored else None,
        "rows_changed": changed,
        "first_tokens": list(range(changed)),
        "median_first_token": (changed - 1) / 2 if changed else None,
        "prompt": Difference(0.5 * changed, 0.1 * changed, 0.01 * changed),
        "continuation": Difference(0.25 * changed, 0.1, 0.02),
        "padding": list(range(10)),
        "largest_logit": [changed * 10.0**-i for i in range(10)],
        "padding_fraction": 0.375,
        "tokens_per_second": 50.0,
        "single_tokens_per_second": 25.0,
        "peak_memory": 3 << 30,
        "examples": [
            ChangedRow(i, HOSTILE, ["right", HOSTILE], "same, then <b>", "same, too", i) for i in range(changed)
        ],
    }
    return Cell(**fields | more)


def report(cells=None, metrics=("f1", "exact_match"), **more):
    cells = [cell(), cell("batch_invariant", changed=0)] if cells is None else cells
    environment = {"date": "2026-12-01", "machine": "a CPU", "threads": "2", "torch": "2.13.0"}
    fields = {"model": HOSTILE, "data": "rows.jsonl", "task": "squad", "metrics": list(metrics), "order": "given"}
    return Report(**fields | {"max_new_tokens": 32, "seed": 0, "environment": environment, "cells": cells} | more)


def many():
    levels = ("stock", "positions", "padding_free", "batch_invariant")
    kinds = itertools.product(levels, ("float32", "bfloat16", "float16"), ("left", "right"))
    return report([cell(*kind, changed=i % 5) for i, kind in enumerate(kinds)])


def nothing_changed():
    return report([cell("batch_invariant", changed=0), cell("padding_free", changed=0)])


def without_references():
    return report([cell(scored=False), cell("batch_invariant", changed=0, scored=False)], metrics=())


def not_numbers():
    return report([cell(largest_logit=[float("inf")] * 10), cell("batch_invariant", changed=0)])


REPORTS = (report, many, not_numbers, nothing_changed, without_references, lambda: report([cell()]))


def text(renderable):
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(renderable)
    return console.export_text()


@pytest.mark.parametrize("make", REPORTS)
def test_files(tmp_path, make):
    made = make()
    write(made, tmp_path)
    assert read(tmp_path) == read(tmp_path / "report.json") == made
    assert json.loads((tmp_path / "report.json").read_text())["schema_version"] == 1
    for name in ("scores.png", "logits.png", "first_token.png"):
        image = Image.open(tmp_path / name)
        image.load()
        assert len(image.convert("L").getcolors()) > 2, "blank"
    html = (tmp_path / "report.html").read_text()
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    loaded = re.findall(r"""(?:src|href)\s*=\s*["']?([^"'>\s]*)|url\(""", html)
    assert all(address.startswith("data:") for address in loaded), "nothing is loaded from elsewhere"
    assert "http://" not in html
    assert "https://" not in html
    assert html.count("data:image/png;base64,") == 3
    markdown = (tmp_path / "report.md").read_text()
    rows = [line for line in markdown.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(made.cells)
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1, "names of columns hold pipes, too"
    assert "](scores.png)" in markdown
    assert {path.name for path in tmp_path.iterdir()} == {
        *("report.json", "report.md", "report.html"),
        *("scores.png", "logits.png", "first_token.png"),
    }


def test_changed_answers_are_shown_where_they_part(tmp_path):
    write(report(), tmp_path)
    html = (tmp_path / "report.html").read_text()
    assert "same, t<mark>hen &lt;b&gt;</mark>" in html
    assert "same, t<mark>oo</mark>" in html


def test_an_old_file_stays_whole_if_writing_fails(tmp_path, monkeypatch):
    write(report(), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(*paths):
        raise OSError("full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="full"):
        write(many(), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_reports_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match=r"report\.json: cannot be read"):
        read(tmp_path)
    for content, wrong in (
        ("{", "not a drift report"),
        ("[]", "not a drift report"),
        ('{"schema_version": 2}', "of schema version 2; this release reads 1"),
        ('{"schema_version": 1}', "damaged"),
    ):
        (tmp_path / "report.json").write_text(content)
        with pytest.raises(InputError, match=wrong):
            read(tmp_path / "report.json")


def test_table():
    shown = text(table(many()))
    assert "Answers change in 19 of 24 cells" in shown
    assert "0.500 → 0.400" in shown
    assert "2 of 10" in shown
    assert "sdpa" in shown
    assert "Answers change in 1 of 2 cells." in text(table(without_references()))
    assert "No cell drifts in f1." in text(table(nothing_changed()))


def test_limits():
    assert [found.rows_changed for found in exceeding(many(), 0.12)] == [3, 4] * 4 + [3]
    assert exceeding(without_references(), 0.0) == []
    broken = dataclasses.replace(cell(), drift=float("nan"))
    assert exceeding(report([broken]), 0.5) == [broken]


def test_comparison():
    new = report([cell(changed=1, tokens_per_second=75.0), cell("padding_free")])
    shown = text(comparison(report(), new))
    assert "-0.1000 → -0.0500" in shown
    assert "2 of 10 → 1 of 10" in shown
    assert "1.50x" in shown
    assert "only old" in shown
    assert "only new" in shown
    with pytest.raises(InputError, match="differ in task, 'squad' and 'cmrc'"):
        comparison(report(), report(task="cmrc"))
    with pytest.raises(InputError, match=r"differ in metrics, \['f1', 'exact_match'\] and \['rouge'\]"):
        comparison(report(), report(metrics=["rouge"]))
    stopped = report([cell(tokens_per_second=0.0, largest_logit=[])])
    assert "e+00 → 0 " in text(comparison(report(), stopped))
    assert re.search(r"│ +- │", text(comparison(stopped, stopped))), "no ratio to a speed of 0"


def test_names_with_brackets_are_shown_as_they_are():
    hostile = report(model="models/[bold]x[/red]", data="[/rows].json")
    assert "models/[bold]x[/red]" in text(table(hostile))
    assert "[/rows].json" in text(table(hostile))
    assert "models/[bold]x[/red]" in text(comparison(hostile, hostile))


@pytest.mark.parametrize("first", [True, False])
def test_nan_is_the_largest_difference(first):
    nan, number = Difference(float("nan"), 0.0, 0.0), Difference(1.0, 0.0, 0.0)
    parts = {"prompt": nan, "continuation": number} if first else {"prompt": number, "continuation": nan}
    assert " nan " in text(table(report([cell(**parts)])))
    broken = report([cell(largest_logit=[0.0, float("nan"), 1.0])])
    assert "nan → nan" in text(comparison(broken, broken))


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_narrow_table_leaves_nothing_out(width):
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(table(many()))
    assert "…" not in console.export_text()


def test_lone_surrogates_are_kept(tmp_path):
    made = report([cell(examples=[ChangedRow(0, "a\ud800b", [], "c", "d", 0)])])
    write(made, tmp_path / "new" / "directory")
    assert read(tmp_path / "new" / "directory") == made


@pytest.mark.parametrize("content", ["[" * 100_000, '{"schema_version": 1, "cells": 5}', b"\xff", "{}", DAMAGED])
def test_what_is_no_report_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "report.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as error:
        read(tmp_path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)
