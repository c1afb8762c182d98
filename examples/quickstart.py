"""Three prompts in one padded batch of SmolLM2, against each prompt alone, before and after `rope_pad_fix.apply`.
In bfloat16, as models are mostly run: there padding shows in the prompts' logits, too, not only in the text."""

import torch
from transformers.utils import logging

import rope_pad_fix
from rope_pad_fix import smollm2

PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time, in a village by the sea, there lived"]


@torch.inference_mode()
def run(prompts, side="left"):
    """The logits of each prompt's own tokens, and 20 tokens of text."""
    inputs = tokenizer(prompts, padding=True, padding_side=side, return_tensors="pt")
    logits = [row[mask == 1] for row, mask in zip(model(**inputs).logits, inputs.attention_mask, strict=True)]
    new = model.generate(**inputs, max_new_tokens=20)[:, inputs.input_ids.shape[1] :]
    return list(zip(logits, tokenizer.batch_decode(new, skip_special_tokens=True), strict=True))


def compare(title):
    """Print how far each prompt in a batch is from the same prompt alone."""
    for side in ("left", "right"):
        print(f"{title}, padded on the {side}")
        for prompt, (logits, text), (own_logits, own_text) in zip(PROMPTS, run(PROMPTS, side), alone, strict=True):
            difference = (logits - own_logits).abs().max().item()
            verdict = "same text" if text == own_text else "OTHER TEXT"
            print(f"  logits differ by {difference:.5f}, {verdict}: {prompt + text!r}")


logging.set_verbosity_error()
logging.disable_progress_bar()
model, tokenizer = smollm2.load(torch.bfloat16)
alone = [run([prompt])[0] for prompt in PROMPTS]
compare("stock")
rope_pad_fix.apply(model)
alone = [run([prompt])[0] for prompt in PROMPTS]
compare("patched")
