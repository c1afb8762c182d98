"""Tiny models whose attention matters, ragged batches of every layout, and one real model."""

from __future__ import annotations

import inspect
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "0")  # OpenMP threads that spin while waiting slow a busy machine down

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Glm4Config,
    Glm4ForCausalLM,
    Glm4ForSequenceClassification,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GlmForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    MixtralForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen2MoeForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3MoeForSequenceClassification,
)

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification),
    "glm": (GlmConfig, GlmForCausalLM, GlmForSequenceClassification),
    "glm4": (Glm4Config, Glm4ForCausalLM, Glm4ForSequenceClassification),
}
MIXTURES = {  # of experts
    "mixtral": (MixtralConfig, MixtralForCausalLM, MixtralForSequenceClassification),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM, Qwen2MoeForSequenceClassification),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3MoeForSequenceClassification),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM, None),
}
if hasattr(transformers, "Glm4MoeLiteConfig"):  # keys and values from latents; not in transformers 4
    MIXTURES["glm4_moe_lite"] = (transformers.Glm4MoeLiteConfig, transformers.Glm4MoeLiteForCausalLM, None)
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXTURE_SIZES = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 64, **_EXPERTS},
    "qwen3_moe": {"num_experts": 4, **_EXPERTS},
    "glm4_moe": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **_EXPERTS},
    "glm4_moe_lite": {
        "n_routed_experts": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        **_EXPERTS,
    },
}
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
LAYOUTS = ("left", "right", "holes")


def tiny(family="llama", head="causal_lm", dtype=torch.float32, attention="sdpa", **config):
    """A random model. Its matrices are multiplied by 6: at the default scale attention and positions hardly matter,
    and a test of them could not fail."""
    config_class, causal_lm, classifier = (FAMILIES | MIXTURES)[family]
    config = MIXTURE_SIZES.get(family, {}) | config
    torch.manual_seed(0)
    model = {"causal_lm": causal_lm, "classifier": classifier}[head](config_class(**(SIZES | config)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    if head == "causal_lm":
        model.generation_config.eos_token_id = None
    model.set_attn_implementation(attention)
    return model.to(dtype).eval()


WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
WORDS += ("plus", "minus", "times", "is", "what", "how", "many")


def words_tokenizer():
    """A tokenizer of whole words, whose pad token is its end of sequence, 2."""
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def ragged(lengths=(5, 23, 40), seed=0, vocabulary=128):
    """One tensor of token ids a row, without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (n,), generator=generator) for n in lengths]


def batch(rows, layout="left", extra=0, pad=0):
    """``(input_ids, attention_mask)`` of ragged rows. "holes" pads inside each row, behind its second token, too."""
    width = max(map(len, rows)) + extra + (3 if layout == "holes" else 0)
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        n = len(row)
        slots = torch.arange(width)
        if layout == "left":
            slots = slots[width - n :]
        elif layout == "right":
            slots = slots[:n]
        else:  # [two tokens][pads][the rest], so that the row ends in a real token
            slots = torch.cat([slots[: min(2, n - 1)], slots[width - (n - min(2, n - 1)) :]])
        ids[i, slots] = row
        mask[i, slots] = 1
    return ids, mask


@pytest.fixture(scope="session")
def smollm2_path():
    from rope_pad_fix import smollm2

    return smollm2.checkpoint()


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_path)


@pytest.fixture(autouse=True)
def _two_threads():
    """Bits depend on the thread count; the tests state theirs."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
