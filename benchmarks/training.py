"""What a step of LoRA training costs on ragged batches: SmolLM2 with stock transformers and patched. Prints markdown.

    python benchmarks/training.py > table.md

transformers' Trainer takes the steps, by turns on each side; every step has the same rows. The loss is over the second
half of each row. Peak memory is of a process of its own for each side, counted from the loaded model.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import by_turns, environment, markdown_table, progress
from peft import LoraConfig, get_peft_model
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from rope_pad_fix import PaddingScheme, applied, smollm2
from rope_pad_fix.loading import DTYPES
from rope_pad_fix.training import PaddingFreeTrainer

ROWS, LONGEST = 8, 128
SHARES = (0.0, 0.3, 0.6, 0.8)  # of padding, about
REPETITIONS = 5
SIDES = ("stock", "padding_free", "batch_invariant")
Rows = list[dict[str, list[int]]]


class Stopwatch(TrainerCallback):  # type: ignore[misc]
    """Seconds from the beginning of a step to the end of its update of the weights."""

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds = time.perf_counter() - self.began


def rows(share: float, longest: int) -> Rows:
    """A batch of which about this share is padding: lengths that follow a power law, as many short rows as it takes."""
    lengths = [max(round(longest * ((i + 1) / ROWS) ** (share / (1 - share))), 4) for i in range(ROWS)]
    draw = torch.Generator().manual_seed(0)
    batch = []
    for length in lengths:
        ids = torch.randint(10, 40_000, (length,), generator=draw).tolist()
        batch.append({"input_ids": ids, "labels": [-100] * (length // 2) + ids[length // 2 :]})
    return batch


def learner(dtype: str) -> tuple[Any, PaddingScheme]:
    """The model with a fresh adapter."""
    model, tokenizer = smollm2.load(DTYPES[dtype])
    torch.manual_seed(0)
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, config), PaddingScheme.of(tokenizer)


def step(model: Any, scheme: PaddingScheme, level: str, batch: Rows, directory: str) -> float:
    """Seconds of one step."""
    stock = level == "stock"
    patching: AbstractContextManager[Any] = nullcontext() if stock else applied(model, level)
    watch = Stopwatch()
    options = TrainingArguments(
        output_dir=directory,
        per_device_train_batch_size=ROWS,
        max_steps=1,
        learning_rate=1e-4,
        save_strategy="no",
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=not torch.accelerator.is_available(),
        dataloader_pin_memory=torch.accelerator.is_available(),
    )
    with patching:
        kind = Trainer if stock else PaddingFreeTrainer
        trainer = kind(model, options, scheme.collator(), batch, callbacks=[watch])
        trainer.remove_callback(PrinterCallback)  # stdout is for the table
        trainer.train()
    return watch.seconds


def times(dtype: str, share: float, longest: int, repetitions: int) -> dict[str, float]:
    """Seconds of a step for each side."""
    model, scheme = learner(dtype)
    batch = rows(share, longest)
    with tempfile.TemporaryDirectory() as directory:

        def side(level: str) -> Callable[[], float]:
            return lambda: step(model, scheme, level, batch, directory)

        found = by_turns({level: side(level) for level in SIDES}, repetitions)
    return {level: median(seconds) for level, seconds in found.items()}


def peak(dtype: str, share: float, longest: int, level: str, threads: int) -> float:
    """MB that two steps need at most above the loaded model. Linux: the kernel's mark of the process, set back."""
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    model, scheme = learner(dtype)
    Path("/proc/self/clear_refs").write_text("5")
    before = high_water()
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(2):
            step(model, scheme, level, rows(share, longest), directory)
    return high_water() - before


def high_water() -> float:
    """The largest resident size so far, MB."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1000


def table(dtypes: Sequence[str], shares: Sequence[float], longest: int, repetitions: int) -> str:
    """A row for each data type and share of padding."""
    found = []
    for dtype in dtypes:
        for share in shares:
            progress(f"{dtype}, {share:.0%} padding")
            seconds = times(dtype, share, longest, repetitions)
            with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
                settings = [(dtype, share, longest, level, torch.get_num_threads()) for level in SIDES]
                memory = pool.starmap(peak, settings, chunksize=1)
            padding = 1 - sum(len(row["input_ids"]) for row in rows(share, longest)) / (ROWS * longest)
            ratios = [f"{seconds[level] / seconds['stock']:.2f}" for level in SIDES[1:]]
            found.append(
                (
                    dtype,
                    f"{padding:.2f}",
                    *(f"{seconds[level]:.2f} s" for level in SIDES),
                    *ratios,
                    f"{1.1 * (1 - padding):.2f}",
                    *(f"{size:.0f} MB" for size in memory),
                )
            )
    header = ["dtype", "padding p", *SIDES, *(f"{level} ÷ stock" for level in SIDES[1:]), "1.1 (1 - p)"]
    return markdown_table([*header, *(f"peak memory, {level}" for level in SIDES)], found)


def main() -> None:
    """Measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    quick = parser.parse_args().quick
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if quick:
        print(table(["float32"], [0.5], 16, 1))
    else:
        print(table(["float32", "bfloat16"], SHARES, LONGEST, REPETITIONS))
    print(f"\n{environment()}")


if __name__ == "__main__":
    main()
