"""The settings of a run: pydantic models that import nothing heavy."""

from xtoken_core.config.loss import LossConfig
from xtoken_core.config.spec import (
    DataSpec,
    EvalSpec,
    ModelSpec,
    QueueSpec,
    RunSpec,
    TeacherSpec,
    TrainSpec,
    WorkersSpec,
    load_run_spec,
)

__all__ = [
    "DataSpec",
    "EvalSpec",
    "LossConfig",
    "ModelSpec",
    "QueueSpec",
    "RunSpec",
    "TeacherSpec",
    "TrainSpec",
    "WorkersSpec",
    "load_run_spec",
]
