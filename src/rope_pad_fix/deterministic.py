"""Everything that makes a run repeatable, set for the length of a ``with`` block."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import torch

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"  # NVIDIA, cuBLAS: results reproducibility
_DEVICES = ("cpu", "cuda", "mps", "xpu")  # that know autocast
# Of a generation configuration: what draws numbers or keeps several answers, and its value for greedy decoding.
GREEDY: dict[str, Any] = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "temperature": None}
GREEDY |= {"top_k": None, "top_p": None, "top_h": None, "min_p": None, "typical_p": None, "penalty_alpha": None}
GREEDY |= {"epsilon_cutoff": None, "eta_cutoff": None}


@contextmanager
def deterministic(seed: int = 0, model: Any = None) -> Iterator[None]:
    """Seed Python's, NumPy's and torch's random numbers, switch autocast and reduced precision of float32 products off
    and deterministic algorithms on; afterwards all of it, and the states of the generators, are as before.

    This makes a run repeatable. It does not make a batch give what its rows give alone: `rope_pad_fix.apply` does.
    An operation that has no deterministic form warns. On CUDA, cuBLAS reads its setting when it is first used: enter
    the block before that.

    Args:
        seed: of all generators.
        model: if given, it decodes greedily (by its generation configuration) and is in evaluation mode.
    """
    with ExitStack() as stack:
        stack.enter_context(_seeded(seed))
        stack.enter_context(full_precision())
        stack.enter_context(deterministic_algorithms())
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if model is not None:
            stack.enter_context(_greedy(getattr(model, "generation_config", None)))
            stack.enter_context(evaluation(model))
        yield


@contextmanager
def full_precision() -> Iterator[None]:
    """Products and convolutions of float32 in float32, not in TF32 or bfloat16, whichever of torch's two interfaces
    asked for less; afterwards both are as before."""
    backends: Any = torch.backends
    parts = [backends, *(part for name in ("cuda", "cudnn", "mkldnn") for part in _parts(getattr(backends, name)))]
    parts = [part for part in parts if hasattr(part, "fp32_precision")]
    before = [part.fp32_precision for part in parts]  # since torch 2.9
    setters: list[tuple[Callable[[Any], None], Any]] = []
    for get, put in (
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (lambda: backends.cudnn.allow_tf32, lambda value: setattr(backends.cudnn, "allow_tf32", value)),
    ):
        with suppress(RuntimeError):  # the newer interface has set what the older one cannot express
            setters.append((put, get()))
    try:
        torch.set_float32_matmul_precision("highest")  # and with it torch.backends.cuda.matmul.allow_tf32
        backends.cudnn.allow_tf32 = False
        for part in parts:
            if part.fp32_precision in ("tf32", "bf16"):
                part.fp32_precision = "ieee"
        yield
    finally:
        for put, value in setters:
            put(value)
        for part, value in zip(parts, before, strict=True):
            if part.fp32_precision != value:
                part.fp32_precision = value


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Deterministic algorithms on, with a warning where there is none, and no choice of kernels by timing."""
    enabled, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    warn_only, workspace = torch.is_deterministic_algorithms_warn_only_enabled(), os.environ.get(_CUBLAS)
    try:
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)
        if torch.cuda.is_available():
            os.environ.setdefault(_CUBLAS, ":4096:8")
        yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        if workspace is None:
            os.environ.pop(_CUBLAS, None)


@contextmanager
def evaluation(model: Any) -> Iterator[None]:
    """Evaluation mode; afterwards every module is in the mode in which it was."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


@contextmanager
def _greedy(configuration: Any) -> Iterator[None]:
    present = {} if configuration is None else vars(configuration)
    before = {name: present[name] for name in GREEDY if name in present}
    try:
        present.update({name: GREEDY[name] for name in before})
        yield
    finally:
        present.update(before)


def _parts(backend: Any) -> list[Any]:
    return [backend, *(getattr(backend, name, None) for name in ("matmul", "conv", "rnn"))]
