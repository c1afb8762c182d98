"""Files: where the library keeps what it made and can make again, and how it writes so that none is left half done."""

import os
import tempfile
from pathlib import Path


def cache_directory() -> Path:
    """The directory for converted models and calibrated plans: ``$ROPE_PAD_FIX_CACHE``, else ``rope_pad_fix`` in the
    user's cache directory."""
    if own := os.environ.get("ROPE_PAD_FIX_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rope_pad_fix"


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all: what was there before stays until the new content is complete."""
    data = content.encode() if isinstance(content, str) else content
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        (new := Path(directory) / path.name).write_bytes(data)
        os.replace(new, path)
