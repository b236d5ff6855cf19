"""The ways of reading that are measured, how each is launched, and what each compiles to for sm_90."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-untyped]

from benchmarks.kernel_ideas.row_kernels import WIDTH


@dataclass(frozen=True)
class Variant:
    """One way of reading rows.

    Attributes:
        name: As the page has it.
        load: `pointer`, `tma` with a descriptor that each program makes, `host` with one made before the launch.
        persistent: True for as many programs as the GPU runs at once.
        stages: Tiles on their way at once; 1 = each is waited for.
        specialized: True if the compiler may give warps different work.
    """

    name: str
    load: str
    persistent: bool = False
    stages: int = 1
    specialized: bool = False


VARIANTS = (
    Variant("pointers", "pointer"),
    Variant("pointers, 3 stages", "pointer", stages=3),
    Variant("pointers, persistent", "pointer", persistent=True),
    Variant("pointers, persistent, 3 stages", "pointer", persistent=True, stages=3),
    Variant("TMA", "tma"),
    Variant("TMA, 3 stages", "tma", stages=3),
    Variant("TMA, persistent", "tma", persistent=True),
    Variant("TMA, persistent, 3 stages", "tma", persistent=True, stages=3),
    Variant("TMA, descriptor from the host, 3 stages", "host", stages=3),
    Variant("TMA, descriptor from the host, persistent, 3 stages", "host", persistent=True, stages=3),
    Variant("TMA, descriptor from the host, persistent, 6 stages", "host", persistent=True, stages=6),
    Variant("TMA, persistent, 3 stages, warps specialised", "tma", persistent=True, stages=3, specialized=True),
)


@dataclass(frozen=True)
class Sizes:
    """How a kernel is launched: lanes or logits of a tile, warps of a program, programs of a processor at once."""

    tile: dict[str, int]
    warps: int
    programs: int

    @property
    def logits(self) -> int:
        """Logits of a tile."""
        (name, size), *_ = self.tile.items()
        return size * (8 if name == "LANES" else 1)


@dataclass
class Recorder:
    """A kernel in whose place it stands, and the launches that went through it."""

    kernel: Any
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]

    def __getitem__(self, grid: Any) -> Any:
        """Return a launch that is kept."""

        def launch(*arguments: Any, **settings: Any) -> None:
            self.launches.append((grid, arguments, settings))
            self.kernel[grid](*arguments, **settings)

        return launch

    def replay(self) -> None:
        """Repeat all launches."""
        for grid, arguments, settings in self.launches:
            self.kernel[grid](*arguments, **settings)

    def given(self, launch: int = 0) -> dict[str, Any]:
        """Return the arguments of a launch by name."""
        _, arguments, settings = self.launches[launch]
        return dict(zip(self.kernel.arg_names, arguments, strict=False)) | settings


@contextmanager
def recorded(module: ModuleType, name: str) -> Iterator[Recorder]:
    """Keep every launch of a module's kernel."""
    recorder = Recorder(getattr(module, name), [])
    setattr(module, name, recorder)
    try:
        yield recorder
    finally:
        setattr(module, name, recorder.kernel)


def descriptor(x: Tensor, variant: Variant, sizes: Sizes) -> TensorDescriptor | None:
    """Return a descriptor of a batch of rows where a variant has it from the host."""
    if variant.load != "host":
        return None
    width = WIDTH.value
    return TensorDescriptor.from_tensor(x.view(-1, width), [sizes.logits // width, width])


def settings_of(variant: Variant, sizes: Sizes) -> dict[str, Any]:
    """Return a launch's settings."""
    return {
        "LOAD": variant.load,
        "STAGES": variant.stages,
        "SPECIALIZED": variant.specialized,
        **sizes.tile,
        "num_warps": sizes.warps,
    }


def programs_of(variant: Variant, sizes: Sizes, most: int, device: torch.device) -> tuple[int]:
    """Return the grid: a program for each of `most` parts, or as many as run at once."""
    if not variant.persistent:
        return (most,)
    processors = 3 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count
    return (min(most, processors * sizes.programs),)


def compiled_ptx(kernel: Any, variant: Variant, sizes: Sizes, types: dict[str, str]) -> str:
    """Compile a kernel to PTX for sm_90, without a GPU.

    Args:
        kernel: A kernel of `row_kernels`.
        variant: How it reads.
        sizes: How it is launched.
        types: Its arguments' types as Triton writes them; descriptors are filled in here.
    """
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]

    fixed = {name: value for name, value in settings_of(variant, sizes).items() if name != "num_warps"}
    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    for name in kernel.arg_names:
        if name in types:
            signature[name] = types[name]
        elif "desc" in name and variant.load == "host":
            width = WIDTH.value
            signature[name] = f"tensordesc<bf16[{sizes.logits // width}, {width}]>"
        elif "desc" in name:
            fixed[name] = None
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in ("V", "V_t")
    }
    source = triton.compiler.ASTSource(
        kernel, signature, {(kernel.arg_names.index(k),): v for k, v in fixed.items()}, aligned
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": sizes.warps})
    text: str = compiled.asm["ptx"]
    return text
