"""SmolLM2 in padded batches, stock and patched: what they give, and how fast. Prints GitHub markdown.

    python benchmarks/padding_free.py > table.md

The first table is `rope_pad_fix.demo`'s comparison with lone runs; the second times parts of inference on ragged
batches.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from common import by_turns, environment, markdown_table, medians, progress
from torch import Tensor
from transformers.utils import logging

from rope_pad_fix import applied, demo, smollm2
from rope_pad_fix.patching import DEFAULT_LEVEL, LEVELS

BATCH_SIZES = (8, 32)
SHORTEST, LONGEST = 5, 100  # tokens of a prompt
REPETITIONS = 5
STEPS = 15  # of decoding, in each repetition

# What is timed, and what it is called in the table.
ALL_LOGITS = "forward, all logits"
LAST_LOGITS = "forward, `logits_to_keep=1`"
DECODE = "one decode step"


def before_and_after(level: str, dtypes: list[str], new_tokens: int) -> str:
    """The table of `demo.measure`: one line a batch, "stock → patched"."""
    report = demo.measure(dtypes, level, new_tokens, progress)
    header = ("dtype", "padding", "largest logit difference", "texts that differ", "time", "speed-up")
    rows = []
    for stock, patched in zip(report.cells[::2], report.cells[1::2], strict=True):
        count = len(report.lengths)
        rows.append(
            (
                stock.dtype,
                stock.padding,
                f"{_difference(stock.logit_difference)} → {_difference(patched.logit_difference)}",
                f"{len(stock.changed)} of {count} → {len(patched.changed)} of {count}",
                f"{stock.seconds:.2f} s → {patched.seconds:.2f} s",
                f"{stock.seconds / patched.seconds:.2f}x",
            )
        )
    return markdown_table(header, rows)


def throughput(level: str, dtypes: list[str], batch_sizes: tuple[int, ...], repetitions: int, steps: int) -> str:
    """The table of median times of stock and patched, and their ratio."""
    rows = []
    for dtype in dtypes:
        progress(f"{dtype}: loading the model")
        model, _ = smollm2.load(demo.DTYPES[dtype])
        for batch_size in batch_sizes:
            progress(f"{dtype}: {repetitions} repetitions of a batch of {batch_size}")
            ids, mask = ragged(batch_size, model.config.vocab_size, model.config.pad_token_id)
            times = by_turns(
                {
                    "stock": side(model, nullcontext, ids, mask, steps),
                    "patched": side(model, lambda model: applied(model, level), ids, mask, steps),
                },
                repetitions,
            )
            stock, patched = medians(times["stock"]), medians(times["patched"])
            padding = f"{1 - mask.float().mean().item():.0%}"
            for part in stock:
                before, after = stock[part], patched[part]
                ratio = f"{before / after:.2f}x"
                rows.append((dtype, str(batch_size), padding, part, f"{_ms(before)} → {_ms(after)}", ratio))
    header = ("dtype", "rows", "padding", "what", "median time stock → patched", "speed-up")
    return markdown_table(header, rows)


def ragged(batch_size: int, vocabulary: int, pad: int) -> tuple[Tensor, Tensor]:
    """``input_ids`` and ``attention_mask`` of random prompts, padded on the left; the longest always is `LONGEST`."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (batch_size,), generator=generator)
    lengths[0] = LONGEST
    ids = torch.randint(vocabulary, (batch_size, LONGEST), generator=generator)
    mask = (torch.arange(LONGEST) >= LONGEST - lengths[:, None]).long()
    return ids.masked_fill(mask == 0, pad), mask


def side(
    model: Any, patching: Callable[[Any], Any], ids: Tensor, mask: Tensor, steps: int
) -> Callable[[], dict[str, float]]:
    """What `by_turns` is to run: each part once, within what ``patching`` returns for the model; seconds by part."""

    def run() -> dict[str, float]:
        with patching(model), torch.inference_mode():
            whole, _ = _timed(model, ids, attention_mask=mask)
            prefill, outputs = _timed(model, ids, attention_mask=mask, logits_to_keep=1)
            return {ALL_LOGITS: whole, LAST_LOGITS: prefill, DECODE: median(_decoding(model, mask, outputs, steps))}

    return run


def _decoding(model: Any, mask: Tensor, outputs: Any, steps: int) -> list[float]:
    """The seconds of each step of greedy decoding that goes on from a prefill."""
    name = "cache" if "cache" in outputs else "past_key_values"
    times = []
    for _ in range(steps):
        token = outputs.logits[:, -1:].argmax(-1)
        mask = torch.cat([mask, torch.ones_like(token)], 1)
        seconds, outputs = _timed(model, token, attention_mask=mask, **{name: outputs[name]})
        times.append(seconds)
    return times


def _timed(model: Any, *args: Any, **kwargs: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = model(*args, **kwargs)
    return time.perf_counter() - start, result


def _difference(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


def main() -> None:
    """Measure everything, print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--level", choices=list(LEVELS), default=DEFAULT_LEVEL, help="what to apply")
    parser.add_argument("--new-tokens", type=int, default=demo.NEW_TOKENS, help="tokens to generate for each prompt")
    parser.add_argument("--quick", action="store_true", help="a smoke run: few prompts and tokens, float32")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    dtypes, new_tokens = list(demo.DTYPES), options.new_tokens
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    repetitions, steps = REPETITIONS, STEPS
    if options.quick:
        dtypes, new_tokens, batch_sizes, repetitions, steps = dtypes[:1], 2, (2,), 1, 2
        demo.PROMPTS = demo.PROMPTS[:3]  # type: ignore[assignment]

    print(f"### SmolLM2-135M, level `{options.level}`: against each prompt alone\n")
    print(before_and_after(options.level, dtypes, new_tokens))
    print(f"\n### Throughput against padding: random prompts of {SHORTEST} to {LONGEST} tokens, padded on the left\n")
    print(throughput(options.level, dtypes, batch_sizes, repetitions, steps))
    print(f"\n{environment()}")


if __name__ == "__main__":
    main()
