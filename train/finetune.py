"""LoRA fine-tuning on prompts and completions with transformers' Trainer, without computing padding.

    python train/finetune.py --train-file examples/data/arithmetic.jsonl --output-dir out/arithmetic

Owns the script's options, what it reads and how rows become batches. Each line of the training file is an object with a
"prompt" and a "completion"; the completion and the end-of-sequence token behind it are what is learnt. The adapter is
saved in the output directory, next to the checkpoints that ``--resume`` goes on from.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, set_seed

import rope_pad_fix
from rope_pad_fix import smollm2
from rope_pad_fix.patching import DEFAULT_LEVEL, LEVELS

NO_LEVEL = "none"  # stock transformers
IGNORED = -100  # a label that is no target
Encoded = dict[str, list[int]]  # "input_ids" and "labels" of one row, of equal length


class InputError(ValueError):
    """Something that whoever starts the script can put right: the message says what and where."""


@dataclass(frozen=True)
class Row:
    """One line of the training file."""

    line: int
    prompt: str
    completion: str


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSON Lines file; blank lines are skipped.

    Raises:
        InputError: a line is not an object with a prompt and a completion, or there is none.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: JSON strings may hold U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    rows = [_row(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise InputError(f"{path}: no rows")
    return rows


def _row(path: Path, number: int, line: str) -> Row:
    where = f"{path}, line {number}"
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(row, dict):
        raise InputError(f'{where}: expected an object with "prompt" and "completion", got {type(row).__name__}')
    for key in ("prompt", "completion"):
        if key not in row:
            raise InputError(f'{where}: no "{key}"')
        if not isinstance(row[key], str):
            raise InputError(f'{where}: "{key}" must be a string, got {type(row[key]).__name__}')
        if not row[key]:
            raise InputError(f'{where}: "{key}" is empty')
    return Row(number, row["prompt"], row["completion"])


def encode(tokenizer: Any, prompt: str, completion: str) -> Encoded:
    """Token ids and labels of one row. Prompt and completion are tokenised apart, and which tokens are labels goes by
    their lengths: by token id the end of sequence could not be told from a pad token that is the same."""
    end = tokenizer.eos_token_id
    before = list(tokenizer(prompt).input_ids)  # with what the tokenizer begins a text with
    if before[-1:] == [end] and tokenizer(prompt, add_special_tokens=False).input_ids[-1:] != [end]:
        before.pop()  # it also ends texts; this one goes on
    after = [*tokenizer(completion, add_special_tokens=False).input_ids, end]
    return {"input_ids": before + after, "labels": [IGNORED] * len(before) + after}


def encode_rows(tokenizer: Any, path: Path, rows: Sequence[Row], max_length: int) -> list[Encoded]:
    """All rows, encoded.

    Raises:
        InputError: a prompt has no tokens, so that nothing comes before the first label; or a row is longer than
            ``max_length``: cut off, it would lose the end that is to be learnt.
    """
    encoded = []
    for row in rows:
        ids = encode(tokenizer, row.prompt, row.completion)
        length = len(ids["input_ids"])
        if ids["labels"][0] != IGNORED:
            raise InputError(f'{path}, line {row.line}: "prompt" has no tokens')
        if length > max_length:
            raise InputError(f"{path}, line {row.line}: {length} tokens, more than --max-length {max_length}")
        encoded.append(ids)
    return encoded


@dataclass(frozen=True)
class Collator:
    """Pads rows to the longest of them, on either side."""

    pad_token_id: int
    padding_side: str

    def __call__(self, rows: Sequence[Encoded]) -> dict[str, Tensor]:
        """``input_ids``, ``attention_mask`` and ``labels``, each ``[B, L]``."""
        width = max(len(row["input_ids"]) for row in rows)
        shape = (len(rows), width)
        batch = {
            "input_ids": torch.full(shape, self.pad_token_id),
            "attention_mask": torch.zeros(shape, dtype=torch.long),
            "labels": torch.full(shape, IGNORED),
        }
        for i, row in enumerate(rows):
            length = len(row["input_ids"])
            columns = slice(width - length, None) if self.padding_side == "left" else slice(length)
            batch["input_ids"][i, columns] = torch.tensor(row["input_ids"])
            batch["attention_mask"][i, columns] = 1
            batch["labels"][i, columns] = torch.tensor(row["labels"])
        return batch


def checkpoints(directory: Path) -> Iterator[Path]:
    """The complete checkpoints in a directory, the newest first. The trainer's state is what it writes last."""
    found = (state.parent for state in directory.glob("checkpoint-*/trainer_state.json"))
    yield from sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)


def train(options: argparse.Namespace) -> None:
    """Read, train, and save the adapter.

    Raises:
        InputError: the training file is at fault, the options contradict what is in the output directory, or the
            tokenizer has no end of sequence.
        UnsupportedModelError: the level cannot run this model.
    """
    directory = Path(options.output_dir)
    newest = next(checkpoints(directory), None)
    if options.resume and newest is None:
        raise InputError(f"--resume: there is no checkpoint in {directory}")
    if newest is not None and not options.resume:
        raise InputError(f"{directory} holds {newest.name} of an earlier run: add --resume, or choose another one")
    rows = read_rows(Path(options.train_file))
    name = options.model or str(smollm2.checkpoint())
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.eos_token_id is None:
        raise InputError(f"the tokenizer of {name} has no end-of-sequence token")
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    data = encode_rows(tokenizer, Path(options.train_file), rows, options.max_length)

    set_seed(options.seed)  # the adapter's first weights are random
    model = AutoModelForCausalLM.from_pretrained(name)
    rank = options.lora_r
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    if options.level != NO_LEVEL:
        rope_pad_fix.apply(model, options.level)
    trainer = Trainer(
        model=model,
        args=_training_arguments(options),
        train_dataset=data,
        data_collator=Collator(pad, options.padding_side),
    )
    trainer.train(resume_from_checkpoint=str(newest) if newest else None)
    model.save_pretrained(directory)


def _training_arguments(options: argparse.Namespace) -> TrainingArguments:
    return TrainingArguments(
        output_dir=options.output_dir,
        per_device_train_batch_size=options.batch_size,
        max_steps=options.steps,
        learning_rate=options.learning_rate,
        save_steps=options.save_steps,
        save_total_limit=2,
        logging_steps=min(10, options.steps),
        seed=options.seed,
        label_names=["labels"],
        remove_unused_columns=False,  # the collator wants all of a row
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )


def parser() -> argparse.ArgumentParser:
    """The script's options."""
    made = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("--model", help="directory or Hub id; SmolLM2-135M-Instruct if left out")
    made.add_argument("--train-file", required=True, help='JSON Lines: {"prompt": "…", "completion": "…"}')
    made.add_argument("--output-dir", required=True, help="for checkpoints and the adapter")
    made.add_argument("--padding-side", choices=("left", "right"), default="right", help="how batches are padded")
    made.add_argument("--level", choices=(*LEVELS, NO_LEVEL), default=DEFAULT_LEVEL, help="what to apply to the model")
    made.add_argument("--max-length", type=_positive, default=512, help="a longer row is an error")
    made.add_argument("--batch-size", type=_positive, default=8, help="rows of a step")
    made.add_argument("--steps", type=_positive, default=100, help="optimizer steps, in all")
    made.add_argument("--learning-rate", type=float, default=2e-4, help="at the first step; falls to 0 linearly")
    made.add_argument("--lora-r", type=_positive, default=8, help="rank of the adapter")
    made.add_argument("--seed", type=int, default=0, help="of the adapter's first weights and the order of rows")
    made.add_argument("--save-steps", type=_positive, default=50, help="steps between checkpoints")
    made.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --output-dir")
    return made


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; what the user can put right ends in one line and exit status 2."""
    made = parser()
    options = made.parse_args(arguments)
    try:
        train(options)
    except (InputError, rope_pad_fix.UnsupportedModelError) as error:
        made.error(str(error))


if __name__ == "__main__":
    main()
