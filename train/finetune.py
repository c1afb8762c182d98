"""Fine-tune a decoder model with the padding scheme that it is going to be run with, and without computing padding.

    python examples/data/usaddress.py --train out/train.jsonl out/test.jsonl
    python train/finetune.py --train-file out/train.jsonl --eval-file out/test.jsonl --task fields \
        --output-dir out/adapter

    accelerate launch --num_processes 2 train/finetune.py …

transformers' Trainer trains, PEFT adapts, and all options of TrainingArguments are options here. The output directory
gets the adapter, its padding scheme, tokenizer and model card, the scores and their drift between single and batched
inference, and the checkpoints that ``--resume`` goes on from.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import BitsAndBytesConfig, EarlyStoppingCallback, HfArgumentParser, TrainingArguments, set_seed

import rope_pad_fix
from rope_pad_fix import PaddingScheme
from rope_pad_fix.adapters import save_adapter
from rope_pad_fix.drift import InputError, Report, measure
from rope_pad_fix.drift.metrics import TASKS
from rope_pad_fix.drift.metrics import task as task_named
from rope_pad_fix.drift.processes import state
from rope_pad_fix.drift.report import table, write
from rope_pad_fix.drift.results import STOCK
from rope_pad_fix.environment import environment
from rope_pad_fix.loading import DTYPES, SMOLLM2, load_model, load_tokenizer
from rope_pad_fix.padding import prompt_ids
from rope_pad_fix.patching import DEFAULT_LEVEL, LEVELS
from rope_pad_fix.storage import write_atomically
from rope_pad_fix.training import Encoded, PaddingFreeTrainer, Questions, Text, encode, read_texts
from rope_pad_fix.training.card import write_card
from rope_pad_fix.training.texts import TooLongError

NO_LEVEL = "none"  # stock transformers
RECORD = "finetuning.json"
SHOWN = 5  # bad rows that are printed


@dataclass
class DataOptions:
    """What is learnt."""

    train_file: str = field(metadata={"help": "JSONL, JSON, CSV, Parquet, a `datasets` directory or a Hub id"})
    eval_file: str | None = field(default=None, metadata={"help": "the same for evaluation"})
    eval_share: float = field(default=0.1, metadata={"help": "without --eval-file: share of rows held back for it"})
    train_split: str = field(default="train", metadata={"help": "of a data set with several"})
    eval_split: str = field(default="test", metadata={"help": "of a data set with several"})
    prompt_column: str = field(default="prompt", metadata={"help": "column of prompts"})
    completion_column: str = field(default="completion", metadata={"help": "column of completions"})
    messages_column: str = field(default="messages", metadata={"help": "column of chats, if there are no prompts"})
    text_column: str = field(default="text", metadata={"help": "column of plain text, if there are neither"})
    learn: Literal["completion", "everything"] = field(
        default="completion", metadata={"help": "what the loss is over; the end of sequence belongs to it"}
    )
    strict: bool = field(default=False, metadata={"help": "refuse data with an unusable row instead of skipping it"})
    task: str = field(default="text", metadata={"help": f"how answers are scored: {', '.join(TASKS)}"})
    max_new_tokens: int = field(default=96, metadata={"help": "of each answer"})
    drift_rows: int = field(default=48, metadata={"help": "evaluation rows for the drift at the end; 0 for none"})


@dataclass
class ModelOptions:
    """What learns it."""

    model: str = field(default=SMOLLM2, metadata={"help": "a path, a Hub id, a .gguf file, or smollm2"})
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="auto", metadata={"help": "of the base model; an adapter is float32"}
    )
    full: bool = field(default=False, metadata={"help": "train all weights instead of an adapter"})
    lora_r: int = field(default=16, metadata={"help": "rank"})
    lora_alpha: int | None = field(default=None, metadata={"help": "scale; twice the rank by default"})
    lora_dropout: float = field(default=0.0, metadata={"help": "dropout of the adapter"})
    target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"], metadata={"help": "names of modules to adapt, or all-linear"}
    )
    use_rslora: bool = field(default=False, metadata={"help": "rank-stabilised LoRA"})
    use_dora: bool = field(default=False, metadata={"help": "weight-decomposed LoRA"})
    load_in_4bit: bool = field(default=False, metadata={"help": "QLoRA; needs bitsandbytes"})
    load_in_8bit: bool = field(default=False, metadata={"help": "the same with 8 bits"})


@dataclass
class PaddingOptions:
    """How rows become batches, in training and after it."""

    padding_side: Literal["left", "right"] = field(default="left", metadata={"help": "where padding goes"})
    truncation_side: Literal["left", "right"] = field(default="left", metadata={"help": "where long prompts are cut"})
    max_length: int = field(default=512, metadata={"help": "tokens of a row at most; longer prompts are cut"})
    pad_to_multiple_of: int | None = field(default=None, metadata={"help": "round the columns of a batch up"})
    level: str = field(default=DEFAULT_LEVEL, metadata={"help": f"one of {', '.join((*LEVELS, NO_LEVEL))}"})
    packing: Literal["none"] = field(default="none", metadata={"help": "rows are not joined: padding costs nothing"})


@dataclass
class Training(TrainingArguments):
    """transformers' own options, with other defaults."""

    output_dir: str = field(default="", metadata={"help": "for the adapter and the checkpoints"})
    per_device_train_batch_size: int = field(default=8, metadata={"help": "rows of a step on one device"})
    per_device_eval_batch_size: int = field(default=16, metadata={"help": "rows of a batch in evaluation"})
    learning_rate: float = field(default=5e-4, metadata={"help": "at its highest"})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "of the learning rate"})
    warmup_steps: float = field(default=0.05, metadata={"help": "steps, or a share of them if below 1"})
    num_train_epochs: float = field(default=1.0, metadata={"help": "passes over the data"})
    logging_steps: float = field(default=10, metadata={"help": "steps between two lines"})
    save_steps: float = field(default=50, metadata={"help": "steps between checkpoints"})
    save_total_limit: int | None = field(default=2, metadata={"help": "checkpoints to keep"})
    resume: bool = field(default=False, metadata={"help": "go on from the newest checkpoint in --output-dir"})
    early_stopping: int | None = field(
        default=None, metadata={"help": "stop after so many evaluations without a better one; keep the best"}
    )

    def __post_init__(self) -> None:
        if not self.output_dir:
            raise InputError("--output-dir: say where the adapter is to go")
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        self.dataloader_pin_memory = not self.use_cpu
        self.remove_unused_columns = False  # rows are what the collator wants
        self.prediction_loss_only = True
        self.label_names = ["labels"]
        if self.eval_steps is not None and self.eval_strategy == "no":
            self.eval_strategy = "steps"
        if self.early_stopping is not None:
            if self.eval_strategy == "no":
                raise InputError("--early-stopping needs evaluations: give --eval-steps, too")
            self.load_best_model_at_end = True
            self.save_strategy, self.save_steps = self.eval_strategy, self.eval_steps or self.save_steps
        if self.report_to in (None, "none") and find_spec("tensorboard") is not None:
            self.report_to = "tensorboard"
        super().__post_init__()


@dataclass(frozen=True)
class Prepared:
    """The data, ready for the trainer.

    Attributes:
        train, evaluation: tokenised rows.
        asked: evaluation rows that have a prompt and an answer.
        bad, cut: rows skipped; prompts cut.
    """

    train: list[Encoded]
    evaluation: list[Encoded]
    asked: list[Text]
    bad: int
    cut: int

    def digest(self) -> str:
        """Of the tokenised training rows."""
        return hashlib.sha256(json.dumps(self.train).encode()).hexdigest()[:16]


def prepare(options: DataOptions, tokenizer: Any, scheme: PaddingScheme, seed: int) -> Prepared:
    """Read and tokenise.

    Raises:
        InputError: data cannot be read, a completion does not fit, or with ``--strict`` a row is unusable.
    """
    columns = {
        "prompt": options.prompt_column,
        "completion": options.completion_column,
        "messages": options.messages_column,
        "text": options.text_column,
        "tokenizer": tokenizer,
    }
    texts, bad = read_texts(options.train_file, split=options.train_split, **columns)
    if options.eval_file is not None:
        others, more = read_texts(options.eval_file, split=options.eval_split, **columns)
        bad += more
    else:
        if not 0 <= options.eval_share < 1:
            raise InputError(f"--eval-share is {options.eval_share}: give 0, or a share below 1")
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
        held = set(order[: round(options.eval_share * len(texts))])
        others = [text for i, text in enumerate(texts) if i in held]
        texts = [text for i, text in enumerate(texts) if i not in held]
    cut = 0
    encoded: list[list[tuple[Text, Encoded]]] = []
    long: list[TooLongError] = []
    for rows in (texts, others):
        encoded.append([])
        for text in rows:
            try:
                ids = encode(tokenizer, text, scheme.max_length, options.learn == "everything")
                whole = encode(tokenizer, text, None)
            except TooLongError as error:
                long.append(error)
            except InputError as error:
                bad.append(error)
            else:
                cut += len(whole["input_ids"]) > len(ids["input_ids"])
                encoded[-1].append((text, ids))
    if long:
        needed = max(error.needed for error in long)
        raise InputError(f"{long[0]} ({len(long)} rows do not fit; --max-length {needed} would do)")
    if bad and options.strict:
        raise InputError(f"{bad[0]} ({len(bad)} unusable rows; leave out --strict to skip them)")
    if not encoded[0]:
        raise InputError(f"{options.train_file}: no rows to train on" + (f": {bad[0]}" if bad else ""))
    if state().is_main_process:
        for error in bad[:SHOWN]:
            print(f"skipped: {error}", file=sys.stderr)
        if bad or cut:
            print(f"{len(bad)} unusable rows skipped, {cut} prompts cut to fit", file=sys.stderr)
    asked = [text for text, _ in encoded[1] if text.answer is not None]
    return Prepared([ids for _, ids in encoded[0]], [ids for _, ids in encoded[1]], asked, len(bad), cut)


def adapted(options: ModelOptions, training: Training) -> Any:
    """The model to train.

    Raises:
        InputError: it cannot be loaded, or has no such modules.
    """
    quantised = {}
    if options.load_in_4bit or options.load_in_8bit:
        if find_spec("bitsandbytes") is None:
            raise InputError("--load-in-4bit and --load-in-8bit need bitsandbytes: pip install bitsandbytes")
        if options.full:
            raise InputError("--full: quantised weights cannot be trained; leave it out for QLoRA")
        kind = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
        quantised = {
            "quantization_config": BitsAndBytesConfig(**(kind if options.load_in_4bit else {"load_in_8bit": True}))
        }
    set_seed(training.seed)  # the adapter's first weights are random
    model = load_model(options.model, DTYPES.get(options.dtype, "auto"), **quantised)
    model.config.use_cache = False  # nobody decodes in a training step; `generate` turns it on for itself
    if options.full:
        return model
    if quantised:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=training.gradient_checkpointing)
    names = options.target_modules
    config = LoraConfig(
        r=options.lora_r,
        lora_alpha=2 * options.lora_r if options.lora_alpha is None else options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=names[0] if names == ["all-linear"] else names,
        use_rslora=options.use_rslora,
        use_dora=options.use_dora,
        task_type="CAUSAL_LM",
    )
    linear = sorted({name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)})
    known = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if names != ["all-linear"] and (unknown := [name for name in names if name.rpartition(".")[2] not in known]):
        raise InputError(
            f"--target-modules: no module {', '.join(unknown)} in the model, there are {', '.join(linear)}"
        )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise InputError(f"--target-modules {' '.join(names)}: {error}") from None


def checkpoints(directory: Path) -> Iterator[Path]:
    """The complete checkpoints in a directory, the newest first. The trainer's state is what it writes last."""
    found = [path.parent for path in directory.glob("checkpoint-*/trainer_state.json") if _whole(path)]
    yield from sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)


def _whole(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except ValueError:
        return False
    return True


def settled(settings: dict[str, Any], directory: Path, resume: bool) -> Path | None:
    """The checkpoint to go on from, if it is one of the same run. Writes the settings down.

    Raises:
        InputError: there is none although one is to be resumed, or one although not, or of other settings.
    """
    newest = next(checkpoints(directory), None)
    record = directory / RECORD
    if resume and newest is None:
        raise InputError(f"--resume: there is no checkpoint in {directory}")
    if newest is not None and not resume:
        raise InputError(f"{directory} holds {newest.name} of an earlier run: add --resume, or choose another one")
    if newest is not None and record.exists():
        before = json.loads(record.read_text(encoding="utf-8"))["settings"]
        for name, value in json.loads(json.dumps(settings)).items():
            if before.get(name) != value:
                raise InputError(
                    f"--resume: the run in {directory} had {name} {before.get(name)!r}, now it is {value!r}: "
                    "give what it had, or choose another --output-dir"
                )
    elif state().is_main_process:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(record, json.dumps({"settings": settings}, indent=2))
    state().wait_for_everyone()
    return newest


RUN = (  # of TrainingArguments, what the weights depend on
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "max_grad_norm",
    "max_steps",
    "num_train_epochs",
    "optim",
    "seed",
    "data_seed",
    "bf16",
    "fp16",
    "train_sampling_strategy",
)


def train(data: DataOptions, chosen: ModelOptions, padding: PaddingOptions, training: Training) -> Report | None:
    """Read, train, save, and measure the drift of what came out.

    Raises:
        InputError: data or options are at fault, or contradict what is in the output directory.
        UnsupportedModelError: the level cannot run this model.
    """
    if padding.level not in (*LEVELS, NO_LEVEL):
        raise InputError(f"--level is {padding.level!r}: choose one of {', '.join((*LEVELS, NO_LEVEL))}")
    task = task_named(data.task)
    if task.by_likelihood:
        raise InputError(f"--task {data.task} compares log-likelihoods of choices: take classification, or text")
    directory = Path(training.output_dir)
    tokenizer = load_tokenizer(chosen.model)
    if tokenizer.eos_token_id is None:
        raise InputError(f"the tokenizer of {chosen.model} has no end-of-sequence token")
    scheme = PaddingScheme.of(
        tokenizer,
        side=padding.padding_side,
        truncation_side=padding.truncation_side,
        max_length=padding.max_length,
        pad_to_multiple_of=padding.pad_to_multiple_of,
        level=None if padding.level == NO_LEVEL else padding.level,
    )
    scheme.configure(tokenizer)
    prepared = prepare(data, tokenizer, scheme, training.seed)
    args = training.to_dict()
    settings = {
        **asdict(chosen),
        **asdict(scheme),
        "learn": data.learn,
        "train_rows": prepared.digest(),
        "processes": state().num_processes,
        **{name: args[name] for name in RUN},
    }
    newest = settled(settings, directory, training.resume)

    model = adapted(chosen, training)
    if scheme.level is not None:
        rope_pad_fix.apply(model, scheme.level)
    questions = Questions(
        task,
        [prompt_ids(tokenizer, text.prompt, scheme.max_length) for text in prepared.asked],
        [str(text.answer) for text in prepared.asked],
        scheme.side,
        scheme.pad_token_id,
        training.per_device_eval_batch_size,
        data.max_new_tokens,
    )
    if task.metrics and questions.prompts and training.metric_for_best_model in (None, "loss"):
        training.metric_for_best_model, training.greater_is_better = f"eval_{task.metrics[0]}", True
    trainer = PaddingFreeTrainer(
        model=model,
        args=training,
        train_dataset=prepared.train,
        eval_dataset=prepared.evaluation or None,
        data_collator=scheme.collator(),
        processing_class=tokenizer,
        callbacks=[] if training.early_stopping is None else [EarlyStoppingCallback(training.early_stopping)],
        questions=questions if questions.prompts else None,
    )
    outcome = trainer.train(resume_from_checkpoint=str(newest) if newest else None)
    scores = trainer.evaluate() if prepared.evaluation else {}
    scores = {name.removeprefix("eval_"): value for name, value in scores.items() if name.startswith("eval_")}
    scores = {name: scores[name] for name in ("loss", *task.metrics) if name in scores}
    model = trainer.accelerator.unwrap_model(trainer.model)
    if state().is_main_process:
        model.config.use_cache = True
        if chosen.full:
            model.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
            scheme.save(directory)
        else:
            save_adapter(model, directory, scheme, tokenizer)
    state().wait_for_everyone()
    report = drift(model, tokenizer, prepared.asked[: data.drift_rows], data, scheme, directory, chosen.model)
    if state().is_main_process:
        facts = {
            "rows": len(prepared.train),
            "rows skipped": prepared.bad,
            "prompts cut": prepared.cut,
            "steps": trainer.state.global_step,
            "training loss": f"{outcome.training_loss:.4f}",
            **{name: args[name] for name in RUN},
            **environment(),
        }
        record = {"settings": settings, "facts": facts, "scores": scores, "arguments": sys.argv[1:]}
        write_atomically(directory / RECORD, json.dumps(record, indent=2))
        name = str(model.config._name_or_path) if chosen.model == SMOLLM2 else chosen.model
        write_card(directory, name, scheme, facts, scores, report, not chosen.full)
    return report


def drift(
    model: Any,
    tokenizer: Any,
    texts: Sequence[Text],
    data: DataOptions,
    scheme: PaddingScheme,
    directory: Path,
    name: str,
) -> Report | None:
    """How far the result's scores drift with the batch, stock and at its level; written to ``drift/``."""
    if not texts:
        return None
    levels = [STOCK] if scheme.level is None else [STOCK, scheme.level]
    rows: list[Mapping[str, str]] = [{"prompt": text.prompt, "completion": str(text.answer)} for text in texts]
    report = measure(
        model,
        rows,
        tokenizer,
        data.task,
        levels=levels,
        max_length=scheme.max_length,
        max_new_tokens=data.max_new_tokens,
        name=f"{directory.name} on {name}",
        output=directory / "drift",
    )
    if state().is_main_process:
        write(report, directory / "drift")
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; what the user can put right ends in one line and exit status 2."""
    parser = HfArgumentParser(
        (DataOptions, ModelOptions, PaddingOptions, Training), description=__doc__.partition("\n")[0]
    )
    try:
        options = parser.parse_args_into_dataclasses(list(sys.argv[1:] if arguments is None else arguments))
        report = train(*options)
    except (InputError, rope_pad_fix.UnsupportedModelError) as error:
        parser.error(str(error))
    if report is not None and state().is_main_process:
        from rope_pad_fix.drift.command import console_for_output

        console_for_output().print(table(report))


if __name__ == "__main__":
    main()
