"""Does it matter how one pads in training, and how in inference? LoRA on real addresses, trained and run in every way.

    python benchmarks/train_infer_matrix.py --dtype bfloat16 --seed 0

Trains SmolLM2-135M (examples/data/usaddress.py, train/finetune.py) in float32 with stock transformers and patched,
padded on either side, and measures each adapter alone and in batches, padded on either side, stock and patched, in
float32 and bfloat16. What is finished is kept in ``docs/finetuning``, one file a measurement, and not done again; the
tables of docs/finetuning.md are written anew from all of them. On two cores a training takes 10 to 20 minutes, and a
measurement as long.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from common import markdown_table, progress

import rope_pad_fix
from rope_pad_fix.drift import Cell, Report, measure
from rope_pad_fix.drift.results import STOCK
from rope_pad_fix.loading import DTYPES, SMOLLM2
from rope_pad_fix.patching import DEFAULT_LEVEL
from rope_pad_fix.storage import write_atomically

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "finetuning"
PAGE = ROOT / "docs" / "finetuning.md"
SIDES = ("left", "right")
BATCHES = (8, 32)
NEW_TOKENS = 72
ROWS = 64  # of the test data
LEARNING_RATE = 2e-3  # as in `make finetune`
DTYPES_BY_TURNS = ("float32", "bfloat16")
BEGIN, END = "<!-- written by benchmarks/train_infer_matrix.py -->", "<!-- to here -->"


@dataclass(frozen=True)
class Run:
    """One adapter, trained in float32, and the data type it is measured in."""

    dtype: str
    level: str
    side: str
    seed: int

    @property
    def adapter(self) -> str:
        """The directory that it is trained in."""
        return f"{self.level}-{self.side}-seed{self.seed}"

    def __str__(self) -> str:
        return f"{self.dtype}-{self.adapter}"


def main() -> None:
    """Train and measure what is missing; write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", action="append", choices=("float32", "bfloat16"), help="both by default")
    parser.add_argument("--seed", action="append", type=int, help="0, 1 and 2 by default")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "out" / "matrix", help="for data, adapters, unfinished runs"
    )
    parser.add_argument("--tables", action="store_true", help="only write the tables")
    options = parser.parse_args()
    if not options.tables:
        for run in runs(options.dtype or DTYPES_BY_TURNS, options.seed or (0, 1, 2)):
            if not result_file(run).exists():
                progress(str(run))
                perform(run, options.work)
                PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def runs(dtypes: Sequence[str], seeds: Sequence[int]) -> Iterator[Run]:
    """All of them, the first seed's first."""
    for seed in seeds:
        for dtype in dtypes:
            for level in (STOCK, DEFAULT_LEVEL):
                yield from (Run(dtype, level, side, seed) for side in SIDES)


def result_file(run: Run) -> Path:
    """Where a finished run is kept."""
    return RESULTS / f"{run}.json"


def perform(run: Run, work: Path) -> None:
    """Train, measure, keep. Weights equal to those of a run that was measured are not measured again."""
    files = {part: work / f"{part}.jsonl" for part in ("train", "test")}
    if not files["test"].exists():
        script = ROOT / "examples" / "data" / "usaddress.py"
        subprocess.run([sys.executable, script, "--train", files["train"], files["test"]], check=True)
    directory = work / run.adapter
    began = time.time()
    if not (directory / "adapter_model.safetensors").exists():
        command = [sys.executable, ROOT / "train" / "finetune.py", "--train-file", files["train"], "--eval-share", 0]
        command += ["--output-dir", directory, "--dtype", "float32", "--padding-side", run.side, "--seed", run.seed]
        command += ["--level", "none" if run.level == STOCK else run.level, "--disable-tqdm", "true"]
        command += ["--learning-rate", LEARNING_RATE]
        command += ["--resume"] if any(directory.glob("checkpoint-*/trainer_state.json")) else []
        subprocess.run(list(map(str, command)), check=True)
    record = json.loads((directory / "finetuning.json").read_text(encoding="utf-8"))
    weights = hashlib.sha256((directory / "adapter_model.safetensors").read_bytes()).hexdigest()[:16]
    mine = (run.dtype, weights)
    same = next((other for other, found in finished() if (other.dtype, found["weights"]) == mine), None)
    kept = {"weights": weights, "training": record["facts"], "minutes": round((time.time() - began) / 60, 1)}
    if same is None:
        model, tokenizer = rope_pad_fix.load_adapter(SMOLLM2, directory, dtype=DTYPES[run.dtype])
        report = measure(
            model,
            files["test"],
            tokenizer,
            "fields",
            levels=(STOCK, DEFAULT_LEVEL),
            batch_sizes=BATCHES,
            limit=ROWS,
            max_new_tokens=NEW_TOKENS,
            name=str(run),
            output=directory / f"matrix-{run.dtype}",
        )
        kept["report"] = json.loads(report.to_json())
    else:
        kept["same_as"] = str(same)
    RESULTS.mkdir(parents=True, exist_ok=True)
    write_atomically(result_file(run), json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def finished() -> list[tuple[Run, dict[str, Any]]]:
    """The runs that are kept, and what is kept of them."""
    found = []
    for run in runs(DTYPES_BY_TURNS, range(100)):
        if result_file(run).exists():
            found.append((run, json.loads(result_file(run).read_text(encoding="utf-8"))))
    return found


def page(text: str) -> str:
    """The page with the tables of all finished runs in it."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + "\n\n".join([BEGIN, *tables(finished()), END]) + after


def tables(found: Sequence[tuple[Run, dict[str, Any]]]) -> list[str]:
    """What was trained, and for each data type what it scores."""
    by_name = {str(run): kept for run, kept in found}
    reports = {run: read(kept if "report" in kept else by_name[kept["same_as"]]) for run, kept in found}
    header = ["data type", "trained", "seed", "steps", "training loss", "SHA-256 of the adapter", "F1 alone, stock"]
    trained = [
        [
            run.dtype,
            way(run.level, run.side),
            str(run.seed),
            str(kept["training"]["steps"]),
            kept["training"]["training loss"],
            f"`{kept['weights']}`",
            f"{reports[run].cells[0].single['micro_f1']:.3f}",
        ]
        for run, kept in found
    ]
    parts = [markdown_table(header, trained)]
    for dtype in dict.fromkeys(run.dtype for run in reports):
        mine = {run: report for run, report in reports.items() if run.dtype == dtype}
        parts += [f"**{dtype}**", markdown_table(*outcomes(mine)), claim(mine)]
    return parts


def read(kept: dict[str, Any]) -> Report:
    """The report in a result file."""
    return Report.from_json(json.dumps(kept["report"]))


def way(level: str, side: str) -> str:
    """How rows were run, in words."""
    return f"{'stock' if level == STOCK else 'patched'}, {side}"


def outcomes(reports: dict[Run, Report]) -> tuple[list[str], list[list[str]]]:
    """A row for each way to train and each way to run; a mean over seeds, and each seed's drift."""
    header = ["trained", "run", "batch", "F1 alone", "F1 in batches", "drift, a seed each [95 %]", "texts changed"]
    rows = []
    for level, side in dict.fromkeys((run.level, run.side) for run in reports):
        mine = [report for run, report in reports.items() if (run.level, run.side) == (level, side)]
        for cells in zip(*(report.cells for report in mine), strict=True):
            setting = cells[0].setting
            rows.append(
                [
                    way(level, side),
                    way(setting.level, setting.padding),
                    str(setting.batch_size),
                    f"{mean(cell.single['micro_f1'] for cell in cells):.3f}",
                    f"{mean(cell.batched['micro_f1'] for cell in cells):.3f}",
                    "; ".join(map(drift, cells)) if any(cell.drift for cell in cells) else "0",
                    ", ".join(f"{cell.rows_changed} of {cell.n}" for cell in cells),
                ]
            )
    return header, rows


def drift(cell: Cell) -> str:
    """A drift and its interval."""
    low, high = cell.drift_interval or (0.0, 0.0)
    return f"{cell.drift:+.3f} [{low:+.3f}, {high:+.3f}]"


def claim(reports: dict[Run, Report]) -> str:
    """Whether padding alike in training and inference keeps the drift of a stock model under 3 %."""
    alike = {
        side: [
            abs(cell.drift or 0)
            for run, report in reports.items()
            if (run.level, run.side) == (STOCK, side)
            for cell in report.cells
            if (cell.setting.level, cell.setting.padding) == (STOCK, side)
        ]
        for side in SIDES
    }
    largest = {side: max(drifts) for side, drifts in alike.items() if drifts}
    said = [f"{side} {drift:.3f} ({'holds' if drift < 0.03 else 'fails'})" for side, drift in largest.items()]
    if not said:
        return "“Padding alike in training and inference keeps the drift under 0.03”: not measured yet."
    return (
        "“Padding alike in training and inference keeps the drift under 0.03”, stock, largest |drift|: "
        + "; ".join(said)
        + "."
    )


if __name__ == "__main__":
    main()
