"""transformers' Trainer, making only the logits that a loss needs, and scoring generated answers as it evaluates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import Trainer

from ..drift.metrics import Task
from ..drift.processes import gathered, state
from ..drift.running import Runner
from ..patching import status


@dataclass(frozen=True)
class Questions:
    """What a model is asked as it is evaluated.

    Attributes:
        task: how answers are scored.
        prompts: token ids of each.
        answers: the right ones.
        side: where batches are padded.
        pad: the id of the padding.
        batch_size: rows of a batch.
        max_new_tokens: of each answer.
    """

    task: Task
    prompts: list[list[int]]
    answers: list[str]
    side: str
    pad: int
    batch_size: int
    max_new_tokens: int


class PaddingFreeTrainer(Trainer):
    """A Trainer for a model that `rope_pad_fix.apply` has patched, or has not.

    Where no padding is computed, logits are made only where a label is predicted from. With questions, evaluation also
    generates their answers, shared out over the processes, and adds the task's scores to the metrics: ``eval_micro_f1``
    and the like, for early stopping and the choice of the best checkpoint.
    """

    def __init__(self, *arguments: Any, questions: Questions | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.questions = questions
        patched = status(self.model)
        self._targets_only = patched is not None and patched.level != "positions"

    def compute_loss(self, model: Any, inputs: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        """The loss of a batch."""
        if self._targets_only:
            inputs = {**inputs, "logits_to_keep": 1}
        return super().compute_loss(model, inputs, *arguments, **options)

    def evaluation_loop(self, *arguments: Any, **options: Any) -> Any:
        """Over the data set, and then over the questions."""
        output = super().evaluation_loop(*arguments, **options)
        prefix = options.get("metric_key_prefix", "eval")
        output.metrics.update({f"{prefix}_{name}": value for name, value in self.scores().items()})
        return output

    def scores(self) -> dict[str, float]:
        """The task's scores of the model's answers to the questions."""
        if self.questions is None or not self.questions.task.metrics:
            return {}
        asked = self.questions
        model = self.accelerator.unwrap_model(self.model)
        model.eval()
        runner = Runner(model, asked.pad, "ids", asked.max_new_tokens)
        order = sorted(range(len(asked.prompts)), key=lambda i: len(asked.prompts[i]))
        batches = [order[i : i + asked.batch_size] for i in range(0, len(order), asked.batch_size)]
        found: list[tuple[int, str]] = []
        for batch in batches[state().process_index :: state().num_processes]:
            answers, _ = runner.answers([asked.prompts[i] for i in batch], asked.side)
            texts = [
                self.processing_class.decode(answer.tokens, skip_special_tokens=True).strip() for answer in answers
            ]
            found += zip(batch, texts, strict=True)
        predictions = [text for _, text in sorted(gathered(found))]
        return asked.task.scores(asked.task.tally(predictions, [[answer] for answer in asked.answers]))
