"""Settings as the document of a run file, and as a run has stored them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xtoken_core.config.base import NONE, NoneWord, Part
from xtoken_core.config.spec import RunSpec


def document_of(part: Part, *, exclude_defaults: bool = False) -> dict[str, Any]:
    """Return settings as plain values that mean the same in a run file.

    None is the word "none" where a setting takes it; elsewhere it is None, which a run file leaves out.

    >>> from xtoken_core.config.loss import LossConfig
    >>> document_of(LossConfig(kl_loss_weight_end=None), exclude_defaults=True)
    {'kl_loss_weight_end': 'none'}

    Args:
        part: A whole configuration or a part of it.
        exclude_defaults: Leave out settings at their default.
    """
    document = part.model_dump(mode="json", exclude_defaults=exclude_defaults)
    for name in document:
        document[name] = _written(getattr(part, name), document[name], exclude_defaults)
        if document[name] is None and NoneWord in type(part).model_fields[name].metadata:
            document[name] = NONE
    return document


def read_stored(document: Mapping[str, Any]) -> RunSpec:
    """Return the specification that a run has stored, with every setting that there was.

    A missing weight at the end is that of an earlier version, in which it was constant.

    Args:
        document: The specification as plain values.

    Raises:
        ValidationError: It is no specification of this version.
    """
    loss = document.get("loss")
    if isinstance(loss, Mapping):
        document = {**document, "loss": {"kl_loss_weight_end": None, **loss}}
    return RunSpec.model_validate(document)


def _written(value: Any, plain: Any, exclude_defaults: bool) -> Any:
    if isinstance(value, Part):
        return document_of(value, exclude_defaults=exclude_defaults)
    if isinstance(value, tuple):
        # An item that is None takes the word: a run file could not leave it out.
        items = (_written(*pair, exclude_defaults) for pair in zip(value, plain, strict=True))
        return [NONE if item is None else item for item in items]
    return plain
