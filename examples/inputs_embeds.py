"""Embeddings instead of token ids: a soft prompt before text that is padded on the left, so that the mask has a hole.

    soft prompt   padding   text
    1 1 1 1       0 0 0     1 1 1 1 1

Each row of the batch is compared with the same row alone, which has no padding, before and after `rope_pad_fix.apply`.
"""

import torch
from transformers.utils import logging

import rope_pad_fix
from rope_pad_fix import smollm2

PROMPTS = ["The capital of France is", "Name five things to pack for a picnic in the mountains. First,"]
SOFT_TOKENS = 4


@torch.inference_mode()
def run(prompts):
    """The logits of each row's real slots, soft prompt included, and 16 tokens of its text."""
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    text = model.get_input_embeddings()(inputs.input_ids)
    embeds = torch.cat([soft_prompt.expand(len(prompts), -1, -1), text], 1)
    mask = torch.cat([torch.ones(len(prompts), SOFT_TOKENS, dtype=torch.long), inputs.attention_mask], 1)
    logits = model(inputs_embeds=embeds, attention_mask=mask).logits
    new = model.generate(inputs_embeds=embeds, attention_mask=mask, max_new_tokens=16)  # new tokens only
    return [(row[real == 1], tokenizer.decode(ids)) for row, real, ids in zip(logits, mask, new, strict=True)]


def compare(title):
    """Print how far each row of the batch is from the same row alone."""
    print(title)
    for prompt, (logits, text), (own_logits, own_text) in zip(PROMPTS, run(PROMPTS), alone, strict=True):
        difference = (logits - own_logits).abs().max().item()
        verdict = "same text" if text == own_text else "OTHER TEXT"
        print(f"  logits differ by {difference:.5f}, {verdict}: {prompt + text!r}")


logging.set_verbosity_error()
logging.disable_progress_bar()
model, tokenizer = smollm2.load()
weights = model.get_input_embeddings().weight.detach()
generator = torch.Generator().manual_seed(0)
# A trained soft prompt would be loaded here. This one is noise of the size that word embeddings have.
soft_prompt = torch.randn(1, SOFT_TOKENS, weights.shape[1], generator=generator) * weights.std() + weights.mean(0)
alone = [run([prompt])[0] for prompt in PROMPTS]
compare("stock")
rope_pad_fix.apply(model)
compare("patched")
