"""Mixtures of experts: attention like the dense models', routers and experts that multiply by matrices of their own."""

from . import Family

FAMILIES = tuple(
    Family(
        name,
        decoders=(f"{prefix}Model",),
        causal_lms=(f"{prefix}ForCausalLM",),
        classifiers=(f"{prefix}ForSequenceClassification",),
    )
    for name, prefix in (
        ("mixtral", "Mixtral"),
        ("qwen2_moe", "Qwen2Moe"),
        ("qwen3_moe", "Qwen3Moe"),
        ("glm4_moe", "Glm4Moe"),
        ("glm4_moe_lite", "Glm4MoeLite"),
    )
)
