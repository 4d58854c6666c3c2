"""A Ray of one's own on this machine, for laptops, tests and the demo; or a running one.

A local one is gone without a trace: it starts in a short folder of its own, so that no other Ray is
joined by accident, and ends exactly the processes it started, by their ids. Ray listens on all
interfaces, so each port of this one wants a random token, given in the environment: written to a
file, a later Ray would want it.
Knows nothing of actors. ray is imported late, because it reads that environment when imported.
"""

import contextlib
import logging
import os
import secrets
import shutil
import socket
import tempfile

import psutil

from core.config import RayConfig
from core.errors import UnavailableError

_END_S = 10.0
_KNOCK_S = 5.0


def prepare_environment() -> None:
    """Set what a local Ray reads from the environment; call it before ray is first imported.

    What is set already stays: RAY_AUTH_MODE=disabled, for one, switches the token off.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def join_ray(address: str, namespace: str) -> None:
    """Make this process a driver of the Ray at `host:port` or "auto". Raises UnavailableError."""
    import ray

    try:
        _knock(address)
        ray.init(
            address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise UnavailableError(f"no Ray cluster at {address}: {error}") from error


def _knock(address: str) -> None:
    """Raise OSError when nothing listens there: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():  # not "auto"
        socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()


class LocalRay:
    """A running local Ray, this process its driver. Raises UnavailableError if it cannot start.

    resources: custom resources the machine offers, beside its CPUs and GPUs.
    """

    def __init__(self, config: RayConfig, resources: dict[str, float] | None = None) -> None:
        import ray

        self._others = set(psutil.Process().children())
        # Short: the paths of Ray's sockets lie inside it and have a length limit.
        self._folder = tempfile.mkdtemp(prefix="forerun-")
        try:
            ray.init(
                address="local",
                namespace=config.namespace,
                resources=resources,
                object_store_memory=config.object_store_mb * 1_000_000,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=self._folder,
            )
        except BaseException as error:  # also Ctrl-C: what runs already must end
            self.stop()
            if isinstance(error, Exception):
                raise UnavailableError(f"a local Ray cannot start: {error}") from error
            raise

    def stop(self) -> None:
        """Disconnect, end every process of this Ray and wait for it."""
        import ray

        family = self._family()
        ray.shutdown()
        _, alive = psutil.wait_procs(family, timeout=_END_S)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=_END_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """End every process of this Ray at once; for a process that is about to exit itself."""
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _family(self) -> list[psutil.Process]:
        family = [p for p in psutil.Process().children() if p not in self._others]
        for process in list(family):
            with contextlib.suppress(psutil.NoSuchProcess):
                family += process.children(recursive=True)
        return family
