"""The settings of a run: pydantic models that import nothing heavy."""

from xtoken_core.config.data import DataSource, DataSpec
from xtoken_core.config.eval import EvalSpec, SamplesSpec, TasksSpec
from xtoken_core.config.loss import LossConfig
from xtoken_core.config.rollout import RolloutSpec
from xtoken_core.config.spec import ModelSpec, RunSpec, StudentSpec, TeacherSpec, load_run_spec
from xtoken_core.config.train import LoraSpec, ReportSpec, TrainSpec
from xtoken_core.config.workers import QueueSpec, WorkersSpec

__all__ = [
    "DataSource",
    "DataSpec",
    "EvalSpec",
    "LoraSpec",
    "LossConfig",
    "ModelSpec",
    "QueueSpec",
    "ReportSpec",
    "RolloutSpec",
    "RunSpec",
    "SamplesSpec",
    "StudentSpec",
    "TasksSpec",
    "TeacherSpec",
    "TrainSpec",
    "WorkersSpec",
    "load_run_spec",
]
