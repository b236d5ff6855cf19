"""Node groups of a run, and the GPUs of this machine."""

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.support.cases import cases
from tests.support.runs import resolved_run
from tests.unit.control.stored_runs import make_runs, put
from tests.unit.control.stored_runs import spec as raw_spec
from xtoken_core.config.spec import RunSpec
from xtoken_core.data_plane.address import Address
from xtoken_core.data_plane.keys import allowed_keys, client_keys, server_keys
from xtoken_core.errors import ConfigError, XtokenError
from xtoken_services.common.files.allowed_paths import RefusedError
from xtoken_services.common.run.status import RunState
from xtoken_services.control.validation import SpecValidator
from xtoken_services.control.web.gauges import Gpus
from xtoken_services.queue.main import of_group
from xtoken_services.supervisor.launch_check import check_launch
from xtoken_services.supervisor.launchers.base import NODE_LOST_EXIT, NodeLostError
from xtoken_services.supervisor.launchers.local import free_port
from xtoken_services.supervisor.launchers.ray import RayLauncher, cpus_of, gpus_of
from xtoken_services.supervisor.process_group import describe_exit
from xtoken_services.supervisor.process_spec import build_process_specs, threads_of_model_workers
from xtoken_services.supervisor.run_directory import KEYS, QueueDirectory


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


RAY = {"launcher": "ray", "device": "cpu"}


def test_members_of_two_groups_say_which_and_all_trainers_are_one(tmp_path: Path) -> None:
    run = resolved_run(tmp_path, nodes=2, ranks=2, collators=1)
    queues = [Address.parse(f"ipc:///private/queue-{node}") for node in range(2)]
    members = build_process_specs(run, tmp_path / "resolved.json", queues)
    second = [(m.name, m.group, m.node) for m in members if m.node]
    assert second == [
        ("node1-queue", "node1-queue", 1), ("node1-collator-0", "node1-collator-0", 1),
        ("node1-teacher-0-0", "node1-teacher-0-0", 1), ("node1-teacher-0-1", "node1-teacher-0-1", 1),
        ("node1-trainer-0", "trainers", 1), ("node1-trainer-1", "trainers", 1),
    ]  # fmt: skip
    first = [(m.name, m.group) for m in members if not m.node]
    assert first == [tuple(part.replace("node1-", "node0-") for part in names[:2]) for names in second]
    queue, last = members[len(second)], members[-1]
    assert queue.command_line(1)[-2:] == ["--group", "1"]
    assert [last.env[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["3", "1", "4"]
    assert "ipc:///private/queue-1" in last.command
    assert last.command[-4:] == ("--name", "node1-trainer-1", "--rank", "1")


def test_groups_on_one_machine_divide_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(**workers: Any) -> list[str | None]:
        run = resolved_run(tmp_path, **workers)
        queues = [Address.parse(f"ipc:///private/queue-{node}") for node in range(run.spec.workers.nodes)]
        members = build_process_specs(run, tmp_path / "resolved.json", queues)
        return list(dict.fromkeys(member.env.get("CUDA_VISIBLE_DEVICES") for member in members))

    monkeypatch.setattr("xtoken_services.common.run.machine.count_gpus", lambda: 5)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert seen(nodes=2, ranks=2) == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-b,5,4,3")
    assert seen(nodes=2, ranks=2) == ["7,GPU-b", "5,4"]
    assert seen(ranks=2) == seen(nodes=2, device="cpu") == seen(nodes=2, launcher="ray", device="cuda") == [None]
    monkeypatch.setattr("xtoken_services.common.run.machine.count_gpus", lambda: 0)
    assert seen(nodes=2) == [None]


def test_groups_on_one_machine_share_its_cores_and_groups_on_ray_have_their_own(tmp_path: Path, cores: None) -> None:
    assert threads_of_model_workers(resolved_run(tmp_path, nodes=2).spec) == 4
    assert threads_of_model_workers(resolved_run(tmp_path, nodes=2, **RAY).spec) == 8


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))


def with_ray(directory: Path, **ray: Any) -> RunSpec:
    return RunSpec.model_validate(resolved_run(directory, **RAY).spec.model_dump() | {"ray": ray})


def test_what_a_node_group_takes_of_a_cluster(tmp_path: Path) -> None:
    on_gpus = resolved_run(tmp_path, teachers=2, ranks=4, launcher="ray", device="cuda").spec
    assert (cpus_of(on_gpus), gpus_of(on_gpus)) == (1 + 2 + 4 * 3, 4)
    assert gpus_of(resolved_run(tmp_path, ranks=4, **RAY).spec) == 0


@pytest.mark.parametrize("workers", [{"nodes": 3}, RAY | {"nodes": 2}], ids=["local", "ray"])
def test_the_places_of_queues_are_found_again(tmp_path: Path, workers: dict[str, Any]) -> None:
    spec = RunSpec.model_validate(
        {**resolved_run(tmp_path).spec.model_dump(), "workers": workers, "train": {"samples_per_step": 12}}
    )
    place = QueueDirectory.create(spec)
    try:
        assert len(place.addresses) == spec.workers.nodes
        assert QueueDirectory.from_document(place.to_document()) == place
        if spec.workers.launcher == "ray":
            keys = place.private / KEYS
            public, _ = server_keys(keys)
            theirs, mine, _ = client_keys(keys)
            assert theirs == public
            assert allowed_keys(keys) == {mine}
        else:
            assert len({address.url for address in place.addresses}) == 3
    finally:
        place.remove()


@cases(
    "changes, said",
    ({"workers": {"nodes": 3}}, "workers.nodes = 3 must divide train.samples_per_step = 8"),
    ({"workers": {"nodes": 2}, "queue": {"block_size": 8}}, r"= 8 must divide train.samples_per_step = 8 / workers"),
    ({"workers": {"launcher": "ray"}}, "must know what a node needs"),
    ({"ray": {"address": "ray://head:10001"}}, "should match pattern"),
)
def test_settings_of_nodes_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RunSpec.model_validate(resolved_run(tmp_path).spec.model_dump() | changes)


def test_what_cannot_be_started_from_here_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_launch(resolved_run(tmp_path, nodes=2, device="cpu").spec)
    monkeypatch.setattr("xtoken_services.supervisor.launch_check.count_gpus", lambda: 3)
    check_launch(resolved_run(tmp_path, nodes=2).spec)
    with pytest.raises(RefusedError, match="2 node groups on one machine take 4 GPUs, and it has 3"):
        check_launch(resolved_run(tmp_path, nodes=2, ranks=2).spec)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RefusedError, match="Ray is not installed"):
        check_launch(resolved_run(tmp_path, **RAY).spec)


EXTRAS = [
    ({"train": {"lora": {}}}, "train.lora", "peft"),
    ({"report": {"tensorboard": True}}, "report.tensorboard", "tensorboard"),
    ({"report": {"wandb": "offline"}}, "report.wandb", "wandb"),
]


def with_extra(spec: RunSpec, changes: dict[str, dict[str, Any]]) -> RunSpec:
    raw = spec.model_dump()
    return RunSpec.model_validate(raw | {part: raw[part] | change for part, change in changes.items()})


@pytest.mark.parametrize(("changes", "field", "package"), EXTRAS, ids=[case[2] for case in EXTRAS])
def test_a_run_that_needs_what_is_not_installed_here_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], field: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    check_launch(resolved_run(tmp_path).spec)
    spec = with_extra(resolved_run(tmp_path).spec, changes)
    with pytest.raises(RefusedError) as refused:
        check_launch(spec)
    assert str(refused.value) == f"{field} needs {package}: install it by pip install {package}"
    assert (refused.value.field, refused.value.exit_code) == (field, 2)
    (tmp_path / "ray.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    check_launch(with_extra(resolved_run(tmp_path, **RAY).spec, changes))  # what its nodes have is not to be seen here


def test_a_directory_of_a_packages_name_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()  # a run's own files may lie in the working directory
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(RefusedError, match=r"^report\.wandb needs wandb: install it by"):
        check_launch(with_extra(resolved_run(tmp_path).spec, {"report": {"wandb": "online"}}))


def test_what_is_installed_is_looked_for_without_loading_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("peft", "tensorboard", "wandb"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError('loaded')\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    for changes, *_ in EXTRAS:
        check_launch(with_extra(resolved_run(tmp_path).spec, changes))


def test_a_run_whose_package_is_gone_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    runs = make_runs(tmp_path)
    output = put(runs, state=RunState.STOPPED)
    runs.store.change("old-1", spec=raw_spec(tmp_path, output=str(output), report={"wandb": "offline"}))
    with pytest.raises(RefusedError, match=r"^report\.wandb needs wandb: install it by"):
        runs.resume("old-1")
    assert runs.store.run("old-1").state == RunState.STOPPED
    runs.close()


def test_over_http_no_cluster_is_named(tmp_path: Path) -> None:
    from xtoken_services.common.files.allowed_paths import Roots

    validator = SpecValidator(Roots.of([tmp_path], [tmp_path]), tmp_path)
    with pytest.raises(RefusedError, match=r"ray\.address"):
        validator.validate(with_ray(tmp_path, address="10.0.0.9:6379"))


def test_a_queue_of_a_group_that_the_run_does_not_have_is_refused(tmp_path: Path) -> None:
    assert of_group(resolved_run(tmp_path, nodes=2), 1).group == 1
    with pytest.raises(ConfigError, match=r"--group 2: .* has 2 node groups"):
        of_group(resolved_run(tmp_path, nodes=2), 2)


def test_a_lost_machine_is_told_in_words() -> None:
    assert describe_exit(NODE_LOST_EXIT) == "exited: node lost"


def test_a_cluster_that_is_not_there_is_told_in_one_line(tmp_path: Path) -> None:
    spec = with_ray(tmp_path, address=f"127.0.0.1:{free_port('127.0.0.1')}")
    place = QueueDirectory.create(spec)
    launcher = RayLauncher(spec, place.private, tied=True)
    try:
        with pytest.raises(NodeLostError, match="node group 0 has no machine at present"):
            launcher.rendezvous(0)
        with pytest.raises(XtokenError, match=r"^the Ray cluster at 127\.0\.0\.1:\d+ cannot be reached: .*refused"):
            while not launcher.ready(0, "queue"):
                time.sleep(0.05)
        assert launcher.attach(None, "mark", tmp_path / "status").poll() == NODE_LOST_EXIT
    finally:
        launcher.kill_marked("run/")
        launcher.close()
        place.remove()
