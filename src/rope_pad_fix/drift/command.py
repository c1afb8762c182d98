"""What ``rope-pad-fix drift`` does around `measure`: progress, files, table, exit status."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..demo import quiet, threads_set
from ..errors import InputError
from .data import load_examples
from .diagnose import diagnose, show
from .measure import measure
from .processes import state
from .report import comparison, exceeding, read, table, write
from .source import Source

INTERRUPTED = 130  # as shells report SIGINT


def run(output: Path | None, fail_over: float | None, threads: int | None, settings: dict[str, Any]) -> int:
    """Measure, write the files, print the table.

    Args:
        output: the directory for the report, or None.
        fail_over: the largest absolute drift of a cell that is a success, or None for any.
        threads: CPU threads, or None for torch's choice.
        settings: arguments of `measure`.

    Returns:
        The exit status: 0; 1 if a cell drifts by more than ``fail_over``; 2 for unusable input; 130 if interrupted.
    """

    def work() -> int:
        with quiet(), threads_set(threads), _progress() as progress:
            report = measure(output=output, progress=progress, **settings)
        main = state().is_main_process
        state().destroy_process_group()
        if not main:
            return 0
        console = console_for_output()
        if output is not None:
            write(report, output)
        console.print(table(report))
        if output is not None:
            console.print(f"Written: {output / 'report.html'}, report.md, report.json", soft_wrap=True)
        over = [] if fail_over is None else exceeding(report, fail_over)
        for cell in over:
            console.print(f"✗ {cell.setting}: drift {cell.drift:+.4f}, more than {fail_over}", style="bold red")
        return 1 if over else 0

    kept = "" if output is None else "; what is finished is kept: the same command goes on there"
    return guarded(work, f"interrupted{kept}")


def compare(old: Path, new: Path) -> int:
    """Print two reports side by side; the exit status, 0 or 2."""

    def work() -> int:
        console_for_output().print(comparison(read(old), read(new)))
        return 0

    return guarded(work, "interrupted")


def examine(
    model: str,
    prompts: Sequence[str],
    data: dict[str, Any] | None,
    dtype: str | None,
    threads: int | None,
    as_json: bool,
    usage: dict[str, Any],
) -> int:
    """Diagnose a model on prompts, or on those of ``data`` (arguments of `load_examples`), and print what was found.

    Returns:
        The exit status: 0, 2 for unusable input, 130 if interrupted.
    """

    def work() -> int:
        with quiet(), threads_set(threads):
            source = Source(model)
            texts = list(prompts)
            if data is not None:
                texts += [one.prompt for one in load_examples(**data, reference=None, tokenizer=source.tokenizer)]
            found = diagnose(source.model(dtype), source.tokenizer, texts, **usage)
        if as_json:
            print(found.to_json())
        else:
            show(found, console_for_output())
        return 0

    return guarded(work, "interrupted")


def guarded(work: Callable[[], int], interrupted: str) -> int:
    """The exit status of ``work``, with one line on standard error where input is unusable or it was interrupted."""
    error = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        return work()
    except InputError as problem:
        error.print(f"rope-pad-fix: {problem}", style="red", markup=False)
        return 2
    except KeyboardInterrupt:
        error.print(f"rope-pad-fix: {interrupted}", markup=False)
        return INTERRUPTED


def console_for_output() -> Console:
    """Standard output; where that is no terminal, wide enough for a table."""
    return Console(width=None if sys.stdout.isatty() else 140, highlight=False)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar on a terminal, a line for each step elsewhere, on standard error; nothing but in the first process."""
    console = Console(stderr=True, highlight=False)
    if not state().is_main_process:
        yield None
    elif console.is_terminal:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=None)
            yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
    else:
        yield lambda what, done, total: console.print(f"[{done}/{total}] {what}", markup=False)
