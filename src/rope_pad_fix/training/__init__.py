"""Fine-tuning without computing padding: rows to learn from, the trainer, the model card. Needs the extra
``rope-pad-fix[train]``."""

from .texts import Encoded, Text, encode, read_texts
from .trainer import PaddingFreeTrainer, Questions

__all__ = ["Encoded", "PaddingFreeTrainer", "Questions", "Text", "encode", "read_texts"]
