"""The README.md of what was trained: what it is, how to load it, what it scores and how far that drifts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from ..drift.report import header, line, summary
from ..drift.results import Report
from ..padding import PaddingScheme
from ..storage import write_atomically


def write_card(
    directory: Path,
    base: str,
    scheme: PaddingScheme,
    facts: Mapping[str, Any],
    scores: Mapping[str, float],
    report: Report | None,
    adapter: bool,
) -> None:
    """Write it.

    Args:
        directory: of the adapter or model.
        base: the base model's name.
        scheme: the padding scheme.
        facts: what else is to be said, by name.
        scores: of the answers to the evaluation rows.
        report: the drift measured, or None.
        adapter: whether it is an adapter, and not a whole model.
    """
    tags = ["rope-pad-fix", *(["lora"] if adapter else [])]
    data = ModelCardData(
        base_model=base if "/" in base and not Path(base).is_absolute() else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=tags,
    )
    loading = (
        f"model, tokenizer = rope_pad_fix.load_adapter({base!r}, {directory.name!r})"
        if adapter
        else f"model = AutoModelForCausalLM.from_pretrained({directory.name!r})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({directory.name!r})"
        + (f"\nmodel = rope_pad_fix.apply(model, {scheme.level!r})" if scheme.level else "")
    )
    imports = "import rope_pad_fix" + (
        "" if adapter else "\nfrom transformers import AutoModelForCausalLM, AutoTokenizer"
    )
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {directory.name}",
        f"{'An adapter of' if adapter else 'Fine-tuned from'} `{base}`, trained with the padding scheme to run it "
        "with.",
        "## How to load it",
        f"```python\n{imports}\n\n{loading}\n"
        "inputs = rope_pad_fix.PaddingScheme.load(" + repr(directory.name) + ').encode(tokenizer, ["…", "…"])\n'
        "model.generate(**inputs, do_sample=False)\n```",
        "## Padding scheme",
        _table(("", ""), [(name, str(value)) for name, value in vars(scheme).items()]),
        "## Training",
        _table(("", ""), [(name, str(value)) for name, value in facts.items()]),
    ]
    if scores:
        parts += ["## Scores", _table(("metric", "value"), [(name, f"{value:.4f}") for name, value in scores.items()])]
    if report is not None:
        rows = [line(report, cell) for cell in report.cells]
        parts += ["## Drift between single and batched inference", summary(report), _table(header(report), rows)]
        parts += ["[drift/report.md](drift/report.md) has the rows that change."]
    write_atomically(directory / "README.md", "\n\n".join(parts) + "\n")


def _table(head: Any, rows: Any) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in lines)
