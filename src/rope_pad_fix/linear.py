"""What else could see how many rows there are: products and activations that cannot (level ``"batch_invariant"``).

Products: ``M`` rows are padded up to a multiple of the calibrated tile, and multiplied by the calibrated product. Every
``nn.Linear`` gets another class for it. Activations: torch's kernels compute most of a tensor with vector instructions
and the rest of each thread's share one by one, which rounds otherwise; tensors are padded so that there is no rest.
Modules that multiply by matrices of their own (routers, experts) keep their code, and have ``F.linear`` and
``torch.sigmoid`` replaced while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.activations import ACT2CLS

from .calibration import PRODUCTS, Plan, plan_for

_ACTIVATIONS = {cls[0] if isinstance(cls, tuple) else cls for cls in ACT2CLS.values()}
_NARROW = 16  # outputs
_VECTOR = 64  # elements: no less than torch's vectorised CPU loops take at a time, in any data type
_GRAIN = 32768  # elements: torch gives each thread at least so many (at::internal::GRAIN_SIZE)


def invariant_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` whose result for a row is the same bits in any company.

    Args:
        input: ``[..., K]``.
        weight: ``[N, K]``.
        bias: ``[N]`` or None.

    Returns:
        ``[..., N]``.
    """
    device = input.device
    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else input.dtype
    n, k = weight.shape
    if n < _NARROW:  # a handful of outputs takes kernels of its own, which see the rows
        bias = None if bias is None else F.pad(bias, (0, _NARROW - n))
        return invariant_linear(input, F.pad(weight, (0, 0, 0, _NARROW - n)), bias)[..., :n]
    plan = plan_for(device, dtype, _threads(device), n, k)
    x = input.reshape(-1, k)  # always two dimensions: torch adds a bias in another way to products of three
    rows = x.shape[0]
    missing = -rows % plan.tile
    if missing:
        # Any row will do, and this is quicker than zeros; but autocast does not take every data type for `cat`.
        x = F.pad(x, (0, 0, 0, missing)) if autocast else torch.cat((x, x[:1].expand(missing, k)))
    if autocast:
        out = _multiply(F.linear, plan, x, weight, bias)
    elif plan.product == "torch" or not torch.is_grad_enabled():
        out = _multiply(PRODUCTS[plan.product], plan, x, weight, bias)
    else:
        out = cast(Tensor, _Differentiable.apply(x, weight, bias, plan))
    if missing:
        out = out[:rows]
    return out.view(*input.shape[:-1], n)


def _multiply(product: Callable[..., Tensor], plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if plan.fixed and len(x) > plan.tile:
        return torch.cat([product(part, weight, bias) for part in x.split(plan.tile)])
    return product(x, weight, bias)


class _Differentiable(torch.autograd.Function):
    """A product that torch has no gradient for, with the gradient of ``F.linear``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _multiply(PRODUCTS[plan.product], plan, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        return (
            gradient @ weight if wants_x else None,
            gradient.t() @ x if wants_weight else None,
            gradient.sum(0) if wants_bias else None,
            None,
        )


class InvariantLinear(nn.Linear):
    """The class that an ``nn.Linear`` is given; it shows the name of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return invariant_linear(input, self.weight, self.bias)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new_linear, (), self.__dict__


def _new_linear() -> InvariantLinear:
    return InvariantLinear.__new__(InvariantLinear)


InvariantLinear.__name__ = InvariantLinear.__qualname__ = nn.Linear.__name__
InvariantLinear.__module__ = nn.Linear.__module__


def invariant_elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function whose result for an element is the same bits wherever it stands in a tensor."""
    count = x.numel()
    if x.device.type != "cpu" or not count:
        return function(x)
    size, threads = count, 0
    while threads != (threads := min(torch.get_num_threads(), -(-size // _GRAIN))):
        size = count + -count % (_VECTOR * threads)
    if size == count and x.is_contiguous():
        return function(x)
    return function(F.pad(x.reshape(-1), (0, size - count)))[:count].view(x.shape)


class _Invariant(TorchFunctionMode):
    """While it is active in a thread, products and activations are invariant there."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            return invariant_linear(*args, **(kwargs or {}))
        if func in (torch.sigmoid, Tensor.sigmoid, F.sigmoid):
            return invariant_elementwise(torch.sigmoid, *args)
        return func(*args, **(kwargs or {}))


def invariant_module(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``forward`` of a module that multiplies by matrices of its own, or contains one that does."""
    with _Invariant():
        return inner(*args, **kwargs)


PARTS: dict[str, Callable[..., Any]] = {"products": invariant_module, "activation": invariant_elementwise}


def parts(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The modules below one that need more than `make_invariant`, and which of `PARTS` each is."""
    inside: set[nn.Module] = set()
    for m in module.modules():
        if m in inside or isinstance(m, InvariantLinear) or _plain(m):
            continue
        if type(m) in _ACTIVATIONS:
            yield m, "activation"
        elif _holds_matrices(m) or (_is_block(m) and any(map(_holds_matrices, m.children()))):
            inside |= {child for child in m.modules() if type(child) not in _ACTIVATIONS}
            yield m, "products"


def make_invariant(module: nn.Module) -> None:
    """Give every plain linear layer below a module its class, and find the plans they need."""
    plain = [m for m in module.modules() if _plain(m)]
    for layer in plain:
        layer.__class__ = InvariantLinear
    if plain:
        tiles(module)


def tiles(module: nn.Module) -> dict[tuple[int, int], str]:
    """For each shape ``(outputs, inputs)`` of the invariant linear layers below a module: its product and tile."""
    found = {}
    for layer in module.modules():
        if isinstance(layer, InvariantLinear) and layer.weight.device.type != "meta":
            n, k = max(layer.out_features, _NARROW), layer.in_features
            plan = plan_for(layer.weight.device, layer.weight.dtype, _threads(layer.weight.device), n, k)
            found[n, k] = f"{plan.product} {plan.tile}" + (" fixed" if plan.fixed else "")
    return found


def _threads(device: torch.device) -> int:
    return torch.get_num_threads() if device.type == "cpu" else 0


def _plain(module: nn.Module) -> bool:
    """Whether it is an ``nn.Linear`` that runs its own forward."""
    return type(module) is nn.Linear and "forward" not in module.__dict__


def _holds_matrices(module: nn.Module) -> bool:
    linear = isinstance(module, (nn.Embedding, InvariantLinear)) or _plain(module)
    return not linear and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))


def _is_block(module: nn.Module) -> bool:
    """Whether it is an MLP or mixture of experts, and not a decoder layer or the decoder itself."""
    children = dict(module.named_children())
    return not isinstance(module, nn.ModuleList) and not {"self_attn", "layers", "model", "lm_head"} & children.keys()
