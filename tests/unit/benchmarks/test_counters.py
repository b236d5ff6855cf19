"""Hardware counters: what is read from Nsight Compute's CSV, and which kernels are named."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.counters import counted, kernel_names, merged, parsed_rows, slowest

HEAD = '==PROF== Connected\n"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"\n'


def test_launches_of_a_kernel_are_counted_together():
    rows = [
        ("0", "first_kernel(a, b)", "Duration", "ns", "1,000,000"),
        ("0", "first_kernel(a, b)", "Memory Throughput", "byte/s", "1,000,000,000,000"),
        ("0", "first_kernel(a, b)", "Memory Throughput", "%", "20"),
        ("1", "first_kernel(a, b)", "Duration", "nsecond", "3,000,000"),
        ("1", "first_kernel(a, b)", "Memory Throughput", "byte/second", "3,000,000,000,000"),
        ("2", "second_kernel", "Duration", "ns", "5,000"),
        ("2", "second_kernel", "Executed Ipc Active", "inst/cycle", "2.5"),
    ]
    text = HEAD + "".join(
        f'"{i}","7","{kernel}","S","{name}","{unit}","{value}"\n' for i, kernel, name, unit, value in rows
    )
    first, second = slowest(parsed_rows(text).values(), copy=4e12)
    assert first["kernel"] == "first_kernel" and first["launches"] == 2 and first["ms"] == pytest.approx(4.0)
    assert first["bytes_per_second"] == pytest.approx(2.5e12) and first["of_copy"] == pytest.approx(0.625)
    assert second == {"kernel": "second_kernel", "launches": 1, "ms": 0.005, "instructions_per_cycle": 2.5}


def test_nothing_is_read_from_other_output():
    assert parsed_rows("==ERROR== no device\n") == {}


def test_every_kernel_of_the_package_is_named():
    names = kernel_names()
    assert {"chain_class_kernel", "gold_tail_kernel", "p_kl_teacher_kernel", "token_kl_kernel"} <= set(names)
    assert all(name.endswith("_kernel") for name in names)


def test_a_loss_is_added_to_those_read_before_on_the_same_gpu():
    first = {"gpu": "a GPU", "torch": "2.11", "kernel_hash": "one", "copy_bytes_per_second": 4e12}
    report = merged({}, first, "gold", [{"kernel": "a_kernel"}])
    report = merged(report, {**first, "kernel_hash": "two"}, "chain", [{"kernel": "b_kernel"}])
    assert {name: of["kernel_hash"] for name, of in report["losses"].items()} == {"gold": "one", "chain": "two"}
    assert report["losses"]["gold"]["kernels"] == [{"kernel": "a_kernel"}]
    assert set(merged(report, {**first, "gpu": "another"}, "chain", [])["losses"]) == {"chain"}


def test_a_profiler_that_hangs_is_killed_and_what_it_printed_is_kept(tmp_path: Path):
    ncu = tmp_path / "ncu"
    ncu.write_text("#!/bin/sh\necho ==PROF== connected\nsleep 60 & wait\n", encoding="utf-8")
    ncu.chmod(0o755)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"not done after 1 s: ==PROF== connected"):
        counted("gold", str(ncu), 4e12, tmp_path / "log.txt", 1.0)
    assert time.monotonic() - began < 20
    assert "connected" in (tmp_path / "log.txt").read_text(encoding="utf-8")
