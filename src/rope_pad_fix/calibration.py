"""Which product and which number of rows round every row alike: found by trying, remembered, and checked again.

A matrix product may round differently for another number of rows ``M``, since libraries choose kernels by shape. A
`Plan` names a product and a *tile* such that all multiples of the tile agree, bit for bit. Nothing is assumed: plans
are found for a device, data type, thread count and layer shape, kept for the process and in the user's cache directory.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from filelock import FileLock
from torch import Tensor

from .storage import cache_directory, write_atomically

Product = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]

TILES = (2, 4, 8, 16, 32, 64)  # never 1: a single row is every library's special case, and two cost hardly more
_ROWS = 384  # how many rows of data agreement is demanded on
_WORK = 2e9  # or fewer, for large layers: multiplications of one product


@dataclass(frozen=True)
class Plan:
    """How to multiply so that rows do not see each other.

    Attributes:
        product: a key of `PRODUCTS`.
        tile: rows are padded up to a multiple of it.
        fixed: no tile passed; every product gets exactly ``tile`` rows, so that its shape never changes.
    """

    product: str
    tile: int
    fixed: bool = False


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""))


# In the order of preference among equal tiles. In float32 on the CPU torch's own product is MKL's, which needs a tile
# of 4 or more and is slow at few rows; oneDNN's inner product rounds alike from two rows on.
PRODUCTS: dict[str, Product] = {"onednn": _onednn, "torch": F.linear}


def products(device: torch.device, dtype: torch.dtype) -> list[str]:
    """The products there are for a device and data type."""
    onednn = device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()
    return ["onednn", "torch"] if onednn and hasattr(torch.ops.mkldnn, "_linear_pointwise") else ["torch"]


@functools.cache
def plan_for(device: torch.device, dtype: torch.dtype, threads: int, n: int, k: int) -> Plan:
    """The plan of a layer of ``n`` outputs and ``k`` inputs. After ``torch.set_num_threads`` it is another question.

    The first call in a process looks into the user's cache directory. What it finds there is probed before it is
    believed; what it does not find is calibrated and added.
    """
    path = cache_directory() / f"plans-{_environment(device)}.json"
    key = f"{dtype} {threads} threads {n}x{k}"
    known = _read(path).get(key)
    for plan in _possible(device, dtype):
        if known == list(astuple(plan)) and (plan.fixed or _probe(plan, device, dtype, n, k)):
            return plan
    plan = calibrate(device, dtype, n, k)
    _add(path, key, plan)
    return plan


def calibrate(device: torch.device, dtype: torch.dtype, n: int, k: int) -> Plan:
    """Find the smallest tile at which all row counts agree bit for bit; among equal tiles the preferred product.

    Tried with torch's current number of threads on up to 384 rows: every multiple of the tile up to three tiles and to
    16 rows, then some up to all the rows, each at several offsets, since a row's place matters to a kernel, too.
    """
    rows = int(min(_ROWS, max(_WORK / (n * k), 1.5 * TILES[-1])))
    x, weight = _data(device, dtype, rows, n, k)
    for tile in TILES:
        counts = [
            *range(tile, max(3 * tile, 16) + 1, tile),
            *(m for m in (32, 64, 96, 128, 192, 256, 320) if m % tile == 0),
        ]
        for name in products(device, dtype):
            if _agrees(PRODUCTS[name], [m for m in counts if m <= rows], x, weight):
                return Plan(name, tile)
    return Plan("torch", TILES[-1], fixed=True)


def _possible(device: torch.device, dtype: torch.dtype) -> list[Plan]:
    plans = [Plan(product, tile) for product in products(device, dtype) for tile in TILES]
    return [*plans, Plan("torch", TILES[-1], fixed=True)]


def _probe(plan: Plan, device: torch.device, dtype: torch.dtype, n: int, k: int) -> bool:
    """A quick look at whether a remembered plan still holds."""
    x, weight = _data(device, dtype, 4 * TILES[-1], n, k)
    return _agrees(
        PRODUCTS[plan.product], [plan.tile, 2 * plan.tile, 3 * plan.tile], x[: max(64, 4 * plan.tile)], weight
    )


def _data(device: torch.device, dtype: torch.dtype, rows: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """``[rows, k]`` and ``[n, k]``. In every other row the terms of each sum cancel in pairs, so that the result is
    nothing but rounding and shows any other order of summation; with ordinary data in bfloat16 only one result in some
    ten thousand would. The other rows are normal, with outliers, as hidden states are."""
    generator = torch.Generator().manual_seed(0)
    columns = torch.randperm(k, generator=generator)
    half = k // 2
    weight = torch.randn(n, k, generator=generator) * k**-0.5
    weight[:, columns[half : 2 * half]] = -weight[:, columns[:half]]
    x = torch.randn(rows, k, generator=generator)
    x[::2, columns[half : 2 * half]] = x[::2, columns[:half]]
    x[::2, columns[2 * half :]] = 0
    x[1::2] *= 1 + 20 * (torch.rand(k, generator=generator) < 0.01)
    return x.to(device, dtype), weight.to(device, dtype)


def _agrees(product: Product, counts: list[int], x: Tensor, weight: Tensor) -> bool:
    """Whether products of so many rows, at several offsets, give the rows of the product of all rows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        reference = product(x, weight, None)
        for count in counts:
            last = len(x) - count
            offsets = {0, last}
            if count <= 16:
                offsets |= set(torch.randint(last + 1, (2,), generator=generator).tolist())
            for start in sorted(offsets):
                if not torch.equal(product(x[start : start + count], weight, None), reference[start : start + count]):
                    return False
    return True


def _environment(device: torch.device) -> str:
    """A digest of everything a plan depends on besides its key."""
    facts: list[Any] = [torch.__version__, torch.__config__.show(), torch.get_float32_matmul_precision()]
    facts += [
        f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(("MKL_", "ONEDNN_", "DNNL_", "CUBLAS_"))
    ]
    if device.type == "cpu":
        facts += [_cpu(), torch.backends.cpu.get_cpu_capability()]
    elif device.type == "cuda":
        facts += [torch.cuda.get_device_name(device), torch.version.cuda, torch.backends.cuda.matmul.allow_tf32]
    return hashlib.sha256(json.dumps([device.type, *map(str, facts)]).encode()).hexdigest()[:16]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "CPU part")
    facts = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in lines}
    return json.dumps([platform.machine(), platform.processor(), *(facts.get(name) for name in wanted)])


def _read(path: Path) -> dict[str, list[Any]]:
    try:
        plans = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return plans if isinstance(plans, dict) else {}


def _add(path: Path, key: str, plan: Plan) -> None:
    """Keep a plan. A cache directory that cannot be written only means calibrating again in the next process."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            plans = _read(path) | {key: astuple(plan)}
            write_atomically(path, json.dumps(plans, indent=1))
    except OSError:
        pass
