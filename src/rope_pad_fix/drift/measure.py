"""How far scores and logits move between rows one at a time and in batches: settings, lone runs, cells, resuming.

For each data type, attention implementation, level and path the rows are run alone once; every cell is compared with
that. With an output directory, what is finished is kept there and a run that was interrupted goes on behind it. Under
``accelerate launch`` the batches are shared out over the processes and the first one writes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from torch import nn

from ..deterministic import evaluation
from ..environment import environment
from ..errors import InputError, UnsupportedModelError
from ..loading import DTYPES
from ..padding import prompt_ids
from ..patching import LEVELS, apply, remove, status
from . import processes
from .batching import ORDERS, PADDINGS, batches
from .data import Example, load_examples
from .metrics import Task, drift_interval
from .metrics import task as task_named
from .processes import gathered
from .results import EXAMPLES, STOCK, Cell, ChangedRow, Difference, Report, Setting
from .running import Answer, Compared, Item, Runner, Sums, watched
from .source import Source
from .store import Lone, Store

PATHS = ("ids", "embeds")

Progress = Callable[[str, int, int], None]
Result = TypeVar("Result")


def measure(
    model: str | Path | nn.Module,
    data: str | Path | Iterable[Mapping[str, Any]],
    tokenizer: Any = None,
    task: str = "text",
    *,
    prompt: str = "prompt",
    reference: str | None = "completion",
    choices: str | None = None,
    messages: str = "messages",
    split: str = "test",
    limit: int | None = None,
    paddings: Sequence[str] = PADDINGS,
    batch_sizes: Sequence[int] = (8,),
    dtypes: Sequence[str] | None = None,
    attentions: Sequence[str] | None = None,
    levels: Sequence[str] = (STOCK, "batch_invariant"),
    paths: Sequence[str] = ("ids",),
    order: str = "given",
    pad_to: int | None = None,
    max_length: int | None = None,
    max_new_tokens: int = 32,
    seed: int = 0,
    name: str | None = None,
    output: str | Path | None = None,
    progress: Progress | None = None,
) -> Report:
    """Measure a model's drift: run the rows one at a time and in batches, score both, and compare.

    Args:
        model: a path or Hub id of a causal language model, a ``.gguf`` file, ``"smollm2"`` (the model of the
            demonstration), or a model object. An object is measured as it is, patched or not, and left so; at a level
            other than its own it is patched for the time being.
        data: rows: a JSONL, JSON, CSV or Parquet file, a directory of `datasets`, a Hub id, or mappings.
        tokenizer: of a model object; by default that of the path or id.
        task: ``"squad"``, ``"cmrc"``, ``"fields"``, ``"classification"``, ``"choices"`` or ``"text"``.
        prompt, reference, choices, messages: the columns with the prompt, the right answer or answers (None: there
            are none), the choices (task ``"choices"``), or a chat instead of a prompt.
        split: of a data set with several.
        limit: the first so many rows.
        paddings: sides.
        batch_sizes: rows of a batch.
        dtypes: data types; the model's own by default.
        attentions: attention implementations; the model's own by default.
        levels: what to apply; ``"stock"`` is nothing.
        paths: ``"ids"``, ``"embeds"``, or both.
        order: of rows in batches: ``"given"``, ``"sorted"``, ``"shuffled"``, or ``"equal"`` lengths only.
        pad_to: pad every batch to so many tokens.
        max_length: tokens of a prompt at most; a longer one is cut on the tokenizer's truncation side.
        max_new_tokens: of each answer.
        seed: of shuffling and of the bootstrap.
        name: of the model, for the report; by default what it was given as, or its class.
        output: a directory for finished cells. With the same settings, a later call goes on there.
        progress: called with what is being run, and how many of how many steps are done.

    Returns:
        The report, with one cell for each combination.

    Raises:
        InputError: an argument, the data or the directory is not usable; the message says how to put it right.
    """
    _check("paddings", paddings, PADDINGS)
    _check("levels", levels, (STOCK, *LEVELS))
    _check("paths", paths, PATHS)
    _check("dtypes", DTYPES if dtypes is None else dtypes, DTYPES)
    _check("order", (order,), ORDERS)
    numbers = {"max_new_tokens": [max_new_tokens], "batch_sizes": batch_sizes, "max_length": [max_length]}
    for argument, values in numbers.items():
        for value in values:
            if value is not None and value < 1:
                raise InputError(f"{argument} must be at least 1, got {value}")
    scoring = task_named(task)
    if scoring.by_likelihood and choices is None:
        raise InputError(f"task {task!r} needs the column of the choices: pass choices")
    if not scoring.metrics:
        reference = None
    elif reference is None:
        raise InputError(f"task {task!r} needs references: pass the column, or task 'text' to compare answers only")
    source = Source(model, tokenizer)
    examples = load_examples(
        data,
        prompt=prompt,
        reference=reference,
        choices=choices,
        messages=messages,
        split=split,
        limit=limit,
        tokenizer=source.tokenizer,
    )
    own = source.own
    wanted = [
        Setting(*parts)
        for parts in itertools.product(
            [own[0]] if dtypes is None else dict.fromkeys(dtypes),
            [own[1]] if attentions is None else dict.fromkeys(attentions),
            dict.fromkeys(levels),
            dict.fromkeys(paths),
            dict.fromkeys(paddings),
            dict.fromkeys(batch_sizes),
        )
    ]
    measurement = _Measurement(scoring, examples, source, order, pad_to, max_length, max_new_tokens, seed)
    store = Store(None if output is None else Path(output), measurement.fingerprint())
    cells = measurement.cells(wanted, store, progress or (lambda what, done, total: None))
    return Report(
        model=name or source.name,
        data=data if isinstance(data, str) else str(data) if isinstance(data, Path) else f"{len(examples)} rows",
        task=task,
        metrics=list(scoring.metrics),
        order=order if pad_to is None else f"{order}, padded to {pad_to}",
        max_new_tokens=0 if scoring.by_likelihood else max_new_tokens,
        seed=seed,
        environment=environment() | {"processes": str(processes.state().num_processes)},
        cells=cells,
    )


def _check(name: str, values: Iterable[str], known: Iterable[str]) -> None:
    values, known = list(values), list(known)
    if not values:
        raise InputError(f"{name} is empty: name at least one of {', '.join(known)}")
    for value in values:
        if value not in known:
            raise InputError(f"{name}: {value!r} is not one of {', '.join(known)}")


@contextmanager
def _prepared(model: Any, attention: str, level: str) -> Iterator[None]:
    """The model with an attention implementation, at a level, in evaluation mode; then as it was."""
    before, patched = model.config._attn_implementation_internal, status(model)
    try:
        try:
            remove(model).set_attn_implementation(attention)
            if level != STOCK:
                apply(model, level)
        except (UnsupportedModelError, ValueError, ImportError) as error:
            raise InputError(f"{type(model).__name__} with {attention!r} at level {level!r}: {error}") from error
        with evaluation(model):
            yield
    finally:
        remove(model).set_attn_implementation(before)
        if patched is not None:
            apply(model, patched.level)


@dataclass(frozen=True)
class _RowOutcome:
    """One row of a batch, from whichever process ran it."""

    item: int
    pads: int
    slots: int
    compared: Compared
    answer: Answer | None


@dataclass(frozen=True)
class _Share:
    """What a process did for a cell."""

    outcomes: list[_RowOutcome]
    tokens: int
    seconds: float
    memory: int


class _Measurement:
    """Everything that all cells have in common."""

    def __init__(
        self,
        scoring: Task,
        examples: list[Example],
        source: Source,
        order: str,
        pad_to: int | None,
        max_length: int | None,
        max_new_tokens: int,
        seed: int,
    ) -> None:
        self.scoring, self.examples, self.source = scoring, examples, source
        self.order, self.pad_to, self.max_length = order, pad_to, max_length
        self.max_new_tokens, self.seed = max_new_tokens, seed
        self.prompts = [prompt_ids(source.tokenizer, example.prompt, max_length) for example in examples]
        self.references = [list(example.references) for example in examples]

    def fingerprint(self) -> dict[str, Any]:
        """What must be the same for finished cells to be of use."""
        rows = json.dumps([asdict(example) for example in self.examples], ensure_ascii=False)
        return {
            "model": self.source.name,
            "weights": self.source.digest,
            "data": hashlib.sha256(rows.encode()).hexdigest()[:16],
            "task": self.scoring.name,
            "order": self.order,
            "pad_to": self.pad_to,
            "max_length": self.max_length,
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
            "environment": {name: value for name, value in environment().items() if name != "date"},
        }

    def cells(self, wanted: list[Setting], store: Store, progress: Progress) -> list[Cell]:
        """One for each setting, run or taken from the store."""
        finished = {setting: cell for setting in wanted if (cell := store.cell(setting)) is not None}

        def lone_run(setting: Setting) -> tuple[str, str, str, str]:
            return setting.dtype, setting.attention, setting.level, setting.path

        missing = [setting for setting in wanted if setting not in finished]
        total, done = len(missing) + len(set(map(lone_run, missing))), 0
        for dtype, of_dtype in itertools.groupby(missing, lambda setting: setting.dtype):
            progress(f"{dtype}: loading the model", done, total)
            model = self.source.model(dtype)
            for (_, attention, level, path), settings in itertools.groupby(of_dtype, lone_run):
                with _prepared(model, attention, level):
                    runner = Runner(model, self.source.pad or 0, path, self.max_new_tokens)
                    name = f"{dtype} {attention} {level} {path}"
                    progress(f"{name}: one row at a time", done, total)
                    lone = store.lone(name, lambda: self._alone(runner))  # noqa: B023 - called at once
                    done += 1
                    for setting in settings:
                        progress(str(setting), done, total)
                        finished[setting] = self._cell(runner, setting, lone)
                        store.keep(setting, finished[setting])
                        done += 1
        progress("done", done, total)
        return [finished[setting] for setting in wanted]

    def _alone(self, runner: Runner) -> Lone:
        state = processes.state()
        mine = range(state.process_index, len(self.examples), state.num_processes)
        found: list[tuple[int, list[int], str]] = []
        tokens, seconds = 0, 0.0
        for row in mine:
            if self.scoring.by_likelihood:
                items = self._items(row, None)
                compared = []
                for item in items:
                    (one,), took = runner.compare([item], "left")
                    compared.append(one)
                    tokens, seconds = tokens + len(item.prompt) + len(item.continuation), seconds + took
                found.append((row, [], self._chosen(row, [one.lone_score for one in compared])))
            else:
                (answer,), took = runner.answers([self.prompts[row]], "left")
                tokens, seconds = tokens + _generated(answer), seconds + took
                found.append((row, answer.tokens, self._text(answer.tokens)))
        everyone = sorted(gathered(found))
        speed = sum(gathered([tokens])) / max(gathered([seconds]))
        return Lone([text for _, _, text in everyone], [answer for _, answer, _ in everyone], speed)

    def _cell(self, runner: Runner, setting: Setting, lone: Lone) -> Cell:
        items = [item for row in range(len(self.examples)) for item in self._items(row, lone)]
        state = processes.state()
        plan = batches([len(item.prompt) for item in items], setting.batch_size, self.order, self.seed)
        with watched(runner.model.device) as memory:
            outcomes, tokens, seconds = self._run(
                runner, setting.padding, items, plan[state.process_index :: state.num_processes]
            )
        shares = gathered([_Share(outcomes, tokens, seconds, memory.peak)])
        by_item = sorted((o for share in shares for o in share.outcomes), key=lambda outcome: outcome.item)
        speed = sum(share.tokens for share in shares) / max(share.seconds for share in shares)
        return self._summary(setting, lone, items, by_item, speed, max(share.memory for share in shares))

    def _run(
        self, runner: Runner, side: str, items: list[Item], plan: list[list[int]]
    ) -> tuple[list[_RowOutcome], int, float]:
        """This process's batches: the outcomes, the tokens generated or scored, and the seconds."""
        outcomes: list[_RowOutcome] = []
        tokens, seconds = 0, 0.0
        for batch in plan:
            members = [items[i] for i in batch]
            width = max(len(item.prompt) for item in members) if self.pad_to is None else self.pad_to
            compared, took = runner.compare(members, side, self.pad_to)
            answers: list[Answer | None] = [None] * len(batch)
            if self.scoring.by_likelihood:
                tokens += sum(len(item.prompt) + len(item.continuation) for item in members)
            else:
                generated, took = runner.answers([item.prompt for item in members], side, self.pad_to)
                tokens += sum(map(_generated, generated))
                answers = list(generated)
            seconds += took
            for i, item, one, answer in zip(batch, members, compared, answers, strict=True):
                outcomes.append(_RowOutcome(i, width - len(item.prompt), width, one, answer))
        return outcomes, tokens, seconds

    def _summary(
        self,
        setting: Setting,
        lone: Lone,
        items: list[Item],
        outcomes: list[_RowOutcome],
        speed: float,
        memory: int,
    ) -> Cell:
        of_row: dict[int, list[_RowOutcome]] = {}
        for item, outcome in zip(items, outcomes, strict=True):
            of_row.setdefault(item.row, []).append(outcome)
        predictions, first_tokens, changed = [], [], []
        for row, mine in of_row.items():
            answer, first = mine[0].answer, None
            if answer is None:
                predictions.append(self._chosen(row, [outcome.compared.score for outcome in mine]))
                differs = predictions[row] != lone.predictions[row]
            else:
                predictions.append(self._text(answer.tokens))
                first = _first_difference(answer.tokens, lone.answers[row])
                differs = first is not None
            if differs:
                first_tokens += [] if first is None else [first]
                example = self.examples[row]
                references = list(example.references)
                changed.append(
                    ChangedRow(row, example.prompt, references, lone.predictions[row], predictions[row], first)
                )
        single = self.scoring.tally(lone.predictions, self.references)
        batched = self.scoring.tally(predictions, self.references)
        scores = self.scoring.scores(single), self.scoring.scores(batched)
        drift = interval = None
        if self.scoring.metrics:
            drift = scores[1][self.scoring.metrics[0]] - scores[0][self.scoring.metrics[0]]
            interval = drift_interval(self.scoring, single, batched, self.seed)
        compared = [outcome.compared for outcome in outcomes]
        largest = [
            max(max(o.compared.prompt.largest, o.compared.continuation.largest) for o in mine)
            for mine in of_row.values()
        ]
        prompt = _difference([one.prompt for one in compared])
        assert prompt is not None  # a prompt has a token
        return Cell(
            setting=setting,
            n=len(self.examples),
            single=scores[0],
            batched=scores[1],
            drift=drift,
            drift_interval=interval,
            rows_changed=len(changed),
            first_tokens=first_tokens,
            median_first_token=median(first_tokens) if first_tokens else None,
            prompt=prompt,
            continuation=_difference([one.continuation for one in compared]),
            padding=[max(outcome.pads for outcome in mine) for mine in of_row.values()],
            largest_logit=largest,
            padding_fraction=sum(o.pads for o in outcomes) / sum(o.slots for o in outcomes),
            tokens_per_second=speed,
            single_tokens_per_second=lone.tokens_per_second,
            peak_memory=memory,
            examples=changed[:EXAMPLES],
        )

    def _items(self, row: int, lone: Lone | None) -> list[Item]:
        """What is run for a row: each of its choices, or its reference, or where there is none the lone answer."""
        example, prompt = self.examples[row], self.prompts[row]
        if self.scoring.by_likelihood:
            return [Item(row, prompt, self._continuation(choice)) for choice in example.choices]
        if example.references:
            return [Item(row, prompt, self._continuation(example.references[0]))]
        return [Item(row, prompt, [] if lone is None else lone.answers[row])]

    def _chosen(self, row: int, scores: list[float]) -> str:
        return self.examples[row].choices[max(range(len(scores)), key=scores.__getitem__)]

    def _continuation(self, text: str) -> list[int]:
        ids: list[int] = self.source.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def _text(self, tokens: list[int]) -> str:
        return str(self.source.tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def _generated(answer: Answer) -> int:
    return len(answer.tokens) + answer.ended


def _first_difference(tokens: list[int], others: list[int]) -> int | None:
    if tokens == others:
        return None
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(others)))


def _difference(sums: list[Sums]) -> Difference | None:
    """Over all items; in their order, so that it is the same number however many processes ran them."""
    logits, log_probs = sum(one.logit_count for one in sums), sum(one.log_prob_count for one in sums)
    if not logits:
        return None
    return Difference(
        max(one.largest for one in sums),
        math.fsum(one.logits for one in sums) / logits,
        math.fsum(one.log_probs for one in sums) / max(log_probs, 1),
    )
