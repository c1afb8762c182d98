"""What a drift measurement found: plain dataclasses, and their JSON, version 1 of the schema.

``report.json`` is `Report.to_json`: every attribute below under its own name. Numbers that do not exist (no reference
to score against, no row changed) are null. Times and memory differ from run to run; everything else is a function of
the settings, the model, the data, and the machine.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import InputError

SCHEMA_VERSION = 1
STOCK = "stock"  # the level of a model that is run unpatched


@dataclass(frozen=True)
class Setting:
    """How the rows of one cell are run; its reference is the same with one row at a time.

    Attributes:
        dtype: of the weights, ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        attention: the attention implementation, such as ``"sdpa"`` or ``"eager"``.
        level: ``"stock"``, ``"positions"``, ``"padding_free"`` or ``"batch_invariant"``.
        path: ``"ids"`` (input_ids) or ``"embeds"`` (inputs_embeds).
        padding: the side, ``"left"`` or ``"right"``.
        batch_size: rows.
    """

    dtype: str
    attention: str
    level: str
    path: str
    padding: str
    batch_size: int

    def __str__(self) -> str:
        """In a fixed order, for tables and file names."""
        return " ".join((self.dtype, self.attention, self.level, self.path, self.padding, f"batch {self.batch_size}"))


@dataclass(frozen=True)
class Difference:
    """How far logits of a batch are from those of the lone run, over real positions of all rows.

    Attributes:
        largest_logit: the largest absolute difference of a logit.
        mean_logit: the mean absolute difference of all logits.
        mean_log_prob: the mean absolute difference of the log-probability of the token that follows.
    """

    largest_logit: float
    mean_logit: float
    mean_log_prob: float


@dataclass(frozen=True)
class ChangedRow:
    """One row whose prediction in the batch is not that of the lone run.

    Attributes:
        row: its number in the data, from 0.
        prompt: its text.
        references: the right answers; empty if there are none.
        single: the prediction alone.
        batched: the prediction in the batch.
        first_token: the first generated token that differs, from 0; null for predictions by log-likelihood.
    """

    row: int
    prompt: str
    references: list[str]
    single: str
    batched: str
    first_token: int | None


@dataclass(frozen=True)
class Cell:
    """One setting, compared with the lone runs of the same model, data type and level.

    Attributes:
        setting: how it was run.
        n: rows.
        single: by metric, the score of the lone runs, 0 to 1; empty without references.
        batched: by metric, the score of the batches.
        drift: ``batched - single`` of the task's first metric; null without references.
        drift_interval: its 95 % paired bootstrap interval, ``[low, high]``.
        rows_changed: rows whose prediction is not the same.
        first_tokens: of each changed row, the first generated token that differs, from 0.
        median_first_token: their median; null if there is none.
        prompt: logits over the prompts.
        continuation: logits along the reference continuation (without references: along the lone run's answer),
            teacher-forced; null if there is none.
        padding: of each row, how many pads it was given.
        largest_logit: of each row, the largest absolute difference of a logit.
        padding_fraction: pads among all slots of the prompt batches, 0 to 1.
        tokens_per_second: generated (or, by log-likelihood, scored) real tokens a second; of all processes.
        single_tokens_per_second: the same of the lone runs.
        peak_memory: bytes, the largest of the processes: of the device's allocator, or on the CPU resident memory.
        examples: some of the changed rows, at most `EXAMPLES`.
    """

    setting: Setting
    n: int
    single: dict[str, float]
    batched: dict[str, float]
    drift: float | None
    drift_interval: tuple[float, float] | None
    rows_changed: int
    first_tokens: list[int]
    median_first_token: float | None
    prompt: Difference
    continuation: Difference | None
    padding: list[int]
    largest_logit: list[float]
    padding_fraction: float
    tokens_per_second: float
    single_tokens_per_second: float
    peak_memory: int
    examples: list[ChangedRow] = field(default_factory=list)


EXAMPLES = 5  # changed rows kept with each cell


@dataclass(frozen=True)
class Report:
    """A whole measurement.

    Attributes:
        model: what was measured: path, Hub id, or class of the model object.
        data: where the rows came from.
        task: the task's name, such as ``"squad"``.
        metrics: the task's metrics; the first one is what drift is measured in. Empty without references.
        order: how rows were put into batches.
        max_new_tokens: of each answer; 0 for predictions by log-likelihood.
        seed: of shuffling and of the bootstrap.
        environment: date, machine, threads, versions.
        cells: one for each setting.
        schema_version: of this format.
    """

    model: str
    data: str
    task: str
    metrics: list[str]
    order: str
    max_new_tokens: int
    seed: int
    environment: dict[str, str]
    cells: list[Cell]
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """The text of ``report.json``."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report in the text of a ``report.json``.

        Raises:
            InputError: it is none, or of another schema version.
        """
        try:
            found: dict[str, Any] = json.loads(text)
            version = found["schema_version"]
        except (ValueError, KeyError, TypeError):
            raise InputError("not a drift report: no JSON object with a schema_version") from None
        if version != SCHEMA_VERSION:
            raise InputError(f"a drift report of schema version {version}; this release reads {SCHEMA_VERSION}")
        try:
            return cls(**found | {"cells": [cell_from(cell) for cell in found["cells"]]})
        except (KeyError, TypeError) as error:
            raise InputError(f"a damaged drift report: {error}") from None


def cell_from(found: dict[str, Any]) -> Cell:
    """A cell from its JSON object."""
    interval, continuation = found["drift_interval"], found["continuation"]
    return Cell(
        **found
        | {
            "setting": Setting(**found["setting"]),
            "drift_interval": None if interval is None else (interval[0], interval[1]),
            "prompt": Difference(**found["prompt"]),
            "continuation": None if continuation is None else Difference(**continuation),
            "examples": [ChangedRow(**row) for row in found["examples"]],
        }
    )
