"""The demonstration: a real model answers 8 prompts alone and in a padded batch, stock and patched.

`measure` runs the model and returns a `Report`, `problems` judges it, `show` prints it, `run` does all three.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers.utils import logging

from . import smollm2
from .patching import DEFAULT_LEVEL, applied

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PADDINGS = ("left", "right")
NEW_TOKENS = 48
REPETITIONS = 2  # of each batch, after a warm-up
WARM_UP_TOKENS = 2
LOGIT_TOLERANCE = 1e-4  # of float32: sums in another order, nothing more
WHY_TEXT_DIFFERS = {
    "positions": "At this level padding is computed, and rounds: bfloat16 text may differ. And generate goes on from "
    "the last column, which is padding where that is on the right.",
    "padding_free": "Why {dtypes} text can still differ when patched: while decoding, matrix kernels see as many rows "
    "as the batch has, and round otherwise than for one. --level batch_invariant closes that.",
}


def _asked(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    _asked("Why is the sky blue?"),
    _asked("Write a haiku about autumn rain."),
    _asked("Name five things to pack for a picnic."),
    _asked("Translate to French: Where is the nearest train station?"),
    _asked("A train leaves at 9:40 and arrives at 12:15. How long does the journey take?"),
    _asked(
        "The Amazon rainforest covers most of the Amazon basin of South America. The basin covers 7,000,000 square "
        "kilometres, of which 5,500,000 are covered by the rainforest. The majority of the forest is contained within "
        "Brazil, with 60 percent, followed by Peru with 13 percent and Colombia with 10 percent.\n\n"
        "Which country holds the largest part of the rainforest?"
    ),
)


@dataclass(frozen=True)
class Demand:
    """What is asked of a patched model for the demonstration to succeed.

    Attributes:
        alone: whether one prompt alone must give the same bits patched and unpatched.
        logits: how far a prompt's logits in a batch may be from those alone; None if that is not judged.
        text: whether every prompt's generated tokens in a batch must be those alone.
    """

    alone: bool
    logits: float | None
    text: bool


def demanded(level: str, dtype: str) -> Demand:
    """What ``level`` promises for ``dtype``."""
    if level == "batch_invariant":  # by other products than the stock model's
        return Demand(alone=False, logits=0.0, text=True)
    if dtype == "float32":
        return Demand(alone=True, logits=LOGIT_TOLERANCE, text=level != "positions")
    return Demand(alone=True, logits=0.0 if level == "padding_free" else None, text=False)


@dataclass(frozen=True)
class Outcome:
    """What the model made of all prompts."""

    logits: list[Tensor]  # of each prompt, [tokens, vocabulary]
    answers: list[list[int]]  # generated token ids, up to and including the first end of sequence
    seconds: float  # of one forward over the prompts, and `generate`


@dataclass(frozen=True)
class Alone:
    """The prompts one by one."""

    dtype: str
    same: bool  # stock and patched agree to the bit, in logits and tokens
    seconds: float


@dataclass(frozen=True)
class Cell:
    """One batch, compared with the same model's lone runs."""

    dtype: str
    padding: str
    patched: bool
    logit_difference: float  # the largest, over real tokens
    changed: list[int]  # the prompts whose generated tokens differ
    seconds: float


@dataclass(frozen=True)
class Example:
    """One prompt whose answer changed in a stock batch."""

    dtype: str
    padding: str
    prompt: str
    alone: str
    stock: str
    patched_alone: str
    patched: str


@dataclass(frozen=True)
class Report:
    """All that was measured."""

    level: str
    new_tokens: int
    threads: int
    lengths: list[int]  # tokens of each prompt
    alone: list[Alone]
    cells: list[Cell]
    example: Example | None


def run(
    dtypes: Sequence[str], level: str = DEFAULT_LEVEL, new_tokens: int = NEW_TOKENS, threads: int | None = None
) -> int:
    """Measure, print, and return the exit status: 0, 1 if `problems` found any, 2 if there is no model to run."""
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    with quiet(), threads_set(threads), console.status("") as status:

        def progress(step: str) -> None:
            if console.is_terminal:
                status.update(f"{step} …")
            else:
                console.print(f"{step} …")

        progress("Preparing SmolLM2-135M-Instruct (at the first use: 93 MB to download, then converted)")
        try:
            with redirect_stderr(io.StringIO()):  # a bar of the conversion, which would cross the status line
                smollm2.checkpoint()
        except RuntimeError as error:
            Console(stderr=True).print(f"rope-pad-fix: {error}", style="red", markup=False)
            return 2
        report = measure(dtypes, level, new_tokens, progress)
    found = problems(report)
    show(report, found, console)
    return 1 if found else 0


def measure(dtypes: Sequence[str], level: str, new_tokens: int, progress: Callable[[str], None]) -> Report:
    """Run everything, and compare."""
    alone: list[Alone] = []
    cells: list[Cell] = []
    examples: list[tuple[tuple[int, bool, int], Example]] = []
    lengths: list[int] = []
    for dtype in dtypes:
        progress(f"{dtype}: loading the model")
        model, tokenizer = smollm2.load(DTYPES[dtype])
        singles = [_batch(tokenizer, [prompt]) for prompt in PROMPTS]
        lengths = [single["input_ids"].shape[1] for single in singles]
        lone: dict[bool, Outcome] = {}
        for patched in (False, True):
            progress(f"{dtype}: one by one, {_side(patched)}")
            with _model_side(model, level, patched):
                _outcome(model, singles[:1], WARM_UP_TOKENS)
                lone[patched] = _outcome(model, singles, new_tokens)
        alone.append(Alone(dtype, _same(lone[False], lone[True]), lone[False].seconds))

        for padding in PADDINGS:
            where = f"{dtype}: batch padded on the {padding}"
            batch = _batch(tokenizer, PROMPTS, padding)
            outcomes = _by_turns(model, level, batch, new_tokens, where, progress)
            pair = [_compared(dtype, padding, patched, outcomes[patched], lone[patched]) for patched in (False, True)]
            cells += pair
            for i in pair[0].changed:
                results = (lone[False], outcomes[False], lone[True], outcomes[True])
                example = Example(dtype, padding, PROMPTS[i], *(tokenizer.decode(r.answers[i]) for r in results))
                # Best is one that the patched batch gets right, under the padding that is recommended, parting late.
                wrong = (i in pair[1].changed) + (example.patched != example.alone)
                rank = (wrong, padding != "left", -parting(example.alone, example.stock))
                examples.append((rank, example))
    best = min(examples, key=lambda ranked: ranked[0])[1] if examples else None
    return Report(level, new_tokens, torch.get_num_threads(), lengths, alone, cells, best)


def _by_turns(
    model: Any, level: str, batch: Any, new_tokens: int, where: str, progress: Callable[[str], None]
) -> dict[bool, Outcome]:
    """The outcome of one batch, stock (False) and patched (True), which take turns; the shortest of the times."""
    outcomes: dict[bool, Outcome] = {}
    for repetition in range(1 + REPETITIONS):
        for patched in (False, True):
            if repetition:
                progress(f"{where}, {_side(patched)}, {repetition} of {REPETITIONS}")
            with _model_side(model, level, patched):
                outcome = _outcome(model, [batch], new_tokens if repetition else WARM_UP_TOKENS)
            if repetition > 1:
                outcome = replace(outcome, seconds=min(outcome.seconds, outcomes[patched].seconds))
            outcomes[patched] = outcome
    return outcomes


def _compared(dtype: str, padding: str, patched: bool, outcome: Outcome, lone: Outcome) -> Cell:
    difference = largest_difference(outcome.logits, lone.logits)
    return Cell(dtype, padding, patched, difference, differing(outcome.answers, lone.answers), outcome.seconds)


def answer(ids: Sequence[int], end: int) -> list[int]:
    """Generated token ids up to and including the first end of sequence; what follows in a batch is padding.

    Example:
        >>> answer([7, 8, 2, 2, 2], end=2), answer([7, 8, 9], end=2)
        ([7, 8, 2], [7, 8, 9])
    """
    ids = list(ids)
    return ids[: ids.index(end) + 1] if end in ids else ids


def differing(answers: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> list[int]:
    """Which answers differ from the reference."""
    return [i for i, (a, b) in enumerate(zip(answers, reference, strict=True)) if list(a) != list(b)]


def largest_difference(logits: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """The largest absolute difference; NaN if there is one on either side."""
    each = [(a.float() - b.float()).abs().max() for a, b in zip(logits, reference, strict=True)]
    return float(torch.stack(each).max())


def problems(report: Report) -> list[str]:
    """Where the patched model fell short of what its level promises, one sentence each."""
    found = []
    for lone in report.alone:
        if demanded(report.level, lone.dtype).alone and not lone.same:
            found.append(f"{lone.dtype}: one prompt alone does not give the same bits patched and unpatched")
    for cell in report.cells:
        demand = demanded(report.level, cell.dtype)
        where = f"{cell.dtype}, padded on the {cell.padding}"
        if not cell.patched:
            continue
        if demand.logits is not None and not cell.logit_difference <= demand.logits:
            limit = f"at most {demand.logits:.0e}" if demand.logits else "no difference"
            found.append(f"{where}: prompt logits differ by {cell.logit_difference:.1e}, {limit} is allowed")
        if demand.text and cell.changed:
            found.append(f"{where}: the text of {len(cell.changed)} of {len(report.lengths)} prompts differs")
    return found


def show(report: Report, found: Sequence[str], console: Console) -> None:
    """Print the table, the example, and the verdict."""
    console.print(_table(report))
    if report.example is not None:
        console.print(_panel(report.example))
    open_text = [c for c in report.cells if c.patched and c.changed and not demanded(report.level, c.dtype).text]
    if open_text and report.level in WHY_TEXT_DIFFERS:
        dtypes = " and ".join(dict.fromkeys(cell.dtype for cell in open_text))
        console.print(WHY_TEXT_DIFFERS[report.level].format(dtypes=dtypes), style="dim")
    for problem in found:
        console.print(f"✗ {problem}", style="bold red")
    if not found:
        kept = "; ".join(f"{lone.dtype}: {_promise(demanded(report.level, lone.dtype))}" for lone in report.alone)
        console.print(f"✓ Level {report.level}, in a batch as alone: {kept}.", style="green")


def _promise(demand: Demand) -> str:
    parts = []
    if demand.logits is not None:
        parts.append(f"prompt logits within {demand.logits:.0e}" if demand.logits else "prompt logits to the bit")
    if demand.text:
        parts.append("text")
    return " and ".join(parts) or "nothing yet"


def _table(report: Report) -> Table:
    count, shortest, longest = len(report.lengths), min(report.lengths), max(report.lengths)
    table = Table(
        title=f"SmolLM2-135M-Instruct: {count} prompts of {shortest} to {longest} tokens in one batch, against alone",
        caption=f"{report.new_tokens} new tokens, greedy · threads: {report.threads}\n"
        f"time: one forward, then generate; for a batch the shortest of {REPETITIONS}, stock and patched by turns",
    )
    for name in ("dtype", "padding", "model"):
        table.add_column(name)
    for name in ("largest logit difference", "texts that differ", "time", "speed-up"):
        table.add_column(name, justify="right")
    for lone in report.alone:
        wrong = demanded(report.level, lone.dtype).alone and not lone.same
        same = Text("patched as stock" if lone.same else "patched not as stock", style="red" if wrong else "")
        table.add_row(lone.dtype, "none", "one by one", same, "", f"{lone.seconds:.2f} s", "")
        cells = [cell for cell in report.cells if cell.dtype == lone.dtype]
        for cell in cells:
            ratio = ""
            if cell.patched:
                stock = next(c for c in cells if c.padding == cell.padding and not c.patched)
                ratio = f"{stock.seconds / cell.seconds:.2f}x"
            table.add_row(
                cell.dtype,
                cell.padding,
                _side(cell.patched),
                f"{cell.logit_difference:.1e}" if cell.logit_difference else "0",
                Text(f"{len(cell.changed)} of {count}", style="red" if cell.changed else "green"),
                f"{cell.seconds:.2f} s",
                ratio,
                style="bold" if cell.patched else "",
            )
        table.add_section()
    return table


def _panel(example: Example) -> Panel:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    grid.add_row("prompt", Text(example.prompt.strip()))
    grid.add_row("alone", parted(example.alone, example.stock))
    grid.add_row("stock batch", parted(example.stock, example.alone))
    if example.patched != example.patched_alone:
        grid.add_row("patched batch", parted(example.patched, example.patched_alone))
    elif example.patched == example.alone:
        grid.add_row("patched batch", Text("the same as alone", style="green"))
    else:
        grid.add_row("patched alone", Text(example.patched_alone))
        grid.add_row("patched batch", Text("the same as patched alone", style="green"))
    title = f"One answer that batching changed: {example.dtype}, padded on the {example.padding}"
    return Panel(grid, title=title, title_align="left", subtitle="▶ where they part", subtitle_align="left")


def parted(text: str, other: str) -> Text:
    """A text with a mark where it parts from another."""
    at = parting(text, other)
    return Text.assemble(text[:at], ("▶", "bold red"), (text[at:], "red"))


def parting(text: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(text), len(other)))


def _side(patched: bool) -> str:
    return "patched" if patched else "stock"


def _same(first: Outcome, second: Outcome) -> bool:
    pairs = zip(first.logits, second.logits, strict=True)
    return first.answers == second.answers and all(torch.equal(a, b) for a, b in pairs)


def _batch(tokenizer: Any, prompts: Sequence[str], padding: str = "left") -> Any:
    return tokenizer(list(prompts), padding=True, padding_side=padding, return_tensors="pt")


def _outcome(model: Any, batches: Sequence[Any], new_tokens: int) -> Outcome:
    logits: list[Tensor] = []
    answers: list[list[int]] = []
    seconds = 0.0
    for batch in batches:
        start = time.perf_counter()
        with torch.inference_mode():
            padded = model(**batch).logits
            ids = model.generate(**batch, do_sample=False, max_new_tokens=new_tokens)
        seconds += time.perf_counter() - start
        logits += [row[mask != 0] for row, mask in zip(padded, batch["attention_mask"], strict=True)]
        end = model.generation_config.eos_token_id
        answers += [answer(row, end) for row in ids[:, batch["input_ids"].shape[1] :].tolist()]
    return Outcome(logits, answers, seconds)


def _model_side(model: Any, level: str, patched: bool) -> Any:
    return applied(model, level) if patched else nullcontext(model)


@contextmanager
def threads_set(count: int | None) -> Iterator[None]:
    """With so many CPU threads, or torch's choice; afterwards as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def quiet() -> Iterator[None]:
    """Without what transformers logs: a warning at right padding, and its loading bars."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
