"""GPU memory and utilization from NVML."""

import pynvml
import pytest

from xtoken_services.control.web.gauges import Gpus


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    gpus = Gpus()
    assert gpus.sample() == {}
    gpus.close()


@pytest.mark.gpu
def test_allocation_is_visible() -> None:
    import torch

    gpus = Gpus()
    try:
        before = gpus.sample()
        kept = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        after = gpus.sample()
        grown = [after[name] - before[name] for name in before if name.startswith("gpu_memory")]
        assert max(grown) >= kept.numel()
        assert all(0 <= value <= 100 for name, value in after.items() if name.startswith("gpu_use"))
        assert {name.removeprefix("gpu_memory") for name in after if name.startswith("gpu_memory")} >= {"0"}
    finally:
        gpus.close()
