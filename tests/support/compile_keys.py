"""What Triton would compile: the keys of all launches of a computation, recorded instead of launched, without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from xtoken_core.ops import triton_support
from xtoken_core.ops.position_kernels import chunk_positions_kernel

TARGET = GPUTarget("cuda", 90, 32)
Key = tuple[Any, ...]


class Recorder:
    """The kernels of all launches, with every key that was new.

    Attributes:
        keys: By kernel: what distinguishes one compiled variant from another, and the arguments that asked for it.
        kernels: By name, as Triton compiles them.
    """

    def __init__(self) -> None:
        self.keys: dict[str, dict[Key, tuple[dict[str, Any], dict[str, Any]]]] = {}
        self.kernels: dict[str, JITFunction] = {}
        self._binders: dict[str, Any] = {}
        self._backend = make_backend(TARGET)

    def count(self) -> dict[str, int]:
        """Number of variants by kernel."""
        return {name: len(keys) for name, keys in self.keys.items()}

    def record(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the key of a launch."""
        name = kernel.fn.__name__
        if name not in self.kernels:
            self.kernels[name] = compiled = _as_compiled(kernel)
            self._binders[name] = create_function_from_signature(compiled.signature, compiled.params, self._backend)
        named, specialization, options = self._binders[name](*args, **kwargs)
        key = tuple(specialization), tuple(sorted(options.items()))
        self.keys.setdefault(name, {}).setdefault(key, (named, options))

    def arguments(self) -> Iterator[tuple[str, str, Any, Any]]:
        """Yield kernel, name, value and specialization of every argument of every key."""
        for kernel, keys in self.keys.items():
            for (specialization, _), (named, _) in keys.items():
                for name, specialized in zip(self.kernels[kernel].arg_names, specialization, strict=True):
                    yield kernel, name, named[name], specialized

    def differences(self) -> dict[str, list[list[Any]]]:
        """By kernel with several variants: what the differing arguments were specialized to."""
        found = {}
        for name, keys in self.keys.items():
            names, columns = self.kernels[name].arg_names, zip(*(key[0] for key in keys), strict=True)
            varied = [[arg, *values] for arg, values in zip(names, columns, strict=True) if len(set(values)) > 1]
            if varied:
                found[name] = varied
        return found


def _as_compiled(kernel: Any) -> JITFunction:
    """A kernel as it is compiled, also where the interpreter has taken its place."""
    if isinstance(kernel, JITFunction):
        return kernel
    given = kernel.kwargs
    excluded = ("do_not_specialize", "do_not_specialize_on_alignment")
    return JITFunction(kernel.fn, **{name: given.get(name) for name in excluded})


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record every launch; nothing is computed, and results are as they were allocated."""
    recorder = Recorder()

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        recorder.record(kernel, args, kwargs)

    with (
        patch.object(type(chunk_positions_kernel), "run", record),
        patch.object(triton_support, "interpreting", lambda: True),
    ):
        yield recorder
