"""Qwen2: biases on query, key and value; some layers may use a sliding window."""

from . import Family

FAMILIES = (
    Family(
        "qwen2",
        decoders=("Qwen2Model",),
        causal_lms=("Qwen2ForCausalLM",),
        classifiers=("Qwen2ForSequenceClassification",),
    ),
)
