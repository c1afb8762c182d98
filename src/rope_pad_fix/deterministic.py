"""Everything that makes a run repeatable, set for the length of a ``with`` block."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"  # NVIDIA, cuBLAS: results reproducibility
# Of a generation configuration: what draws numbers or keeps several answers, and its value for greedy decoding.
GREEDY: dict[str, Any] = {"do_sample": False, "num_beams": 1, "temperature": None, "top_k": None, "top_p": None}
GREEDY |= {"min_p": None, "typical_p": None, "epsilon_cutoff": None, "eta_cutoff": None}


@contextmanager
def deterministic(seed: int = 0, model: Any = None) -> Iterator[None]:
    """Seed Python's, NumPy's and torch's random numbers, switch autocast and reduced precision of float32 products off
    and deterministic algorithms on; afterwards all of it, and the states of the generators, are as before.

    This makes a run repeatable. It does not make a batch give what its rows give alone: `rope_pad_fix.apply` does.

    Args:
        seed: of all generators.
        model: if given, it decodes greedily (by its generation configuration) and is in evaluation mode.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    precision, matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul, torch.backends.cudnn
    switches = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    algorithms = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    workspace = os.environ.get(_CUBLAS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    configuration = getattr(model, "generation_config", None)
    decoding = {name: getattr(configuration, name, None) for name in GREEDY}
    training = getattr(model, "training", False)
    try:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        torch.set_float32_matmul_precision("highest")
        matmul.allow_tf32 = cudnn.allow_tf32 = cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)
        os.environ.setdefault(_CUBLAS, ":4096:8")
        if model is not None:
            model.eval()
        if configuration is not None:
            _set(configuration, GREEDY)
        with torch.autocast("cpu", enabled=False), torch.autocast(device, enabled=False):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)
        torch.set_float32_matmul_precision(precision)
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = switches
        torch.use_deterministic_algorithms(algorithms[0], warn_only=algorithms[1])
        if workspace is None:
            os.environ.pop(_CUBLAS, None)
        if model is not None:
            model.train(training)
        if configuration is not None:
            _set(configuration, decoding)


def _set(configuration: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(configuration, name, value)
