"""The GLM classes of transformers: rotary pairs interleaved over part of each head, gate and up projection in one."""

from . import Family

FAMILIES = tuple(
    Family(
        name.lower(),
        decoders=(f"{name}Model",),
        causal_lms=(f"{name}ForCausalLM",),
        classifiers=(f"{name}ForSequenceClassification",),
    )
    for name in ("Glm", "Glm4")
)
