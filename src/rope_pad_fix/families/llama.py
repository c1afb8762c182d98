"""Llama: the plain decoder that others vary."""

from . import Family

FAMILIES = (
    Family(
        "llama",
        decoders=("LlamaModel",),
        causal_lms=("LlamaForCausalLM",),
        classifiers=("LlamaForSequenceClassification",),
    ),
)
