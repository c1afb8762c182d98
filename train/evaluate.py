"""The scores of an adapter, or of any causal language model, and how far they drift with the batch.

    python train/evaluate.py --adapter out/adapter --data out/test.jsonl --task fields --output out/evaluation

An adapter is measured stock and at the level it was trained for. `rope-pad-fix drift` is the same for models without
adapters, with more to choose.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rope_pad_fix
from rope_pad_fix import PaddingScheme
from rope_pad_fix.adapters import base_of
from rope_pad_fix.drift import InputError, command
from rope_pad_fix.drift.metrics import TASKS
from rope_pad_fix.drift.results import STOCK
from rope_pad_fix.loading import DTYPES
from rope_pad_fix.patching import DEFAULT_LEVEL


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `measure`.

    Raises:
        InputError: the adapter cannot be loaded, or neither it nor a model is given.
    """
    level: str | None = DEFAULT_LEVEL
    chosen: dict[str, Any] = {"model": options.model}
    if options.adapter is not None:
        dtype = "auto" if options.dtype is None else DTYPES[options.dtype]
        model, tokenizer = rope_pad_fix.load_adapter(options.model, options.adapter, dtype=dtype)
        scheme = PaddingScheme.load(options.adapter)
        level = scheme.level
        chosen = {"model": model, "tokenizer": tokenizer, "max_length": scheme.max_length}
        chosen["name"] = f"{options.adapter.name} on {options.model or base_of(options.adapter)}"
    elif options.model is None:
        raise InputError("give --adapter, --model, or both")
    elif options.dtype is not None:
        chosen["dtypes"] = [options.dtype]
    return chosen | {
        "data": options.data,
        "split": options.split,
        "task": options.task,
        "prompt": options.prompt_column,
        "reference": options.completion_column,
        "messages": options.messages_column,
        "limit": options.limit,
        "levels": options.level or ([STOCK] if level is None else [STOCK, level]),
        "paddings": options.padding_side or ("left", "right"),
        "batch_sizes": options.batch_size or (8,),
        "max_new_tokens": options.max_new_tokens,
    }


def parser() -> argparse.ArgumentParser:
    """The script's options."""
    made = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("--adapter", type=Path, help="directory that train/finetune.py wrote")
    made.add_argument(
        "--model", help="base model: path, Hub id, .gguf file or smollm2; that of the adapter if left out"
    )
    made.add_argument("--data", required=True, help="JSONL, JSON, CSV, Parquet, a `datasets` directory or a Hub id")
    made.add_argument("--split", default="test", help="of a data set with several")
    made.add_argument("--task", choices=TASKS, default="text", help="how answers are scored")
    made.add_argument("--prompt-column", default="prompt", help="column of prompts")
    made.add_argument("--completion-column", default="completion", help="column of right answers")
    made.add_argument("--messages-column", default="messages", help="column of chats, if there are no prompts")
    made.add_argument("--limit", type=int, help="the first so many rows")
    made.add_argument("--dtype", choices=DTYPES, help="of the base model; its own if left out")
    made.add_argument("--level", action="append", help="stock or a level; may be repeated")
    made.add_argument("--padding-side", action="append", help="left or right; may be repeated")
    made.add_argument("--batch-size", action="append", type=int, help="rows of a batch; may be repeated")
    made.add_argument("--max-new-tokens", type=int, default=96, help="of each answer")
    made.add_argument("--output", type=Path, help="directory for the report; an interrupted run goes on there")
    made.add_argument("--fail-over", type=float, help="exit with status 1 if a cell drifts by more than this")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    made = parser()
    options = made.parse_args(arguments)
    try:
        settings = settings_of(options)
    except (InputError, rope_pad_fix.UnsupportedModelError) as error:
        made.error(str(error))
    return command.run(options.output, options.fail_over, None, settings)


if __name__ == "__main__":
    raise SystemExit(main())
