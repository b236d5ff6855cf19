"""The student: a causal language model with adapters, master weights, compilation and sharding as configured."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from xtoken_core.config.spec import RunSpec
from xtoken_core.config.train import LoraSpec, TrainSpec
from xtoken_core.errors import ConfigError
from xtoken_core.losses.lazy_logits import HeadProjection, WholeLogits
from xtoken_core.packing import PackedRow
from xtoken_services.common.models.loading import load_model
from xtoken_services.common.models.logits_check import logits_are_heads
from xtoken_services.common.models.packed_attention import packed_inputs

ADAPTER = "default"
"""Name of the only adapter of each adapted layer, as peft calls it."""


class Student(nn.Module):
    """A causal language model prepared for training.

    Attributes:
        model: The Hugging Face model itself.
        adapted: peft's view of it in a list, which keeps it out of the module tree; empty without adapters.
        device: Device it computes on.
        masters: float32 master weights; None if the model's own weights are trained.
        blockwise: The loss multiplies its head out, block by block.
        sharded: Each rank holds only its FSDP shard.
    """

    def __init__(self, model: PreTrainedModel, spec: RunSpec, *, ranks: int = 1) -> None:
        """Prepare a model.

        Args:
            model: In float32 if master weights are wanted, else in the dtype it computes in; on its device.
            spec: The run's settings.
            ranks: Number of ranks; several need an initialised process group.
        """
        super().__init__()
        self.device: torch.device = model.device
        self.blockwise = spec.student.blockwise_head
        self._longest = spec.student.context_length
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

    def forward(
        self, input_ids: Int[Tensor, "B T"], *, body: bool = False, use_cache: bool = False, **options: Any
    ) -> Any:
        """Return the Hugging Face model's output, or with `body` its decoder's, without the head."""
        run = self.model.base_model if body else self.model
        return run(input_ids=input_ids, use_cache=use_cache, **options)

    def outputs(self, input_ids: Int[Tensor, "B T"], row: PackedRow | None = None) -> WholeLogits:
        """Return the logits of the whole head `[B, T, V_m]`, or their factors for the chunked head.

        Args:
            input_ids: Padded.
            row: The layout of a packed row; None: each row is a sample.
        """
        packed = {} if row is None else packed_inputs(row, self.device, longest=self._longest)
        if not self.blockwise:
            logits: Tensor = self(input_ids, **packed).logits
            return logits
        hidden = self(input_ids, body=True, **packed).last_hidden_state
        head = self.model.get_output_embeddings()
        return HeadProjection(hidden, head.weight, head.bias)

    def any_rank(self, flag: bool) -> bool:
        """Return whether a flag is true on any rank of a sharded student, whose ranks all call."""
        if not self.sharded:
            return flag
        shared = torch.tensor(int(flag))
        torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX)
        return bool(shared)

    def dummy_step(self, pad_id: int) -> None:
        """Run a dummy forward/backward so that FSDP collectives match on ranks without a micro-batch."""
        hidden = self(torch.full((1, 8), pad_id, device=self.device), body=True).last_hidden_state
        head = self.model.get_output_embeddings()
        (head(hidden[:, :1]) * 0.0).sum().backward()  # zero gradients, but every layer's all-gather and reduce-scatter

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """Weights that the optimiser updates, by the model's parameter names; this rank's shards of a sharded one."""
        if self.masters is not None:
            return self.masters.weights
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def sync_weights(self) -> None:
        """Copy updated master weights into the model."""
        if self.masters is not None:
            self.masters.copy_to_model()

    def full_model(self, spec: RunSpec) -> tuple[PreTrainedModel, Any] | None:
        """Return the model and peft's view of it (None without adapters) for saving, in the dtype it computes in.

        All ranks call. A sharded student is gathered to the host of rank 0, the others get None; an unsharded one is
        returned itself.
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

    def full_weights(self, *, keeps: bool = True) -> dict[str, Tensor]:
        """Return the weights by the names and in the dtype of the model as it is loaded, with adapters merged.

        All ranks of a sharded student call: its weights are gathered one by one, to the host.

        Args:
            keeps: False on a rank that only takes part; it gets none.
        """
        adapted = {
            f"{name}.base_layer.weight": (f"{name}.weight", layer.get_delta_weight)
            for name, layer in self.model.named_modules()
            if hasattr(layer, "get_delta_weight")
        }
        weights: dict[str, Tensor] = {}
        for own_name, parameter in self.model.named_parameters():
            if ".lora_" in own_name:
                continue
            name, delta = adapted.get(own_name, (own_name.replace(".base_layer.", "."), None))
            weight = parameter.detach()
            if delta is not None:
                weight = weight + delta(ADAPTER).detach()
            if isinstance(weight, DTensor):
                weight = weight.full_tensor().to(self._dtype)
                weight = weight.cpu() if keeps else weight
            if keeps:
                weights[name] = weight
        return weights

    def _shard(self, ranks: int, spec: TrainSpec) -> None:
        """Shard weights, gradients and moments by FSDP2; gradients are summed, since losses are divided already."""
        mesh = init_device_mesh(self.device.type, (ranks,))
        summed: torch.dtype = getattr(torch, spec.reduce_dtype)
        kept = (
            None if spec.reshard_after_forward else False
        )  # None: all but the root, whose head the loss reads after forward
        policy = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=summed, cast_forward_inputs=False)
        for module in (*decoder_layers(self.model), self):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=kept)
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)


def load_student(spec: RunSpec, device: torch.device, *, ranks: int = 1, packed: bool = False) -> Student:
    """Load and prepare a run's student.

    Args:
        spec: The run's settings.
        device: Device to load it to.
        ranks: Number of ranks.
        packed: It is trained on packed rows.

    Raises:
        InputError: It cannot be loaded.
        ConfigError: Its adapters cannot be made.
    """
    dtype = torch.float32 if spec.train.master_weights else None
    return Student(load_model(spec.student, "student", device, dtype=dtype, packed=packed), spec, ranks=ranks)


def check_head(model: PreTrainedModel) -> None:
    """Refuse a model whose logits are not just hidden states times head.

    Raises:
        ConfigError: The model scales or caps its logits.
    """
    if not logits_are_heads(model):
        raise ConfigError(
            "student.blockwise_head: this model scales or caps its logits behind the head: set it to false"
        )


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the model's layers, which are compiled, checkpointed and sharded one by one."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def add_adapters(model: PreTrainedModel, spec: LoraSpec) -> Any:
    """Freeze a model and add LoRA adapters to its linear layers, in place.

    Args:
        model: The student.
        spec: Rank, scale and target layers.

    Returns:
        peft's view of the model, which can merge or save the adapters.

    Raises:
        ConfigError: peft is not installed, or the model has no such layers.
    """
    try:
        from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found,unused-ignore]  # an extra
    except ImportError as error:
        raise ConfigError("train.lora needs peft: install it by pip install peft") from error
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # type: ignore[arg-type,unused-ignore]  # it only divides it
        target_modules=list(spec.targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        layers = {name.rpartition(".")[2]: None for name, part in model.named_modules() if isinstance(part, nn.Linear)}
        raise ConfigError(
            f"train.lora.targets = {list(spec.targets)}: {str(error).splitlines()[0]} The student's linear layers are "
            f"{', '.join(layers)}"
        ) from error


class MasterWeights:
    """Each trained weight in float32, with its gradient accumulated in float32.

    The model keeps rounded copies. As soon as the backward pass has a weight's gradient it is added to the master's and
    freed, so that a step's micro-batches are accumulated without rounding and no second set of gradients is held.

    Attributes:
        weights: By the model's parameter names; frozen ones have none.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        """Copy a model's weights as master weights and round the model's own, in place.

        Args:
            model: In float32, on its device.
            dtype: Dtype it computes in; modules that it must keep in float32 stay.
        """
        self.weights: dict[str, nn.Parameter] = {}
        self._copies: list[Tensor] = []
        self._sources: list[Tensor] = []
        kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
        for name, parameter in model.named_parameters():
            rounds = not kept & set(name.split("."))
            if parameter.requires_grad:
                self.weights[name] = self._take(parameter, dtype) if rounds else parameter
            elif rounds:
                parameter.data = parameter.data.to(dtype)

    def copy_to_model(self) -> None:
        """Round the masters into the model, after an optimiser step or a restored checkpoint."""
        if self._copies:
            torch._foreach_copy_(self._copies, self._sources)

    def _take(self, parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        master = nn.Parameter(parameter.data)
        parameter.data = parameter.data.to(dtype)
        self._copies.append(parameter.data)
        self._sources.append(master.data)

        def accumulate(copy: Tensor) -> None:
            assert copy.grad is not None
            if master.grad is None:
                master.grad = copy.grad.float()
            else:
                master.grad.add_(copy.grad)
            copy.grad = None

        parameter.register_post_accumulate_grad_hook(accumulate)  # type: ignore[no-untyped-call]
        return master
