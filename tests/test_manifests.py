"""What the manifests promise beyond starting: scaling, secrets, models, metrics, safety."""

import copy
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from core.config import Config, load_config
from scripts import check_dockerfile, check_manifests
from tests.test_deploy import (
    FOLDERS,
    Manifest,
    environment,
    find,
    mounts,
    orchestrator_container,
    places,
)

ROOT = check_manifests.ROOT
MONITORING = check_manifests.K8S / "overlays" / "monitoring"
DRAFTERS = "/opt/forerun/drafters"

pytestmark = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl, which renders the manifests, is missing"
)


@pytest.fixture(scope="module")
def rendered() -> dict[Path, list[Manifest]]:
    """What each folder renders to."""
    return {folder: check_manifests.render(folder) for folder in check_manifests.overlays()}


def config_of(folder: Path) -> Config:
    return load_config(folder / "forerun.toml")


def worker_groups(manifests: list[Manifest]) -> list[dict[str, Any]]:
    return check_manifests.groups(find(manifests, "RayCluster"))[1:]


def test_the_overlays_are_there() -> None:
    """docs/operations.md names each of them."""
    names = {folder.name for folder in check_manifests.overlays()}
    assert names == {"base", "single-node", "multi-gpu", "edge-drafters", "monitoring"}
    document = (ROOT / "docs" / "operations.md").read_text()
    assert all(f"overlays/{name}" in document for name in names - {"base"})


# ---------------------------------------------------------------- scaling


@pytest.mark.parametrize("folder", FOLDERS)
def test_groups_have_room_for_what_pools_may_have(rendered, folder) -> None:
    """A pool that may grow further than its group waits for ever; a larger group is never used."""
    config = config_of(folder)
    groups = worker_groups(rendered[folder])
    bounds = {
        pool.name: (pool.placement, pool.min_replicas or 0, pool.max_replicas)
        for pool in config.remote_pools
    }
    verifier = config.verifier
    bounds[""] = (verifier.placement, verifier.replicas, verifier.replicas)
    used = []
    for name, (placement, least, most) in bounds.items():
        (group,) = [each for each in groups if places(each, placement)]
        per_pod = places(group, placement)
        assert group["minReplicas"] * per_pod == least, name
        assert group["maxReplicas"] * per_pod == most, name
        assert "replicas" not in group, "every apply would set the autoscaler's number back"
        used.append(group["groupName"])
    assert sorted(used) == sorted(group["groupName"] for group in groups)


@pytest.mark.parametrize("folder", FOLDERS)
def test_autoscaler_is_on_and_the_head_is_free(rendered, folder) -> None:
    """Without the autoscaler a pool that grows finds no machine."""
    spec = find(rendered[folder], "RayCluster")["spec"]
    assert spec["enableInTreeAutoscaling"] and spec["autoscalerOptions"]["version"] == "v2"
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    limits = spec["headGroupSpec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert "nvidia.com/gpu" not in limits


# ---------------------------------------------------------------- secrets


@pytest.mark.parametrize("folder", FOLDERS)
def test_tokens_are_where_the_config_looks(rendered, folder) -> None:
    """A token file outside the Secret's mount ends the orchestrator at its start."""
    container = orchestrator_container(rendered[folder])
    pod = find(rendered[folder], "Deployment")["spec"]["template"]["spec"]
    secrets = {v["name"]: v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v}
    (path,) = [m["mountPath"] for m in container["volumeMounts"] if m["name"] in secrets]
    token_file = config_of(folder).orchestrator.auth_token_file
    assert token_file in ("", f"{path}/token")
    is_laptop = folder.name == "single-node"
    assert bool(token_file) != is_laptop, "only the cluster for trying things is open"
    document = (ROOT / "docs" / "operations.md").read_text()
    for name in (*secrets.values(), "forerun-hub"):
        assert f"create secret generic {name} " in document


@pytest.mark.parametrize("folder", FOLDERS)
def test_ray_token_is_the_operators(rendered, folder) -> None:
    """Ray refuses an orchestrator without the token that the operator made for the cluster."""
    cluster = find(rendered[folder], "RayCluster")
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    given = {each["name"]: each for each in orchestrator_container(rendered[folder])["env"]}
    assert given["RAY_AUTH_MODE"]["value"] == "token"
    reference = given["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert reference == {"name": cluster["metadata"]["name"], "key": "auth_token"}


def test_ingress_reaches_the_service(rendered) -> None:
    """A backend that the Service has no port for answers with 503."""
    manifests = rendered[check_manifests.K8S / "overlays" / "multi-gpu"]
    service = find(manifests, "Service")
    ports = {port["name"] for port in service["spec"]["ports"]}
    for name, port in (("forerun-http", "http"), ("forerun-grpc", "grpc")):
        ingress = find(manifests, "Ingress", name)
        assert ingress["metadata"]["namespace"] == service["metadata"]["namespace"]
        (rule,) = ingress["spec"]["rules"]
        (path,) = rule["http"]["paths"]
        assert path["backend"]["service"]["name"] == service["metadata"]["name"]
        assert path["backend"]["service"]["port"] == {"name": port} and port in ports
        assert ingress["spec"]["tls"][0]["hosts"] == [rule["host"]]


# ---------------------------------------------------------------- models


@pytest.mark.parametrize("folder", FOLDERS)
def test_models_can_be_had(rendered, folder) -> None:
    """A path must be in the image, an embedded model too; what is downloaded needs the volume."""
    config = config_of(folder)
    image = orchestrator_container(rendered[folder])["image"]
    shipped = f"{DRAFTERS}/"
    for model in (config.target, *(pool.model for pool in config.drafter_pools)):
        if model is None:
            continue
        if model.model.startswith("embedded:"):
            assert image.endswith("-embedded"), model.model
        elif model.model.startswith("/"):
            assert model.model.startswith(shipped)
            source = ROOT / "deploy" / "drafters" / model.model.removeprefix(shipped)
            assert (source / "config.json").exists()
    for manifest in rendered[folder]:
        for pod in check_manifests.pod_specs(manifest):
            volumes = {volume["name"] for volume in pod.get("volumes", [])}
            if "weights" in volumes:
                assert "/var/cache/forerun" in mounts(pod)
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for manifest in rendered[folder]
        for pod in check_manifests.pod_specs(manifest)
        for volume in pod.get("volumes", [])
        if "persistentVolumeClaim" in volume
    ]
    assert set(claims) == {find(rendered[folder], "PersistentVolumeClaim")["metadata"]["name"]}


def test_images_hold_the_drafters_and_the_extras() -> None:
    """Both images have the shipped drafters at one path; only one of them has torch."""
    _, stages = check_dockerfile.read_stages()
    extras = {"orchestrator": "ray,tracing", "services": "services,ray,tracing"}
    for stage, wanted in extras.items():
        copies = [c.value for c in stages[stage].commands if c.cmd.upper() == "COPY"]
        assert ("deploy/drafters", DRAFTERS) in copies
        (installed,) = [
            found.group(1)
            for c in stages[stage].commands
            if (found := re.search(r"forerun\[([\w,]+)\]", " ".join(c.value)))
        ]
        assert installed == wanted
        assert environment(stage)["HOME"] == "/tmp", "the root is read-only"


# ---------------------------------------------------------------- metrics


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_service_is_scraped(rendered, folder) -> None:
    """A pod whose port has another name or number is missing in every panel and alert."""
    config = config_of(folder)
    monitor = find(rendered[MONITORING], "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    wanted = monitor["spec"]["selector"]["matchLabels"].items()

    def scraped(template: dict[str, Any]) -> int:
        assert wanted <= template["metadata"]["labels"].items()
        ports = template["spec"]["containers"][0]["ports"]
        (number,) = [p["containerPort"] for p in ports if p["name"] == endpoint["port"]]
        return number

    deployment = find(rendered[folder], "Deployment")
    assert scraped(deployment["spec"]["template"]) == config.orchestrator.metrics_port
    assert monitor["metadata"]["namespace"] == deployment["metadata"]["namespace"]
    rules = find(rendered[folder], "NetworkPolicy", "forerun-ray")["spec"]["ingress"]
    open_ports = [port["port"] for rule in rules for port in rule.get("ports", [])]
    services = [(config.verifier.placement, config.verifier.metrics_port)]
    services += [(pool.placement, pool.metrics_port) for pool in config.remote_pools]
    for placement, port in services:
        (group,) = [g for g in worker_groups(rendered[folder]) if places(g, placement)]
        assert scraped(group["template"]) == port and port in open_ports
        assert places(group, placement) == 1, "a fixed port allows one service per pod"


def test_rules_and_dashboard_are_the_files_of_deploy(rendered) -> None:
    """The copy in the PrometheusRule must not fall behind alerts.yaml."""
    rule = find(rendered[MONITORING], "PrometheusRule")
    source = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())
    assert rule["spec"] == source, "copy alerts.yaml into overlays/monitoring/rules.yaml"
    fields = {"alert", "expr", "for", "labels", "annotations"}
    assert all(each.keys() <= fields for group in source["groups"] for each in group["rules"])
    dashboard = find(rendered[MONITORING], "ConfigMap")
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    file = (ROOT / "deploy" / "grafana" / "forerun.json").read_text()
    assert dashboard["data"] == {"forerun.json": file}


# ---------------------------------------------------------------- safety


def test_namespace_enforces_what_the_checks_hold_pods_to(rendered) -> None:
    """The API server refuses a pod beyond the standard: all of ours must be within it."""
    for folder in check_manifests.clusters():
        namespace = find(rendered[folder], "Namespace")
        assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
        for manifest in rendered[folder]:
            assert not list(check_manifests.security_problems(manifest))


@pytest.mark.parametrize("kind", ["Deployment", "RayCluster"])
@pytest.mark.parametrize(
    ("where", "field", "value"),
    [
        ("container", "allowPrivilegeEscalation", True),
        ("container", "readOnlyRootFilesystem", False),
        ("container", "capabilities", {}),
        ("pod", "runAsUser", 0),
        ("pod", "runAsNonRoot", False),
        ("pod", "seccompProfile", {"type": "Unconfined"}),
    ],
)
def test_security_rules_refuse(rendered, kind, where, field, value) -> None:
    """A rule that refuses nothing lets the API server refuse it, after the deployment."""
    manifest = copy.deepcopy(find(rendered[check_manifests.clusters()[0]], kind))
    pod = next(check_manifests.pod_specs(manifest))
    owner = pod if where == "pod" else pod["containers"][0]
    owner["securityContext"] = {**owner["securityContext"], field: value}
    assert len(list(check_manifests.security_problems(manifest))) == 1


def test_budget_rule_refuses(rendered) -> None:
    """Kubernetes cannot count a RayCluster's pods: with maxUnavailable it evicts none, ever."""
    manifests = copy.deepcopy(rendered[check_manifests.clusters()[0]])
    assert not list(check_manifests.budget_problems(manifests))
    budget = find(manifests, "PodDisruptionBudget", "forerun-target")["spec"]
    del budget["minAvailable"]
    budget["maxUnavailable"] = 1
    assert len(list(check_manifests.budget_problems(manifests))) == 1


@pytest.mark.parametrize("folder", FOLDERS)
def test_two_verifiers_may_be_drained_one_by_one(rendered, folder) -> None:
    """A budget as large as the group would stop every drain of its nodes."""
    replicas = config_of(folder).verifier.replicas
    kept = find(rendered[folder], "PodDisruptionBudget", "forerun-target")["spec"]["minAvailable"]
    assert kept == max(1, replicas - 1)
