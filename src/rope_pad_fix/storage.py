"""Where the library keeps what it made and can make again: converted models, calibrated plans."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """The directory for it: ``$ROPE_PAD_FIX_CACHE``, else ``rope_pad_fix`` in the user's cache directory."""
    if own := os.environ.get("ROPE_PAD_FIX_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rope_pad_fix"
