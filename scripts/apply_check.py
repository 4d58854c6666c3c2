"""Applies what deploy/k8s renders to a real Kubernetes API server on loopback.

usage: apply_check.py [TOOLS]     (TOOLS: the folder with build.sh, start.sh and crds.py)

Builds the server into build/k8s the first time (six minutes), starts it, loads KubeRay's
definitions, applies every folder by server-side apply, and reads each RayCluster back: a field
that the server dropped is an error. That server is Kubernetes 1.20, so what is newer there is
applied in its older form (gRPC probes, policy/v1); check_manifests.py holds the real one to
today's schemas. Stops the server at the end, whatever happened.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from check_manifests import ROOT, SCHEMAS, Manifest, clusters, name_of, render

BINARIES = Path(os.environ.get("K8S_BIN", ROOT / "build" / "k8s"))
DEFAULT_TOOLS = ROOT.parent / "shared" / "tools" / "k8s"


class ApiServer:
    """A running API server; `kubectl` speaks to it. A context manager that stops it."""

    def __init__(self, tools: Path) -> None:
        self.run_dir = Path(tempfile.mkdtemp(prefix="forerun-k8s-"))
        if not (BINARIES / "kube-apiserver").exists():
            print(f"building kube-apiserver into {BINARIES} (six minutes, once)", flush=True)
            subprocess.run(["bash", str(tools / "build.sh"), str(BINARIES)], check=True)
        self._start = ["bash", str(tools / "start.sh"), str(BINARIES), str(self.run_dir)]

    def __enter__(self) -> "ApiServer":
        print("starting etcd and kube-apiserver", flush=True)
        try:
            subprocess.run(self._start, check=True)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("api.pid", "etcd.pid"):
            path = self.run_dir / name
            if path.exists():
                # Nothing of this server is kept, so nothing need be shut down in order.
                os.kill(int(path.read_text()), signal.SIGKILL)
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def kubectl(self, *arguments: str, text: str = "", show: bool = True) -> str:
        """Run kubectl with `text` as its input; its output. Exits when it fails."""
        environment = {**os.environ, "KUBECONFIG": str(self.run_dir / "kubeconfig")}
        done = subprocess.run(
            ["kubectl", *arguments], input=text, capture_output=True, text=True, env=environment
        )
        if done.returncode != 0:
            sys.exit(f"kubectl {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
        if show:
            print("  " + done.stdout.strip().replace("\n", "\n  "), flush=True)
        return done.stdout


def downgrade(node: Any) -> Any:
    """A manifest in the form that Kubernetes 1.20 knows."""
    if isinstance(node, list):
        return [downgrade(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("kind") == "RayCluster":
        return node
    if node.get("apiVersion") == "policy/v1":
        spec = {k: v for k, v in node["spec"].items() if k != "unhealthyPodEvictionPolicy"}
        node = {**node, "apiVersion": "policy/v1beta1", "spec": spec}
    if "grpc" in node and "periodSeconds" in node:
        node = {key: value for key, value in node.items() if key != "grpc"} | {
            "tcpSocket": node["grpc"]
        }
    return {key: downgrade(value) for key, value in node.items()}


def dropped(sent: Any, stored: Any, path: str = "") -> Iterator[str]:
    """Fields that were sent and are not stored as sent."""
    if isinstance(sent, dict) and isinstance(stored, dict):
        for key, value in sent.items():
            yield from dropped(value, stored.get(key), f"{path}.{key}")
    elif isinstance(sent, list) and isinstance(stored, list) and len(sent) == len(stored):
        for index, (left, right) in enumerate(zip(sent, stored, strict=True)):
            yield from dropped(left, right, f"{path}[{index}]")
    elif sent != stored:
        yield f"{path}: sent {sent!r}, stored {stored!r}"


def moved(manifest: Manifest, namespace: str) -> Manifest:
    """A manifest in another namespace, so that folders do not change each other's objects."""
    field = "name" if manifest["kind"] == "Namespace" else "namespace"
    return {**manifest, "metadata": {**manifest["metadata"], field: namespace}}


def apply_folder(server: ApiServer, folder: Path) -> list[str]:
    """Apply one folder; the fields of its RayClusters that the server did not keep."""
    manifests = [moved(manifest, f"forerun-{folder.name}") for manifest in render(folder)]
    print(f"applying {folder.relative_to(ROOT)}", flush=True)
    text = yaml.safe_dump_all([downgrade(manifest) for manifest in manifests])
    server.kubectl("apply", "--server-side", "-f", "-", text=text)
    problems: list[str] = []
    for manifest in manifests:
        if manifest["kind"] == "RayCluster":
            problems += read_back(server, manifest)
    return problems


def read_back(server: ApiServer, manifest: Manifest) -> list[str]:
    """Compare a stored RayCluster with what was sent."""
    metadata = manifest["metadata"]
    command = ["get", "raycluster", metadata["name"], "-o", "json"]
    command += ["-n", metadata["namespace"]]
    stored = json.loads(server.kubectl(*command, show=False))
    found = list(dropped(manifest["spec"], stored["spec"], ".spec"))
    print(f"  read back {name_of(manifest)}: {len(found)} fields differ")
    return found


def main() -> None:
    """Apply every folder; exit 1 when something was refused or dropped."""
    tools = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_TOOLS
    if not (tools / "start.sh").exists():
        sys.exit(f"{tools}: no start.sh there; give the folder of the API server's tools")
    with ApiServer(tools) as server:
        files = [str(path) for path in sorted(SCHEMAS.glob("*.yaml"))]
        done = subprocess.run(
            [sys.executable, str(tools / "crds.py"), *files],
            capture_output=True,
            text=True,
            check=True,
        )
        print("loading KubeRay's definitions", flush=True)
        server.kubectl("apply", "--server-side", "-f", "-", text=done.stdout)
        server.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
        problems = [problem for folder in clusters() for problem in apply_folder(server, folder)]
    print("\n".join(problems) if problems else "applied: everything accepted, nothing dropped")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
