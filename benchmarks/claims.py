"""Common claims about batching and padding, each with an experiment, its number, and a verdict. Prints markdown.

    python benchmarks/claims.py > docs/claims.md

SmolLM2-135M where a real model can show it; else tiny random models whose matrices are multiplied by 6, since at their
usual scale attention and positions hardly matter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from common import environment, markdown_table, progress
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)
from transformers.utils import logging

from rope_pad_fix import demo, smollm2
from rope_pad_fix.drift import Diagnosis, diagnose
from rope_pad_fix.rows import position_ids
from rope_pad_fix.verify import padded

LENGTHS = (5, 23, 40)
VOCABULARY = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
Row = tuple[str, str, str, str]


def scaled(build: Callable[[], Any], dtype: torch.dtype = torch.float32) -> Any:
    """A random model with its matrices times 6."""
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model.to(dtype).eval()


def llama(**options: Any) -> Any:
    """A tiny Llama."""
    return LlamaForCausalLM(LlamaConfig(**SIZES | options))


def gpt2() -> Any:
    """A tiny model with learned positions."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=3, n_head=4, n_positions=256))


def bloom() -> Any:
    """A tiny model whose attention sees distances (ALiBi)."""
    return BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=64, n_layer=3, n_head=4))


def dynamic_ntk() -> Any:
    """A tiny Llama whose rotary frequencies follow the longest row."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    return llama(max_position_embeddings=32, rope_parameters=rope)


def longrope() -> Any:
    """A tiny Phi-3 that switches rotary frequencies at 32 tokens."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [1.0 + 2 * i for i in range(8)]}
    return Phi3ForCausalLM(Phi3Config(**SIZES, original_max_position_embeddings=32, rope_parameters=rope))


def of_tiny(model: Any, lengths: Sequence[int] = LENGTHS, layout: str = "left", **usage: Any) -> Diagnosis:
    """The diagnosis of a batch of random rows."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in lengths]
    ids, mask = padded(rows, layout)
    return diagnose(model, batch={"input_ids": ids, "attention_mask": mask}, **usage)


def remains(diagnosis: Diagnosis, factor: str) -> float:
    """The drift that remains when one thing is changed."""
    found = next(one for one in diagnosis.factors if one.name == factor)
    assert found.drift is not None
    return found.drift


def number(value: float) -> str:
    """For the table."""
    return f"{value:.1e}" if value else "0"


def shifted(model: Any, rows: Sequence[Tensor], pads: int, counted: bool) -> float:
    """The mean |Δ log-prob| of rows with so many pads more on the left, with default positions or counted ones."""
    total, count = 0.0, 0
    ids, mask = padded(list(rows), "left")
    ids, mask = (nn.functional.pad(x, (pads, 0)) for x in (ids, mask))
    more = {"position_ids": position_ids(mask)} if counted else {}
    with torch.no_grad():
        batched = model(ids, attention_mask=mask, **more).logits
        for row, logits, real in zip(rows, batched, mask, strict=True):
            alone = model(row[None]).logits[0]
            mine, theirs = (log_probs(x, row) for x in (logits[real == 1], alone))
            total += (mine - theirs).abs().sum().item()
            count += len(mine)
    return total / count


def in_forward(model: Any, rows: Sequence[Tensor]) -> float:
    """The largest |Δ logit| at real tokens of a batch padded on the right."""
    ids, mask = padded(list(rows), "right")
    with torch.no_grad():
        batched = model(ids, attention_mask=mask).logits
        each = [
            (logits[real == 1].float() - model(row[None]).logits[0].float()).abs().max().item()
            for logits, real, row in zip(batched, mask, rows, strict=True)
        ]
    return max(each)


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of each token but the first."""
    return logits[:-1].float().log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def norms(model: Any, rows: Sequence[Tensor]) -> tuple[float, float]:
    """The mean relative difference between batch and lone rows before RMSNorms and behind them."""
    ids, mask = padded(list(rows), "left")
    modules = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    seen: list[tuple[Tensor, Tensor]] = []
    handles = [m.register_forward_hook(lambda _, args, out: seen.append((args[0], out))) for m in modules]
    try:
        with torch.no_grad():
            model(ids, attention_mask=mask)
            batched, sums, count = list(seen), torch.zeros(2, dtype=torch.float64), 0
            for i, row in enumerate(rows):
                seen.clear()
                model(row[None])
                for mine, theirs in zip(batched, seen, strict=True):
                    for side in (0, 1):
                        a, b = mine[side][i][mask[i] == 1].float(), theirs[side][0].float()
                        sums[side] += ((a - b).norm() / b.norm()).item()
                    count += 1
    finally:
        for handle in handles:
            handle.remove()
    before, behind = (sums / count).tolist()
    return before, behind


def precisions(model: Any, row: Tensor) -> dict[str, float]:
    """How far the logits of a lone row in each precision of float32 products are from those in float64."""
    before = torch.get_float32_matmul_precision()
    exact = copy.deepcopy(model).double()
    found = {}
    try:
        with torch.no_grad():
            reference = exact(row[None]).logits
            for precision in ("highest", "high", "medium"):
                torch.set_float32_matmul_precision(precision)
                found[precision] = (model(row[None]).logits.double() - reference).abs().max().item()
    finally:
        torch.set_float32_matmul_precision(before)
    return found


def claims() -> Iterator[Row]:
    """Claim, experiment, measured, verdict."""
    progress("SmolLM2")
    models, real, right = {}, {}, {}
    rows: list[Tensor] = []
    for name, dtype in demo.DTYPES.items():
        models[name], tokenizer = smollm2.load(dtype)
        rows = [torch.tensor(tokenizer(prompt).input_ids) for prompt in demo.PROMPTS[:4]]
        usage = {"tokenizer": tokenizer, "prompts": demo.PROMPTS[:4]}
        real[name] = diagnose(models[name], padding_side="left", **usage)
        right[name] = diagnose(models[name], padding_side="right", generate=True, **usage)
    single, half = real["float32"], real["bfloat16"]

    progress("tiny models")
    plain, absolute, alibi = (of_tiny(scaled(build)) for build in (llama, gpt2, bloom))
    ntk, long = of_tiny(scaled(dynamic_ntk), (10, 60)), of_tiny(scaled(longrope), (10, 60))

    def both(diagnosis: Diagnosis, factor: str | None = None) -> str:
        drift = diagnosis.drift if factor is None else remains(diagnosis, factor)
        return f"{number(drift)} of {diagnosis.largest_logit:.0f}"

    yield (
        "Left padding makes RoPE positions wrong (float32)",
        "plain RoPE, left padding, default positions: tiny Llama; SmolLM2",
        f"{both(plain)}; {both(single)}",
        "**No.** RoPE sees distances, and those are right; what is left is rounding",
    )
    pads = [number(shifted(models["bfloat16"], rows, n, counted)) for counted in (False, True) for n in (0, 64)]
    yield (
        "… in bfloat16",
        "SmolLM2, mean \\|Δ log-prob\\| with 0 / 64 pads more: default positions; counted by the mask",
        f"{pads[0]} / {pads[1]}; {pads[2]} / {pads[3]}",
        "**In part.** Positions far from 0 round otherwise; counted ones do not move with the padding, and most of the "
        "drift stays",
    )
    yield (
        "… with dynamic NTK or longrope",
        "tiny models, rows of 10 and 60 tokens; with counted positions",
        f"NTK {both(ntk)}, counted {both(ntk, 'position_ids')}; "
        f"longrope {both(long)}, counted {both(long, 'position_ids')}",
        "**Yes, and positions do not mend it:** the longest row of the batch sets the frequencies of all",
    )
    yield (
        "Models with absolute positions suffer less than RoPE models",
        "tiny GPT-2 against tiny Llama, left padding, float32, default positions",
        f"{both(absolute)}; {both(plain)}",
        "**The reverse.** Learned positions are looked up by number, and the number counts pads",
    )
    yield (
        "Models with relative biases are robust",
        "tiny BLOOM (ALiBi, made from the mask), left padding, float32",
        both(alibi),
        "**Yes,** under left padding with a mask",
    )
    yield (
        "Equal lengths remove all drift",
        "SmolLM2, 4 times the longest row, no padding: float32; bfloat16",
        f"{both(single, 'batch size')}; {both(half, 'batch size')}",
        "**No.** The padding's share goes; matrix kernels still see another number of rows",
    )
    yield (
        "Uniform right padding is the safe default: in `forward`",
        "SmolLM2, logits at real tokens of the prompt: float32; bfloat16",
        "; ".join(number(in_forward(model, rows)) for model in models.values()),
        "**Yes** in float32: causal attention never sees a pad. In bfloat16 it rounds as left padding does",
    )
    yield (
        "… in `generate`",
        "SmolLM2, logits of new tokens: float32; bfloat16",
        f"{both(right['float32'])}; {both(right['bfloat16'])}",
        "**No.** The next token is read at a pad, and later ones get wrong positions",
    )
    yield (
        "Disabling the KV cache does not help",
        "SmolLM2, left padding, with the cache → without: float32; bfloat16",
        f"{number(single.drift)} → {number(remains(single, 'KV cache'))}; "
        f"{number(half.drift)} → {number(remains(half, 'KV cache'))}",
        "**True:** what drifts is not the cache",
    )
    yield (
        "float32 removes it",
        "SmolLM2 in bfloat16 → the same in float32: left padding; right padding in `generate`",
        f"{number(half.drift)} → {number(remains(half, 'dtype float32'))}; "
        f"{number(right['bfloat16'].drift)} → {number(remains(right['bfloat16'], 'dtype float32'))}",
        "**Rounding, nearly; bugs, not at all**",
    )
    name = "attention implementation"
    yield (
        "Eager attention removes it",
        "SmolLM2, left padding, sdpa → eager: float32; bfloat16",
        "; ".join(f"{number(one.drift)} → {number(remains(one, name))}" for one in (single, half)),
        "**No.** It rounds otherwise, and drifts as far",
    )
    ratios = {}
    for name, model in models.items():
        before, behind = norms(model, rows)
        ratios[name] = f"{before:.1e} → {behind:.1e} ({behind / before:.1f}x)"
    yield (
        "RMSNorm in low precision amplifies it",
        "SmolLM2, all norms: mean relative difference of their inputs → outputs: float32; bfloat16",
        "; ".join(ratios.values()),
        "**Not by its precision.** Norms hide a few large channels that agree, so that the others' differences show; "
        "they do so in float32 as well",
    )
    yield (
        "A difference of 1e-6 or less is normal rounding, more is a bug",
        "SmolLM2 in float32, left padding: drift of logits, and of the largest logit",
        f"{number(single.drift)}; {single.drift / single.largest_logit:.1e}",
        "**Too simple.** Rounding grows with the logits and the depth; compare with the largest logit",
    )
    found = precisions(models["float32"], max(rows, key=len))
    yield (
        '`set_float32_matmul_precision("high")` fixes precision',
        "SmolLM2, one row, largest distance from float64: highest; high; medium",
        "; ".join(number(value) for value in found.values()),
        '**No.** `"highest"`, the default, is the exact setting; the others allow less where the hardware has it '
        "(TF32 on GPUs, bfloat16 on some CPUs)",
    )
    yield (
        "`rope_pad_fix.apply(model)` removes it",
        "SmolLM2, left padding: float32; bfloat16; right padding: float32; bfloat16",
        "; ".join(number(remains(d, "rope_pad_fix")) for d in (single, half, *right.values())),
        "**Yes,** to the bit",
    )


def main() -> None:
    """Measure, print the page."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print("# Claims about batching and padding, checked\n")
    print(
        "Numbers are the largest absolute difference of a logit between a batch and each row alone (“of”: the largest "
        "logit), over the prompt and four decoded tokens, unless they say otherwise. Stock transformers, unless they "
        "say otherwise. By `benchmarks/claims.py`.\n"
    )
    print(markdown_table(("claim", "experiment", "measured", "verdict"), claims()))
    print(f"\n{environment()}")


if __name__ == "__main__":
    main()
