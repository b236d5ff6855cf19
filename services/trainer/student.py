"""The model that is trained, prepared as its settings say: adapters, precision, compilation, a share per rank."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from services.common.logits_check import logits_are_heads
from services.common.models import load_model
from services.trainer.lora import add_adapters
from services.trainer.master_weights import MasterWeights
from xtoken_core.config.spec import RunSpec
from xtoken_core.config.train import TrainSpec
from xtoken_core.errors import ConfigError
from xtoken_core.losses.lazy_logits import HeadProjection, Logits


class Student(nn.Module):
    """A causal language model and how it is trained.

    Attributes:
        model: The Hugging Face model itself.
        adapted: peft's view of it; None without adapters.
        device: Where it computes.
        masters: The float32 weights behind a model that computes in less; None where the model's own are trained.
        blockwise: Whether its head is multiplied out by the loss.
        sharded: Whether each rank holds only a share of it.
    """

    def __init__(self, model: PreTrainedModel, spec: RunSpec, *, ranks: int = 1) -> None:
        """Prepare a model.

        Args:
            model: In float32 if master weights are wanted, else in the dtype it computes in; on its device.
            spec: The run's settings.
            ranks: Processes that train it; several need an initialised process group.
        """
        super().__init__()
        self.device: torch.device = model.device
        self.blockwise = spec.student.blockwise_head
        if self.blockwise:
            check_head(model.eval())  # type: ignore[no-untyped-call]
        self.adapted = [add_adapters(model, spec.train.lora)] if spec.train.lora is not None else []
        if self.blockwise and hasattr(model.get_output_embeddings(), "base_layer"):  # type: ignore[no-untyped-call]
            raise ConfigError(
                "train.lora.targets names the head, which student.blockwise_head multiplies out without its adapter: "
                "leave it out of the targets, or set blockwise_head to false"
            )
        self.model = model.train()
        self.sharded = spec.train.parallel == "fsdp" and ranks > 1
        self.masters: MasterWeights | None = None
        self._dtype: torch.dtype = getattr(torch, spec.student.dtype)
        if spec.student.checkpoint_activations:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        if spec.student.compile:
            for layer in decoder_layers(model):
                layer.compile()
        if self.sharded:
            self._shard(ranks, spec.train)
        elif model.dtype != self._dtype:
            self.masters = MasterWeights(model, self._dtype)

    def forward(self, input_ids: Int[Tensor, "B T"], *, body: bool = False, **options: Any) -> Any:
        """What the Hugging Face model gives, or with `body` what its decoder gives, without the head."""
        run = self.model.base_model if body else self.model
        return run(input_ids=input_ids, use_cache=False, **{k: v for k, v in options.items() if k != "use_cache"})

    def outputs(self, input_ids: Int[Tensor, "B T"]) -> Logits:
        """The whole head's logits `[B, T, V_m]`, or what gives them; good for one backward pass."""
        if not self.blockwise:
            logits: Tensor = self(input_ids).logits
            return logits
        hidden = self(input_ids, body=True).last_hidden_state
        head = self.model.get_output_embeddings()
        return HeadProjection(hidden, head.weight, head.bias)

    def stand_by(self, pad_id: int) -> None:
        """Take part in the other ranks' forward and backward pass with nothing of one's own."""
        hidden = self(torch.full((1, 8), pad_id, device=self.device), body=True).last_hidden_state
        head = self.model.get_output_embeddings()
        (head(hidden[:, :1]) * 0.0).sum().backward()

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """What the optimiser works on, by the model's parameter names; on a sharded student this rank's shares."""
        if self.masters is not None:
            return self.masters.weights
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def publish(self) -> None:
        """Make the model compute with what the optimiser has made of the trained weights."""
        if self.masters is not None:
            self.masters.publish()

    def whole(self, spec: RunSpec) -> tuple[PreTrainedModel, Any] | None:
        """The model and peft's view of it (None without adapters) for saving, in the dtype it computes in.

        All ranks call; of a sharded student only the first one gets it, as a copy on the host. An unsharded one is
        given away as it is.
        """
        if not self.sharded:
            return self.model, self.adapted[0] if self.adapted else None
        state = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if not state:
            return None
        model = load_model(spec.student, "student", torch.device("cpu"))
        adapted = add_adapters(model, spec.train.lora) if spec.train.lora is not None else None
        model.load_state_dict(state)
        return model, adapted

    def _shard(self, ranks: int, spec: TrainSpec) -> None:
        """Share weights, gradients and moments among the ranks; gradients are added up, never averaged."""
        mesh = init_device_mesh(self.device.type, (ranks,))
        summed: torch.dtype = getattr(torch, spec.reduce_dtype)
        kept = None if spec.reshard_after_forward else False  # None: all but the root, whose head is read after forward
        policy = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=summed, cast_forward_inputs=False)
        for module in (*decoder_layers(self.model), self):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=kept)
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)


def load_student(spec: RunSpec, device: torch.device, *, ranks: int = 1) -> Student:
    """Load and prepare a run's student.

    Raises:
        InputError: It cannot be loaded.
        ConfigError: Its adapters cannot be made.
    """
    dtype = torch.float32 if spec.train.master_weights else None
    return Student(load_model(spec.student, "student", device, dtype=dtype), spec, ranks=ranks)


def check_head(model: PreTrainedModel) -> None:
    """Refuse a model that does more to its logits than multiply them out.

    Raises:
        ConfigError: It does.
    """
    if not logits_are_heads(model):
        raise ConfigError(
            "student.blockwise_head: this model scales or caps its logits behind the head: set it to false"
        )


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's layers: what is compiled, checkpointed and sharded one by one."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
