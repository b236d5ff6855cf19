"""Parts of the library for other programs' loops; no service is imported."""

from xtoken_core.alignment import TokenAligner
from xtoken_core.collate import CrossTokenizerCollator
from xtoken_core.config import LossConfig
from xtoken_core.errors import ConfigError, InputError, XtokenError
from xtoken_core.losses import CrossTokenizerDistillationLoss, LossTeacher

__all__ = [
    "ConfigError",
    "CrossTokenizerCollator",
    "CrossTokenizerDistillationLoss",
    "InputError",
    "LossConfig",
    "LossTeacher",
    "TokenAligner",
    "XtokenError",
]
