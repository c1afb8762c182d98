"""ChatGLM-6B, ChatGLM2-6B, ChatGLM3-6B and GLM-4-9B: their checkpoints on today's transformers.

`from_pretrained` and `convert` turn a checkpoint into transformers' own ``GlmForCausalLM``, which needs none of the
checkpoint's code and which every level of `rope_pad_fix.apply` runs; that is the way for all but ChatGLM-6B. `compat`
lets the checkpoint's own code load and generate.
"""

from .checkpoint import convert, from_pretrained
from .compat import Compat, compat

__all__ = ["Compat", "compat", "convert", "from_pretrained"]
