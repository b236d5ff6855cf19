"""ServedSpec: the settings of a model that another program serves over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from xtoken_core.config.base import ConfigModel
from xtoken_core.config.loss import LossConfig, Positive

EngineName = Literal["vllm", "sglang"]
MAX_URLS = 64


class ServedSpec(ConfigModel):
    """A model that is served over HTTP, if `url` names its servers."""

    url: Annotated[tuple[str, ...], Field(max_length=MAX_URLS)] = ()
    """Address of a server that runs the model, such as `http://10.0.0.5:8000`, or a list of servers that run the same
    one. The directory `model` then needs no weights, only `config.json` and the tokenizer."""
    url_engine: EngineName = "vllm"
    """Program that serves it: `vllm` or `sglang`."""
    url_model: str | None = None
    """Name under which it is served. Left out, a server must serve a single model."""
    url_key_file: Path | None = None
    """File with the key that is sent as a bearer token; keys are not written into run files. Left out, the environment
    variable `XTOKEN_ENGINE_KEY`, if there is one."""
    url_connections: Annotated[int, Field(ge=1, le=1024)] = 8
    """Requests that a server has at a time from one worker; more wait."""
    url_timeout_s: Positive = 120.0
    """Seconds for a sample with all its retries, on whatever server, before the worker fails; at most
    `workers.hang_timeout_s`."""

    @field_validator("url", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("url")
    @classmethod
    def _addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(checked_url(url) for url in urls)

    @model_validator(mode="after")
    def _settings_of_url(self) -> ServedSpec:
        for name, setting in type(self).model_fields.items():
            if not self.url and name.startswith("url_") and getattr(self, name) != setting.default:
                raise ValueError(f"{name} belongs to url: set that or unset {name}")
        return self


def checked_url(url: str) -> str:
    """Return the address of a server without a slash at its end.

    Raises:
        ValueError: It is none, or carries credentials.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"url: {error}: write http://HOST:PORT") from error
    if parts.username is not None or parts.password is not None:
        raise ValueError("url: an address carries no key: set url_key_file, or the variable XTOKEN_ENGINE_KEY")
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise ValueError(f"url: {url[:100]!r} is not the address of a server: write http://HOST:PORT")
    return url.rstrip("/")


def check_waiting(models: Mapping[str, ServedSpec | None], hang_timeout_s: float) -> None:
    """Refuse requests that may wait for longer than a worker may be without progress.

    Raises:
        ValueError: The first of them.
    """
    for field, served in models.items():
        if served is not None and served.url and served.url_timeout_s > hang_timeout_s:
            raise ValueError(
                f"{field}.url_timeout_s = {served.url_timeout_s:g}: a worker that waits for so long counts as hung: "
                f"lower it, or raise workers.hang_timeout_s ({hang_timeout_s:g})"
            )


def check_served(loss: LossConfig, teachers: Sequence[ServedSpec]) -> None:
    """Refuse a temperature that a teacher behind an address cannot serve.

    Raises:
        ValueError: The text says what to change.
    """
    number = next((number for number, teacher in enumerate(teachers) if teacher.url), None)
    if number is not None and loss.temperature != 1.0:
        raise ValueError(
            f"loss.temperature = {loss.temperature:g}: a server gives log-probabilities at temperature 1, and for "
            f"another one it would have to give all tokens': set it to 1, or unset teacher.{number}.url"
        )
