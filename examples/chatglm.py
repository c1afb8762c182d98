"""A ChatGLM3 checkpoint, converted to transformers' own `GlmForCausalLM`: batches padded on either side, a LoRA step.
None of a checkpoint's own code is run. The checkpoint is made here, tiny and random, with the names, configuration and
kind of vocabulary that a real one has; for a real one, only the path differs."""

import json
import tempfile
from pathlib import Path

import sentencepiece
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import rope_pad_fix
from rope_pad_fix.chatglm import convert

PROMPTS = ["你好", "Hello, who are you?", "今天天气很好，我们去公园玩。"]
LAYERS, HIDDEN, HEADS, GROUPS, PER_HEAD, FFN, PIECES = 2, 64, 4, 2, 16, 96, 400
SHAPES = {
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
    "self_attention.query_key_value.weight": ((HEADS + 2 * GROUPS) * PER_HEAD, HIDDEN),
    "self_attention.query_key_value.bias": ((HEADS + 2 * GROUPS) * PER_HEAD,),
    "self_attention.dense.weight": (HIDDEN, HEADS * PER_HEAD),
    "mlp.dense_h_to_4h.weight": (2 * FFN, HIDDEN),
    "mlp.dense_4h_to_h.weight": (HIDDEN, FFN),
}


def checkpoint(directory):
    """What one downloads, but small: config.json, weights, tokenizer.model."""
    directory.mkdir()
    config = {"model_type": "chatglm", "num_layers": LAYERS, "padded_vocab_size": PIECES, "hidden_size": HIDDEN}
    config |= {"ffn_hidden_size": FFN, "kv_channels": PER_HEAD, "num_attention_heads": HEADS, "seq_length": 8192}
    config |= {"add_qkv_bias": True, "multi_query_attention": True, "multi_query_group_num": GROUPS}
    config |= {"layernorm_epsilon": 1e-5, "eos_token_id": 2, "pad_token_id": 0, "torch_dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config))
    names = {f"encoder.layers.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in SHAPES.items()}
    names |= {"embedding.word_embeddings.weight": (PIECES, HIDDEN), "output_layer.weight": (PIECES, HIDDEN)}
    names |= {"encoder.final_layernorm.weight": (HIDDEN,)}
    weights = {f"transformer.{name}": torch.randn(shape) / 3 for name, shape in names.items()}
    save_file(weights, directory / "model.safetensors")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PROMPTS * 20),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    return directory


@torch.inference_mode()
def generate(prompts, side):
    """The ids of 16 new tokens for each prompt."""
    inputs = tokenizer(prompts, padding=True, padding_side=side, return_tensors="pt")
    new = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    return new[:, inputs.input_ids.shape[1] :]


def compare(title):
    """In a batch against alone."""
    alone = torch.cat([generate([prompt], "left") for prompt in PROMPTS])
    for side in ("left", "right"):
        same = (generate(PROMPTS, side) == alone).all(1).sum().item()
        print(f"{title}, padded on the {side}: {same} of {len(PROMPTS)} answers are those of the prompt alone")


logging.set_verbosity_error()
logging.disable_progress_bar()
torch.manual_seed(0)
with tempfile.TemporaryDirectory() as scratch:
    target = convert(checkpoint(Path(scratch) / "chatglm3"), Path(scratch) / "glm")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target), AutoTokenizer.from_pretrained(target)
compare("stock")
rope_pad_fix.apply(model)
compare("patched")

model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]))
gradients = []
for side in ("left", "right"):
    inputs = tokenizer(PROMPTS, padding=True, padding_side=side, return_tensors="pt")
    labels = inputs.input_ids.where(inputs.attention_mask == 1, -100)
    model.zero_grad()
    loss = model(**inputs, labels=labels).loss
    loss.backward()
    gradients.append({name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad})
    print(f"LoRA, padded on the {side}: loss {loss.item():.6f}")
equal = all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())
print(f"the gradients of both are {'equal bit for bit' if equal else 'NOT EQUAL'}")
torch.optim.AdamW((weight for weight in model.parameters() if weight.requires_grad), lr=1e-2).step()
print(f"after the step: loss {model(**inputs, labels=labels).loss.item():.6f}")
