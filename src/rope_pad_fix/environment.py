"""Where figures come from: date, machine, threads, versions."""

from __future__ import annotations

import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch


def environment() -> dict[str, str]:
    """What a measurement depends on besides its settings, by name."""
    machine = cpu()
    if torch.cuda.is_available():
        machine += f", {torch.cuda.get_device_name()}"
    versions = {name: version(name) for name in ("torch", "transformers", "rope-pad-fix")}
    return {"date": str(date.today()), "machine": machine, "threads": str(torch.get_num_threads()), **versions}


def cpu() -> str:
    """The CPU's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
