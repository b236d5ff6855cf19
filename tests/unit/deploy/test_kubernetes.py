"""The Kubernetes manifests: their API's schema where its package is installed, and what our program needs anywhere."""

from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from xtoken_services.cli.app import app
from xtoken_services.control.auth import PROBES

FOLDER = Path(__file__).parents[3] / "deploy" / "kubernetes"
VERSIONS = ("1.30", "1.33", "1.36")
UID = 10001


def documents() -> list[dict[str, Any]]:
    """Every object that Kustomize lists, in its order."""
    listed = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))["resources"]
    return [part for name in listed for part in yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8"))]


def name_of(document: dict[str, Any]) -> str:
    return f"{document['kind']}-{document['metadata']['name']}"


def find(kind: str) -> dict[str, Any]:
    (found,) = (document for document in documents() if document["kind"] == kind)
    return found


@pytest.fixture
def pod() -> dict[str, Any]:
    return dict(find("StatefulSet")["spec"]["template"]["spec"])


@pytest.fixture
def container(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod["containers"]
    return dict(found)


@pytest.mark.parametrize("document", documents(), ids=name_of)
def test_an_object_is_one_of_its_api(document: dict[str, Any]) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="install the extra `deploy`, or: make test-deploy")
    for version in VERSIONS:
        validator.validate(document, version, strict=True)


def test_every_manifest_is_listed_and_in_the_namespace() -> None:
    listed = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))
    assert {*listed["resources"], "kustomization.yaml"} == {path.name for path in FOLDER.glob("*.yaml")}
    places = {d["metadata"].get("namespace", d["metadata"]["name"]) for d in documents()}
    assert places == {listed["namespace"]}
    assert [generated["files"] for generated in listed["secretGenerator"]] == [["token"]]


def test_the_command_is_one_of_the_programs(container: dict[str, Any]) -> None:
    group = typer.main.get_command(app)
    command, *arguments = container["args"]
    context = typer.Context(group.commands[command])  # type: ignore[attr-defined]
    group.commands[command].parse_args(context, arguments)  # type: ignore[attr-defined]
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    settings = context.params
    assert settings["host"] == "0.0.0.0"
    assert settings["port"] == container["ports"][0]["containerPort"]
    assert not mounts[str(settings["runs_dir"])].get("readOnly")
    assert str(settings["token_file"].parent) in mounts
    assert "xtoken.xtoken.svc.cluster.local" in settings["name"]


def test_probes_ask_what_needs_no_token(container: dict[str, Any]) -> None:
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}
    assert set(paths.values()) <= set(PROBES)


def test_the_service_finds_the_pod(container: dict[str, Any]) -> None:
    service, stateful = find("Service")["spec"], find("StatefulSet")["spec"]
    labels = stateful["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    assert stateful["selector"]["matchLabels"].items() <= labels.items()
    assert stateful["serviceName"] == find("Service")["metadata"]["name"]
    assert service["ports"][0]["targetPort"] in [port["name"] for port in container["ports"]]


def test_what_is_mounted_is_a_volume_that_is_claimed(pod: dict[str, Any]) -> None:
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounted = {m["name"] for c in (*pod["initContainers"], *pod["containers"]) for m in c["volumeMounts"]}
    assert mounted == set(volumes)
    claims = {v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v}
    assert claims == {d["metadata"]["name"] for d in documents() if d["kind"] == "PersistentVolumeClaim"}


def test_shared_memory_is_memory_and_the_gpu_is_asked_for(pod: dict[str, Any], container: dict[str, Any]) -> None:
    (place,) = (mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm")
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == place)
    assert volume["emptyDir"]["medium"] == "Memory"
    assert container["resources"]["limits"]["nvidia.com/gpu"] >= 1


def test_nothing_runs_as_root_or_twice_over_the_same_volume(pod: dict[str, Any]) -> None:
    assert pod["securityContext"]["runAsUser"] == UID
    assert pod["securityContext"]["runAsNonRoot"] is True
    for part in (*pod["initContainers"], *pod["containers"]):
        assert part["securityContext"]["allowPrivilegeEscalation"] is False
        assert part["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert part["securityContext"]["readOnlyRootFilesystem"] is True
    assert find("StatefulSet")["spec"]["replicas"] == 1


def test_what_a_run_writes_is_on_a_volume(container: dict[str, Any]) -> None:
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert {"/runs", "/cache", "/tmp", "/dev/shm"} == writable


def test_only_pods_of_the_namespace_reach_the_pod(container: dict[str, Any]) -> None:
    policy, labels = find("NetworkPolicy")["spec"], find("StatefulSet")["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    (ingress,) = policy["ingress"]
    assert ingress["from"] == [{"podSelector": {}}]
    assert [port["port"] for port in ingress["ports"]] == [port["name"] for port in container["ports"]]
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == {53}
