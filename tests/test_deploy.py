"""The image, the manifests and the configuration that they carry agree with each other."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
from ray.scripts.scripts import start as ray_start

from core import __version__
from core.config import Config, PlacementConfig, load_config
from scripts import check_dockerfile, check_manifests

Manifest = dict[str, Any]
FOLDERS = [pytest.param(folder, id=folder.name) for folder in check_manifests.clusters()]
ROOT = check_manifests.ROOT

pytestmark = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl, which renders the manifests, is missing"
)


@pytest.fixture(scope="module")
def rendered() -> dict[Path, list[Manifest]]:
    """What each folder renders to."""
    return {folder: check_manifests.render(folder) for folder in check_manifests.clusters()}


def find(manifests: list[Manifest], kind: str, name: str = "") -> Manifest:
    """The one manifest of that kind (and name)."""
    found = [m for m in manifests if m["kind"] == kind and name in ("", m["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} of kind {kind} {name}"
    return found[0]


def orchestrator_container(manifests: list[Manifest]) -> dict[str, Any]:
    return find(manifests, "Deployment")["spec"]["template"]["spec"]["containers"][0]


def mounts(pod: dict[str, Any]) -> list[str]:
    return [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]


def environment(stage: str) -> dict[str, str]:
    """The ENV of a stage of the Dockerfile."""
    _, stages = check_dockerfile.read_stages()
    words = [w for c in stages[stage].commands if c.cmd.upper() == "ENV" for w in c.value]
    return dict(zip(words[::2], words[1::2], strict=True))


# ---------------------------------------------------------------- agreement


@pytest.mark.parametrize("folder", FOLDERS)
def test_config_map_carries_a_valid_config(rendered, folder, tmp_path) -> None:
    """A key that core.config does not know would end the orchestrator at its first start."""
    data = find(rendered[folder], "ConfigMap")["data"]
    path = tmp_path / "forerun.toml"
    path.write_text(data["forerun.toml"])
    config = load_config(path)
    hosts = [config.orchestrator.host, config.verifier.host, config.http.host]
    hosts += [pool.host for pool in config.remote_pools]
    assert set(hosts) == {"0.0.0.0"}, "a service that listens on loopback serves its pod only"
    pod = find(rendered[folder], "Deployment")["spec"]["template"]["spec"]
    (before,) = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1:]
    needed_s = int(before) + config.orchestrator.drain_timeout_s + 15  # to end the actors
    assert pod["terminationGracePeriodSeconds"] >= needed_s


@pytest.mark.parametrize("folder", FOLDERS)
def test_orchestrator_ports_agree(rendered, folder) -> None:
    """A port that differs between config, probes, Service and image answers nobody."""
    config = load_config(folder / "forerun.toml")
    container = orchestrator_container(rendered[folder])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    front = config.orchestrator
    named = {"grpc": front.port, "http": config.http.port, "forerun-metrics": front.metrics_port}
    assert ports == named and config.http.enabled
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == front.port
    service = find(rendered[folder], "Service")["spec"]["ports"]
    assert {port["targetPort"]: port["port"] for port in service} == ports
    assert service[0]["appProtocol"] == "kubernetes.io/h2c"
    _, stages = check_dockerfile.read_stages()
    exposed = [c.value for c in stages["orchestrator"].commands if c.cmd.upper() == "EXPOSE"]
    assert exposed == [tuple(str(port) for port in ports.values())]


@pytest.mark.parametrize("folder", FOLDERS)
def test_orchestrator_finds_its_config_and_ray(rendered, folder) -> None:
    """The file named on the command line is mounted, and the head's Service has Ray's port."""
    container = orchestrator_container(rendered[folder])
    _, stages = check_dockerfile.read_stages()
    command = [c.value for c in stages["orchestrator"].commands if c.cmd.upper() == "CMD"]
    assert command == [tuple(container["args"])]
    assert Path(container["args"][-1]).parent.as_posix() in mounts({"containers": [container]})
    cluster = find(rendered[folder], "RayCluster")
    head = check_manifests.groups(cluster)[0]["template"]["spec"]["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    address = load_config(folder / "forerun.toml").ray.address
    assert address == f"ray://{cluster['metadata']['name']}-head-svc:{ports['client']}"


def placements(config: Config) -> list[tuple[str, int, PlacementConfig]]:
    """Name, number and placement of every kind of actor."""
    pools = [(p.name, p.replicas, p.placement) for p in config.remote_pools]
    return [("verifier", config.verifier.replicas, config.verifier.placement), *pools]


def places(group: dict[str, Any], placement: PlacementConfig) -> int:
    """How many actors of a placement one pod of a group holds."""
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    has = {"CPU": float(limits["cpu"]), "GPU": float(limits.get("nvidia.com/gpu", 0))}
    has |= {name: float(amount) for name, amount in group.get("resources", {}).items()}
    wants = {"CPU": placement.num_cpus, "GPU": placement.num_gpus, **placement.resources}
    if not placement.label_selector.items() <= group.get("labels", {}).items():
        return 0
    return min(int(has.get(name, 0) // amount) for name, amount in wants.items() if amount)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_actor_has_a_place(rendered, folder) -> None:
    """An actor whose resources no group offers would wait for ever, and the client with it."""
    groups = check_manifests.groups(find(rendered[folder], "RayCluster"))[1:]
    for name, replicas, placement in placements(load_config(folder / "forerun.toml")):
        assert placement.resources, f"{name} could take another role's pod"
        fitting = [group for group in groups if places(group, placement)]
        assert len(fitting) == 1, f"{name} fits {len(fitting)} groups"
        assert places(fitting[0], placement) * fitting[0]["maxReplicas"] >= replicas


@pytest.mark.parametrize("folder", FOLDERS)
def test_images_and_versions_agree(rendered, folder) -> None:
    """Ray refuses a peer of another version; a tag that nothing builds cannot be pulled."""
    arguments, stages = check_dockerfile.read_stages()
    suffix = "-embedded" if folder.name == "single-node" else ""
    cluster = find(rendered[folder], "RayCluster")
    images = {pod["containers"][0]["image"] for pod in check_manifests.pod_specs(cluster)}
    images.add(orchestrator_container(rendered[folder])["image"])
    names = ("forerun-orchestrator", "forerun-services")
    assert images == {f"{name}:{__version__}{suffix}" for name in names}
    assert {name.removeprefix("forerun-") + suffix for name in names} <= stages.keys()
    assert cluster["spec"]["rayVersion"] == ray.__version__
    assert f"ray=={ray.__version__}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert f":{ray.__version__}-py311" in arguments["RAY_IMAGE"]
    assert arguments["PYTHON_IMAGE"].startswith("python:3.11-")


@pytest.mark.parametrize("folder", FOLDERS)
def test_selectors_select_the_pods(rendered, folder) -> None:
    """A Service, policy or budget whose selector matches no pod does nothing, silently."""
    deployment = find(rendered[folder], "Deployment")["spec"]
    cluster = find(rendered[folder], "RayCluster")
    pods = [deployment["template"]["metadata"]["labels"]]
    pods += [g["template"]["metadata"]["labels"] for g in check_manifests.groups(cluster)]

    def selected(labels: dict[str, str]) -> list[dict[str, str]]:
        return [pod for pod in pods if labels.items() <= pod.items()]

    assert selected(deployment["selector"]["matchLabels"]) == pods[:1]
    assert selected(find(rendered[folder], "Service")["spec"]["selector"]) == pods[:1]
    for name, its_pods in (("forerun-orchestrator", pods[:1]), ("forerun-target", pods[2:3])):
        budget = find(rendered[folder], "PodDisruptionBudget", name)["spec"]
        assert selected(budget["selector"]["matchLabels"]) == its_pods
    front = find(rendered[folder], "NetworkPolicy", "forerun-orchestrator")["spec"]
    assert selected(front["podSelector"]["matchLabels"]) == pods[:1]
    behind = find(rendered[folder], "NetworkPolicy", "forerun-ray")["spec"]
    for rule in behind["podSelector"]["matchExpressions"]:
        assert all(pod[rule["key"]] in rule["values"] for pod in pods[1:])
    assert selected(behind["ingress"][0]["from"][0]["podSelector"]["matchLabels"]) == pods


@pytest.mark.parametrize("folder", FOLDERS)
def test_pods_can_write_their_caches_and_keep_their_models(rendered, folder) -> None:
    """Downloads go to a mounted volume; a mount over the embedded models would hide them."""
    for manifest in rendered[folder]:
        for pod in check_manifests.pod_specs(manifest):
            container = pod["containers"][0]
            assert "/tmp" in mounts(pod), "the root is read-only"
            if container["name"] == "ray-head":
                continue
            stage = container["image"].removeprefix("forerun-").partition(":")[0]
            names = environment(stage)
            assert any(Path(names["HF_HOME"]).is_relative_to(path) for path in mounts(pod))
            assert not any(Path(names["FORERUN_CACHE"]).is_relative_to(p) for p in mounts(pod))
            assert pod["terminationGracePeriodSeconds"] >= 60


@pytest.mark.parametrize("folder", FOLDERS)
def test_ray_accepts_its_start_line(rendered, folder) -> None:
    """Quoting, resources and labels of each group are what Ray's own command reads."""
    for group in check_manifests.groups(find(rendered[folder], "RayCluster")):
        arguments = check_manifests.ray_start_arguments(group)
        read = ray_start.make_context("start", arguments).params
        if group["groupName"] == "head":
            assert read["num_cpus"] == 0 and not read["num_gpus"]
            continue
        resources = {name: float(amount) for name, amount in group["resources"].items()}
        assert json.loads(read["resources"]) == resources
        assert dict([read["labels"].split("=")]) == group["labels"]


# ---------------------------------------------------------------- the checks themselves


def broken(path: str, value: Any) -> Any:
    """A change of the base's RayCluster: sets `path` (dots) to `value`."""
    return pytest.param(path, value, id=f"{path}={json.dumps(value)}")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        broken("metadata.name", "x" * 54),
        broken("metadata.name", "1forerun"),
        broken("spec.rayVersion", "2.51.1"),
        broken("spec.headGroupSpec.template.spec.containers", []),
        broken("spec.headGroupSpec.template.spec.restartPolicy", "Always"),
        broken("spec.workerGroupSpecs.0.minReplicas", 3),
        broken("spec.workerGroupSpecs.0.rayStartParams", {"resources": "{}"}),
        broken("spec.workerGroupSpecs.0.rayStartParams", {"labels": "a=b"}),
        broken("spec.workerGroupSpecs.0.resources", {"forerun_gpu": "1"}),
        broken("spec.workerGroupSpecs.0.template.spec.containers.0.name", "worker"),
        broken("spec.workerGroupSpecs.0.template.spec.containers.0.resources.requests.cpu", "1"),
        broken("spec.workerGroupSpecs.1.groupName", "target"),
    ],
)
def test_operator_rules_refuse(rendered, path, value) -> None:
    """A rule that refuses nothing lets the operator refuse it, after the deployment."""
    cluster = copy.deepcopy(find(rendered[check_manifests.clusters()[0]], "RayCluster"))
    assert not list(check_manifests.cluster_problems(cluster))
    *parents, last = [int(p) if p.isdigit() else p for p in path.split(".")]
    node = cluster
    for parent in parents:
        node = node[parent]
    node[last] = value
    assert len(list(check_manifests.cluster_problems(cluster))) == 1


@pytest.mark.parametrize(("name", "number"), [("a-name-of-sixteen", 50051), ("grpc", 10005)])
def test_ports_refuse(rendered, name, number) -> None:
    """Long port names are refused by the API server; Ray's worker ports collide now and then."""
    deployment = copy.deepcopy(find(rendered[check_manifests.clusters()[0]], "Deployment"))
    assert not list(check_manifests.port_problems(deployment))
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    container["ports"] = [{"name": name, "containerPort": number}]
    assert len(list(check_manifests.port_problems(deployment))) == 1


@pytest.mark.parametrize("kind", ["RayCluster", "Deployment"])
def test_schemas_refuse_unknown_fields(rendered, kind) -> None:
    """A misspelt field is dropped by the server without a word; strict schemas say it here."""
    schema = check_manifests.ray_cluster_schema()
    if schema is None:
        pytest.skip("RayCluster's definition is not on this machine")
    manifest = copy.deepcopy(find(rendered[check_manifests.clusters()[0]], kind))
    assert not list(check_manifests.schema_problems(manifest, schema))
    for pod in check_manifests.pod_specs(manifest):
        pod["containers"][0]["volumeMount"] = []
        break
    problems = list(check_manifests.schema_problems(manifest, schema))
    assert len(problems) == 1 and "volumeMount" in problems[0]


def test_tightened_schema() -> None:
    """Defaulted fields may be left out, integers or strings both pass, the rest is held to."""
    tightened = check_manifests.tighten(
        {
            "type": "object",
            "required": ["size", "port"],
            "properties": {
                "size": {"type": "integer", "default": 1},
                "port": {"x-kubernetes-int-or-string": True},
                "note": {"type": "string", "nullable": True},
                "free": {
                    "type": "object",
                    "properties": {},
                    "x-kubernetes-preserve-unknown-fields": True,
                },
            },
        }
    )
    valid = jsonschema.Draft202012Validator(tightened).is_valid
    assert valid({"port": "grpc", "note": None, "free": {"any": 1}})
    assert valid({"port": 1, "size": 2})
    for wrong in ({}, {"port": []}, {"port": 1, "size": "2"}, {"port": 1, "sise": 2}):
        assert not valid(wrong)
