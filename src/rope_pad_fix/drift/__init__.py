"""How far scores move between single and batched inference, and why: `measure` and `diagnose`.

Needs the extra ``rope-pad-fix[drift]``.
"""

from ..errors import InputError
from .diagnose import Diagnosis, Factor, diagnose
from .measure import measure
from .results import Cell, ChangedRow, Difference, Report, Setting

__all__ = [
    "Cell",
    "ChangedRow",
    "Diagnosis",
    "Difference",
    "Factor",
    "InputError",
    "Report",
    "Setting",
    "diagnose",
    "measure",
]
