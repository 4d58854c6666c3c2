"""Checks what deploy/k8s renders to, offline: schemas first, then the rules that no schema knows.

- Every overlay (and the base) is rendered with `kubectl kustomize`.
- Built-in kinds are validated by kubernetes-validate, strictly: an unknown field is an error.
- A RayCluster is validated by its CRD's own schema, tightened as an API server reads it.
- A RayCluster obeys what the KubeRay operator (v1.7) refuses at run time.
- Pods are within Kubernetes' restricted standard, which their namespace enforces.

Skips, and says so, where kubectl or the CRDs (FORERUN_KUBERAY_SCHEMAS, by default a folder
`shared/schemas` beside the checkout) are absent. Nothing is sent anywhere.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parent.parent
K8S = ROOT / "deploy" / "k8s"
KUBERNETES_VERSION = "1.33"
SCHEMAS = Path(
    os.environ.get("FORERUN_KUBERAY_SCHEMAS", ROOT.parent / "shared" / "schemas" / "kuberay-v1.7.0")
)
RAY_WORKER_PORTS = range(10002, 20000)

Manifest = dict[str, Any]


def overlays() -> list[Path]:
    """The folders that render: the base and every overlay."""
    found = [path.parent for path in K8S.glob("overlays/*/kustomization.yaml")]
    return [K8S / "base", *sorted(found)]


def clusters() -> list[Path]:
    """Those of them that are a whole cluster."""
    return [folder for folder in overlays() if (folder / "forerun.toml").exists()]


def render(folder: Path) -> list[Manifest]:
    """The manifests of one folder. Raises CalledProcessError when kustomize refuses it."""
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True
    )
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def name_of(manifest: Manifest) -> str:
    """Kind and name, for messages."""
    return f"{manifest['kind']} {manifest['metadata']['name']}"


# ---------------------------------------------------------------- schemas


def ray_cluster_schema() -> dict[str, Any] | None:
    """RayCluster's schema from its CRD, tightened; None where the CRD is absent."""
    path = SCHEMAS / "ray.io_rayclusters.yaml"
    if not path.exists():
        return None
    definition = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    versions = {version["name"]: version for version in definition["spec"]["versions"]}
    tightened: dict[str, Any] = tighten(versions["v1"]["schema"]["openAPIV3Schema"])
    return tightened


def tighten(node: Any) -> Any:
    """An OpenAPI v3 schema as JSON schema that refuses what a strict API server refuses.

    Unknown fields are refused unless x-kubernetes-preserve-unknown-fields says otherwise;
    int-or-string and nullable become types; a field with a default need not be written.
    """
    if isinstance(node, list):
        return [tighten(item) for item in node]
    if not isinstance(node, dict):
        return node
    schema = {key: tighten(value) for key, value in node.items() if key != "properties"}
    if "properties" in node:
        fields: dict[str, Any] = node["properties"]
        schema["properties"] = {name: tighten(field) for name, field in fields.items()}
        if not node.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        schema["required"] = [f for f in node.get("required", []) if "default" not in fields[f]]
    if node.get("x-kubernetes-int-or-string"):
        schema["type"] = ["integer", "string"]
    if node.get("nullable") and isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    return schema


def schema_problems(manifest: Manifest, ray_schema: dict[str, Any] | None) -> Iterator[str]:
    """What the schema of the manifest's kind refuses."""
    if manifest["apiVersion"].startswith("monitoring.coreos.com/"):
        return  # no copy of these at hand: tests/test_manifests.py reads them
    if manifest["kind"] != "RayCluster":
        try:
            kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{'.'.join(map(str, error.path))}: {error.message}"
    elif ray_schema is not None:
        for found in jsonschema.Draft202012Validator(ray_schema).iter_errors(manifest):
            yield f"{'.'.join(map(str, found.absolute_path))}: {found.message}"


# ---------------------------------------------------------------- rules beyond the schemas


def pod_specs(manifest: Manifest) -> Iterator[dict[str, Any]]:
    """Every pod spec inside a manifest."""
    spec = manifest.get("spec", {})
    if manifest["kind"] == "RayCluster":
        for group in groups(manifest):
            yield group["template"]["spec"]
    elif "template" in spec:
        yield spec["template"]["spec"]


def groups(cluster: Manifest) -> list[dict[str, Any]]:
    """The head group, named "head", and the worker groups of a RayCluster."""
    spec = cluster["spec"]
    return [{"groupName": "head", **spec["headGroupSpec"]}, *spec.get("workerGroupSpecs", [])]


def port_problems(manifest: Manifest) -> Iterator[str]:
    """Port names that the API server refuses and ports that Ray's workers may take."""
    for pod in pod_specs(manifest):
        for container in pod["containers"]:
            for port in container.get("ports", []):
                name, number = port.get("name", ""), port["containerPort"]
                if not re.fullmatch(r"(?=.*[a-z])[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?", name):
                    yield f"port name {name!r}: 1 to 15 of a-z, 0-9 and -"
                if number in RAY_WORKER_PORTS:
                    yield f"port {number} lies in 10002-19999, where Ray starts its workers"


def security_problems(manifest: Manifest) -> Iterator[str]:
    """What the restricted standard for pods refuses, and a root file system that may be written."""
    containers = [c for pod in pod_specs(manifest) for c in pod["containers"]]
    if "autoscalerOptions" in manifest.get("spec", {}):
        containers.append({"name": "autoscaler", **manifest["spec"]["autoscalerOptions"]})
    for pod in pod_specs(manifest):
        security = pod.get("securityContext", {})
        if not security.get("runAsNonRoot") or security.get("runAsUser", 0) == 0:
            yield "a pod may run as root"
        if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield "a pod has no seccomp profile"
        if any("hostPath" in volume for volume in pod.get("volumes", [])):
            yield "a pod mounts its node's files"
    for container in containers:
        security = container.get("securityContext", {})
        if security.get("capabilities", {}).get("drop") != ["ALL"]:
            yield f"container {container['name']} keeps capabilities"
        if security.get("allowPrivilegeEscalation", True):
            yield f"container {container['name']} may gain privileges"
        if not security.get("readOnlyRootFilesystem"):
            yield f"container {container['name']} may write to its root"


def budget_problems(manifests: list[Manifest]) -> Iterator[str]:
    """Disruption budgets that refuse every eviction: those that count a RayCluster's pods."""
    labels = [
        group["template"].get("metadata", {}).get("labels", {})
        for manifest in manifests
        if manifest["kind"] == "RayCluster"
        for group in groups(manifest)
    ]
    for budget in [m for m in manifests if m["kind"] == "PodDisruptionBudget"]:
        wanted = budget["spec"]["selector"]["matchLabels"].items()
        has_number = isinstance(budget["spec"].get("minAvailable"), int)
        if any(wanted <= pod.items() for pod in labels) and not has_number:
            # A RayCluster has no scale subresource, so Kubernetes does not know its size.
            yield f"{name_of(budget)}: minAvailable must be a number for pods of a RayCluster"


def cluster_problems(cluster: Manifest) -> Iterator[str]:
    """What the KubeRay operator refuses although the schema allows it."""
    spec, name = cluster["spec"], cluster["metadata"]["name"]
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,51}[a-z0-9])?", name):
        yield f"name {name!r}: a DNS label of at most 53 characters that begins with a letter"
    version = tuple(int(part) for part in spec.get("rayVersion", "0").split(".")[:2])
    if spec.get("authOptions", {}).get("mode") == "token" and version < (2, 52):
        yield f"token authentication needs rayVersion 2.52 or newer, not {spec.get('rayVersion')}"
    names = [group["groupName"] for group in groups(cluster)]
    if len(set(names)) < len(names):
        yield f"group names must differ: {', '.join(names)}"
    autoscaler_v2 = spec.get("autoscalerOptions", {}).get("version") == "v2"
    for group in groups(cluster):
        for problem in group_problems(group, autoscaler_v2):
            yield f"group {group['groupName']}: {problem}"


def group_problems(group: dict[str, Any], autoscaler_v2: bool) -> Iterator[str]:
    """The operator's rules, and ours, for one group of a RayCluster."""
    is_head = group["groupName"] == "head"
    start, resources = group.get("rayStartParams", {}), group.get("resources", {})
    pod = group["template"]["spec"]
    if not pod.get("containers"):
        yield "no container"
        return
    if pod["containers"][0]["name"] != ("ray-head" if is_head else "ray-worker"):
        yield "the first container must be Ray's, named ray-head or ray-worker"
    if not is_head:
        low, high = group.get("minReplicas"), group.get("maxReplicas")
        if low is None or high is None or not low <= group.get("replicas", low) <= high:
            yield f"write minReplicas <= replicas <= maxReplicas, not {low}, {high}"
    if resources and {"num-cpus", "num-gpus", "memory", "resources"} & start.keys():
        yield "resources stand in rayStartParams and in resources: use one form"
    if "labels" in start:
        yield "labels in rayStartParams: use the group's labels"
    for name in resources:
        if name.lower().endswith("gpu") and name != "GPU":
            yield f"resource {name!r} would be taken as the GPU count"
    if autoscaler_v2 and pod.get("restartPolicy", "Never") != "Never":
        yield "autoscaler v2 needs restartPolicy Never, or none"
    given = pod["containers"][0].get("resources", {})
    if not given.get("limits") or given.get("requests") != given["limits"]:
        yield "the Ray container's requests must equal its limits"


# ---------------------------------------------------------------- ray start


def ray_start_arguments(group: dict[str, Any]) -> list[str]:
    """The arguments of `ray start` that the operator makes of a group's resources and labels."""
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    arguments = {"num-cpus": whole_cpus(str(limits["cpu"]))}
    if "nvidia.com/gpu" in limits:
        arguments["num-gpus"] = str(limits["nvidia.com/gpu"])
    custom = [f'"{name}":{amount}' for name, amount in group.get("resources", {}).items()]
    if custom:
        arguments["resources"] = "{" + ",".join(custom) + "}"
    labels = [f"{name}={value}" for name, value in group.get("labels", {}).items()]
    if labels:
        arguments["labels"] = ",".join(labels)
    arguments |= group.get("rayStartParams", {})
    return [f"--{name}={value}" for name, value in sorted(arguments.items())]


def whole_cpus(quantity: str) -> str:
    """A CPU quantity such as "2" or "500m", rounded up as the operator does."""
    if quantity.endswith("m"):
        return str(-(-int(quantity.removesuffix("m")) // 1000))
    return quantity


def check_folder(folder: Path, ray_schema: dict[str, Any] | None) -> list[str]:
    """Every problem of one rendered folder."""
    manifests = render(folder)
    problems = [f"{folder.name}: {problem}" for problem in budget_problems(manifests)]
    for manifest in manifests:
        found = [*schema_problems(manifest, ray_schema), *port_problems(manifest)]
        found += security_problems(manifest)
        if manifest["kind"] == "RayCluster":
            found += cluster_problems(manifest)
        problems += [f"{folder.name}: {name_of(manifest)}: {problem}" for problem in found]
    print(f"{folder.relative_to(ROOT)}: {len(manifests)} manifests, {len(problems)} problems")
    return problems


def main() -> None:
    """Check every folder; exit 1 when there is a problem."""
    if shutil.which("kubectl") is None:
        print("skipped: kubectl, which renders the manifests, is not on this machine")
        return
    ray_schema = ray_cluster_schema()
    if ray_schema is None:
        print("skipped: RayCluster's schema (FORERUN_KUBERAY_SCHEMAS is no folder with the CRDs)")
    problems = [problem for folder in overlays() for problem in check_folder(folder, ray_schema)]
    print("\n".join(problems), end="\n" if problems else "")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
