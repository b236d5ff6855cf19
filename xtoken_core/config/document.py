"""Settings as the document of a run file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xtoken_core.config.base import NONE, ConfigModel, NoneWord


def document_of(part: ConfigModel, *, exclude_defaults: bool = False) -> dict[str, Any]:
    """Return settings as plain values that mean the same in a run file.

    None is the word "none" where a setting takes it; elsewhere it is None, which a run file leaves out.

    >>> from xtoken_core.config.loss import LossConfig
    >>> document_of(LossConfig(kl_loss_weight_end=None), exclude_defaults=True)
    {'kl_loss_weight_end': 'none'}

    Args:
        part: A whole configuration or a part of it.
        exclude_defaults: Leave out settings at their default.
    """
    document: dict[str, Any] = _written(part, part.model_dump(mode="json", exclude_defaults=exclude_defaults))
    return document


def without_none(document: Any) -> Any:
    """Return plain values without those that are None, which TOML lacks.

    >>> without_none({"name": "a", "output": None, "teacher": [{"gpu": None, "gpus": 1}]})
    {'name': 'a', 'teacher': [{'gpus': 1}]}

    Args:
        document: Settings, or a part of them, as plain values.
    """
    if isinstance(document, Mapping):
        return {key: without_none(item) for key, item in document.items() if item is not None}
    if isinstance(document, (list, tuple)):
        return [without_none(item) for item in document if item is not None]
    return document


def _written(value: Any, plain: Any) -> Any:
    """Return plain values with the word where the value that they were made from has a None that takes it."""
    if isinstance(value, ConfigModel):
        fields = type(value).model_fields
        return {
            name: NONE if item is None and NoneWord in fields[name].metadata else _written(getattr(value, name), item)
            for name, item in plain.items()
        }
    if isinstance(value, tuple):
        # An item that is None takes the word: a run file could not leave it out.
        return [NONE if each is None else _written(each, item) for each, item in zip(value, plain, strict=True)]
    return plain
