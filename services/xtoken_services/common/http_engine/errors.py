"""Errors of models that are served over HTTP."""

from __future__ import annotations

from xtoken_core.errors import ConfigError, XtokenError


class EngineError(XtokenError):
    """No server has answered within the time that a request has, with all its retries."""


class EngineRefusalError(ConfigError):
    """A server refuses a request, or runs another model than the one that is meant: repeating it would not help."""


class BadRequestError(EngineRefusalError):
    """A server refuses what a request says."""


class SampleRefusedError(XtokenError):
    """A server cannot give the log-probabilities of one sample: another sample may be possible."""
