"""What the benchmark scripts share: two sides timed by turns, the line that says where numbers come from, tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
import transformers

from rope_pad_fix.environment import cpu

Result = TypeVar("Result")
_THREAD_SETTINGS = ("GOMP_SPINCOUNT", "OMP_NUM_THREADS")


def by_turns(sides: dict[str, Callable[[], Result]], repetitions: int) -> dict[str, list[Result]]:
    """Run the sides in alternation, so that a machine that gets slower or busier does so for each of them.

    Args:
        sides: by name, what to run.
        repetitions: how many results of each side to keep; one run of each before them is a warm-up.

    Returns:
        By name, what the runs returned, in their order.
    """
    results: dict[str, list[Result]] = {name: [] for name in sides}
    for repetition in range(1 + repetitions):
        for name, side in sides.items():
            result = side()
            if repetition:
                results[name].append(result)
    return results


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each measured quantity over repetitions."""
    return {name: median(run[name] for run in runs) for name in runs[0]}


def environment() -> str:
    """Date, CPU, threads, versions, and the command line that gives the numbers again."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    settings = [f"{name}={os.environ[name]}" for name in _THREAD_SETTINGS if name in os.environ]
    command = " ".join([*settings, "python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    return f"{date.today()}, {cpu()}, {torch.get_num_threads()} threads, {versions}: `{command}`"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in GitHub's markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def progress(step: str) -> None:
    """Say what is being done, apart from the results."""
    print(f"{step} …", file=sys.stderr, flush=True)
