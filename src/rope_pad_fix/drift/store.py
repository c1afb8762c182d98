"""The output directory of a measurement: what is finished is kept, so that an interrupted run goes on behind it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..storage import write_atomically
from .processes import state
from .results import Cell, Setting, cell_from

_SETTINGS = "settings.json"


@dataclass(frozen=True)
class Lone:
    """The rows one at a time: predictions, generated tokens of each row (none by log-likelihood), and the speed."""

    predictions: list[str]
    answers: list[list[int]]
    tokens_per_second: float


class Store:
    """The output directory: finished cells and lone runs, with the settings that they belong to.

    Args:
        directory: None keeps nothing.
        settings: of this measurement.

    Raises:
        InputError: the directory holds something else, or the cells of other settings.
    """

    def __init__(self, directory: Path | None, settings: dict[str, Any]) -> None:
        self.directory = directory
        if directory is None:
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
            there = directory / _SETTINGS
            if there.exists():
                self._compare(json.loads(there.read_text(encoding="utf-8")), settings)
            elif any(directory.iterdir()):
                raise InputError(f"{directory} holds other files, and no drift measurement: choose an empty directory")
            elif state().is_main_process:
                write_atomically(there, json.dumps(settings, indent=1, ensure_ascii=False))
        except (OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{directory} cannot be used for the output: {error}") from error
        state().wait_for_everyone()

    def _compare(self, before: Any, now: dict[str, Any]) -> None:
        if not isinstance(before, dict):
            raise InputError(f"{self.directory} holds other files, and no drift measurement: choose an empty directory")
        for name, value in now.items():
            if before.get(name) != value:
                raise InputError(
                    f"{self.directory} holds a measurement with another {name} ({before.get(name)!r}, now {value!r}): "
                    "choose another directory, or delete this one"
                )

    def cell(self, setting: Setting) -> Cell | None:
        """A finished cell, if it is there."""
        found = self._read("cells", str(setting))
        return None if found is None else cell_from(found)

    def keep(self, setting: Setting, cell: Cell) -> None:
        """Keep a finished cell."""
        self._write("cells", str(setting), asdict(cell))

    def lone(self, name: str, run: Callable[[], Lone]) -> Lone:
        """The rows one at a time: read, or run and kept."""
        found = self._read("lone", name)
        if found is not None:
            return Lone(**found)
        lone = run()
        self._write("lone", name, asdict(lone))
        return lone

    def _path(self, kind: str, name: str) -> Path:
        assert self.directory is not None
        return self.directory / kind / f"{name.replace(' ', '-')}.json"

    def _read(self, kind: str, name: str) -> dict[str, Any] | None:
        if self.directory is None or not self._path(kind, name).exists():
            return None
        try:
            found: dict[str, Any] = json.loads(self._path(kind, name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{self._path(kind, name)} cannot be read: {error}; delete it to run it again") from error
        return found

    def _write(self, kind: str, name: str, value: dict[str, Any]) -> None:
        if self.directory is not None and state().is_main_process:
            self._path(kind, name).parent.mkdir(exist_ok=True)
            write_atomically(self._path(kind, name), json.dumps(value, indent=1, ensure_ascii=False))
        state().wait_for_everyone()
