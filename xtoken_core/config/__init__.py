"""The settings of a run: pydantic models that import nothing heavy."""

from xtoken_core.config.data import DataSpec
from xtoken_core.config.loss import LossConfig
from xtoken_core.config.spec import ModelSpec, RunSpec, load_run_spec

__all__ = ["DataSpec", "LossConfig", "ModelSpec", "RunSpec", "load_run_spec"]
