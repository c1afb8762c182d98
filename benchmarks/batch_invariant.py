"""What the same bits in every batch cost: SmolLM2 at level "batch_invariant" against the others. Prints markdown.

python benchmarks/batch_invariant.py > table.md
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from common import by_turns, environment, markdown_table, medians, progress
from padding_free import ragged
from torch import Tensor
from transformers.utils import logging

from rope_pad_fix import applied, demo, smollm2

BATCH_SIZES = (1, 8, 32)
REPETITIONS = 5
NEW_TOKENS = 32
SIDES: dict[str, Callable[[Any], Any]] = {
    "stock": nullcontext,
    "padding_free": lambda model: applied(model, "padding_free"),
    "batch_invariant": lambda model: applied(model, "batch_invariant"),
}


def side(model: Any, patching: Callable[[Any], Any], ids: Tensor, mask: Tensor, new_tokens: int) -> Any:
    """What `by_turns` is to run: seconds of a forward with all logits, and of `generate`."""

    def run() -> dict[str, float]:
        with patching(model), torch.inference_mode():
            start = time.perf_counter()
            model(ids, attention_mask=mask)
            middle = time.perf_counter()
            lengths = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
            model.generate(ids, attention_mask=mask, do_sample=False, **lengths)
            end = time.perf_counter()
        return {"forward": middle - start, f"generate {new_tokens}": end - middle}

    return run


def costs(dtypes: list[str], batch_sizes: tuple[int, ...], repetitions: int, new_tokens: int) -> str:
    """Median times, and the speed of "batch_invariant" as a share of that of the two others."""
    rows = []
    for dtype in dtypes:
        model, _ = smollm2.load(demo.DTYPES[dtype])
        for batch_size in batch_sizes:
            progress(f"{dtype}: {repetitions} repetitions of a batch of {batch_size}")
            ids, mask = ragged(batch_size, model.config.vocab_size, model.config.pad_token_id)
            runs = by_turns({n: side(model, p, ids, mask, new_tokens) for n, p in SIDES.items()}, repetitions)
            times = {name: medians(results) for name, results in runs.items()}
            for part, mine in times["batch_invariant"].items():
                ratios = [f"{times[other][part] / mine:.2f}x" for other in ("padding_free", "stock")]
                rows.append((dtype, str(batch_size), part, *(f"{t[part]:.3f} s" for t in times.values()), *ratios))
    speed = ("speed against padding_free", "against stock")
    return markdown_table(("dtype", "rows", "what", *SIDES, *speed), rows)


def main() -> None:
    """Measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    quick = parser.parse_args().quick
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if quick:
        print(costs(["float32"], (2,), 1, 2))
    else:
        print(costs(list(demo.DTYPES), BATCH_SIZES, REPETITIONS, NEW_TOKENS))
    print(f"\n{environment()}")


if __name__ == "__main__":
    main()
