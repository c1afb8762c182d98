"""The processes that share a measurement, started by ``accelerate launch`` or ``torchrun``; usually there is one."""

from __future__ import annotations

from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

Result = TypeVar("Result")


def state() -> PartialState:
    """Accelerate's, on the CPU (gloo) where there is no CUDA device."""
    return PartialState(cpu=not torch.cuda.is_available())


def device() -> torch.device:
    """The one that this process is to use."""
    if state().num_processes == 1:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    own: torch.device = state().device
    return torch.device("cpu") if own.type == "cpu" else own  # not cpu:0


def gathered(mine: list[Result]) -> list[Result]:
    """The lists of all processes, joined in their order."""
    return mine if state().num_processes == 1 else gather_object(mine)
