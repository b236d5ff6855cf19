"""Memory and use of the GPUs, as the driver's library tells them."""

from __future__ import annotations

import pytest

from services.control.web import nvml
from services.control.web.nvml import Nvml


def test_without_the_drivers_library_there_is_nothing_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "LIBRARY", "libno-such-driver.so.1")
    found = Nvml()
    assert found.sample() == {}
    found.close()


@pytest.mark.gpu
def test_what_is_taken_on_a_gpu_is_seen() -> None:
    import torch

    found = Nvml()
    try:
        before = found.sample()
        kept = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        after = found.sample()
        grown = [after[name] - before[name] for name in before if name.startswith("gpu_memory")]
        assert max(grown) >= kept.numel()
        assert all(0 <= value <= 100 for name, value in after.items() if name.startswith("gpu_use"))
        assert {name.removeprefix("gpu_memory") for name in after if name.startswith("gpu_memory")} >= {"0"}
    finally:
        found.close()
