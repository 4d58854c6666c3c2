"""The configuration: one frozen value, checked when it is built, read from one TOML file.

Knows nothing of services; it only says what they may be told. An unknown key is an error that
names the nearest valid one. Units stand in the names: `_s` seconds, `_ms` milliseconds.
See deploy/config/ for complete files and docs/configuration.md for every key.
"""

import difflib
import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from core.errors import ConfigError

#: Kinds of drafters that never draft ahead of a verdict.
NEVER_AHEAD = frozenset({"cross_tokenizer", "hybrid", "mtp_assistant", "mtp_layers", "ngram"})


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PlacementConfig(_Section):
    """Where Ray may put an actor."""

    num_cpus: float = Field(1.0, ge=0)
    num_gpus: float = Field(0.0, ge=0)
    accelerator_type: str = ""
    resources: dict[str, float] = {}
    label_selector: dict[str, str] = {}
    cpu_affinity: list[int] = []


class ModelConfig(_Section):
    """A model and how it is held. `model` is a directory, a hub name or `embedded:NAME`."""

    model: str = Field(min_length=1)
    gguf_file: str = ""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device_map: str | dict[str, int | str] = "auto"
    max_memory: dict[str, str] = {}
    offload_folder: str = ""
    trust_remote_code: bool = False
    max_length: int = Field(2048, ge=2)
    max_sequences: int = Field(16, ge=1)
    max_batch_tokens: int = Field(512, ge=16)
    threads: int = Field(0, ge=0)
    pack_weights: bool = True


class VerifierConfig(_Section):
    """The verifier replicas of the target."""

    replicas: int = Field(1, ge=1)
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    metrics_port: int | None = Field(None, ge=0, le=65535)
    placement: PlacementConfig = PlacementConfig()


class DrafterPoolConfig(_Section):
    """A pool of equal drafters. `model` is needed by kinds that have one; `options` by kind.

    An `attached` drafter lives in every verifier's process, beside the target. With `min_replicas`
    the number of replicas follows demand.
    """

    name: str = Field(min_length=1, pattern=r"^[a-z0-9][a-z0-9_-]*$")
    kind: str = Field(min_length=1)
    attached: bool = False
    replicas: int = Field(1, ge=0)
    min_replicas: int | None = Field(None, ge=0)
    max_replicas: int = Field(64, ge=0)
    max_draft_tokens: int = Field(4, ge=1, le=64)
    max_branches: int = Field(0, ge=0, le=64)
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    metrics_port: int | None = Field(None, ge=0, le=65535)
    model: ModelConfig | None = None
    options: dict[str, Any] = {}
    placement: PlacementConfig = PlacementConfig()
    addresses: list[str] = []

    @property
    def is_autoscaled(self) -> bool:
        """Whether the number of replicas follows demand."""
        return self.min_replicas is not None and self.min_replicas < self.max_replicas


class OrchestratorConfig(_Section):
    """The front: the public API, the queue and the pipeline's patience."""

    host: str = "127.0.0.1"
    port: int = Field(50051, ge=0, le=65535)
    metrics_port: int | None = Field(None, ge=0, le=65535)
    max_queue: int = Field(128, ge=0)
    max_in_flight: int = Field(0, ge=0, le=8)
    max_prefill_tokens: int = Field(256, ge=16)
    max_prefill_slowdown: float = Field(2.5, gt=1.0)
    adaptive_draft_length: bool = True
    draft_wait_ms: float = Field(250.0, ge=0)
    verify_timeout_s: float = Field(60.0, gt=0)
    drain_timeout_s: float = Field(30.0, ge=0)
    default_pool: str = ""
    fallback_pool: str = ""
    auth_token_file: str = ""
    verifier_addresses: list[str] = []


class HttpConfig(_Section):
    """OpenAI's API over HTTP, and the page. `model_name` is what clients call the target."""

    enabled: bool = False
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    model_name: str = ""
    page: bool = False


class RayConfig(_Section):
    """The Ray cluster. An empty address starts a local one."""

    address: str = ""
    namespace: str = "forerun"
    object_store_mb: int = Field(100, ge=80)


class TracingConfig(_Section):
    """OpenTelemetry traces, sent by OTLP/gRPC. An empty endpoint sends none."""

    endpoint: str = Field("", pattern=r"^(https?://\S+)?$")
    sample_ratio: float = Field(1.0, ge=0, le=1)


class LoggingConfig(_Section):
    """Events on stderr: for people, or one JSON object a line."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    format: Literal["console", "json"] = "console"


class Config(_Section):
    """The whole configuration."""

    target: ModelConfig
    verifier: VerifierConfig = VerifierConfig()
    drafter_pools: list[DrafterPoolConfig] = []
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    http: HttpConfig = HttpConfig()
    ray: RayConfig = RayConfig()
    tracing: TracingConfig = TracingConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _check_pools(self) -> Self:
        names = [pool.name for pool in self.drafter_pools]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"drafter_pools: the name {name!r} is used twice")
        default = self.orchestrator.default_pool
        if default and default not in names:
            raise ValueError(f"orchestrator.default_pool: no pool {default!r}; there are {names}")
        attached = [pool.name for pool in self.drafter_pools if pool.attached]
        fallback = self.orchestrator.fallback_pool
        if fallback and fallback not in attached:
            raise ValueError(
                f"orchestrator.fallback_pool: {fallback!r} is not an attached pool of {attached}"
            )
        for pool in self.drafter_pools:
            if pool.attached and pool.addresses:
                raise ValueError(f"drafter_pools.{pool.name}.addresses: an attached pool has none")
            if pool.attached and pool.min_replicas is not None:
                raise ValueError(
                    f"drafter_pools.{pool.name}.min_replicas: an attached pool has one drafter per"
                    " verifier"
                )
            if pool.max_branches and (pool.attached or pool.kind in NEVER_AHEAD):
                who = "an attached pool" if pool.attached else f"kind {pool.kind!r}"
                raise ValueError(
                    f"drafter_pools.{pool.name}.max_branches: {who} cannot draft ahead; must be 0"
                )
            if not (pool.min_replicas or 0) <= pool.replicas <= pool.max_replicas:
                raise ValueError(
                    f"drafter_pools.{pool.name}.replicas: {pool.replicas} is not between"
                    f" min_replicas {pool.min_replicas or 0} and max_replicas {pool.max_replicas}"
                )
        return self

    @property
    def remote_pools(self) -> list[DrafterPoolConfig]:
        """The pools whose drafters are processes of their own."""
        return [pool for pool in self.drafter_pools if not pool.attached]

    @property
    def attached_pools(self) -> list[DrafterPoolConfig]:
        """The pools whose drafters live beside the target."""
        return [pool for pool in self.drafter_pools if pool.attached]

    def pool(self, name: str) -> DrafterPoolConfig:
        """The pool of that name. Raises ConfigError when there is none."""
        for pool in self.drafter_pools:
            if pool.name == name:
                return pool
        known = ", ".join(pool.name for pool in self.drafter_pools) or "none"
        raise ConfigError(f"drafter_pools: no pool {name!r}; there are: {known}")


def load_config(path: str | Path) -> Config:
    """Read and check a TOML file. Raises ConfigError that names file, key and nearest key."""
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    _locate_models(data, Path(path).parent)
    return parse_config(data, source=str(path))


def _locate_models(data: dict[str, Any], folder: Path) -> None:
    """Have models named by `./...` or `../...` begin at the file's folder, wherever one works."""
    pools = data.get("drafter_pools")
    owners = pools if isinstance(pools, list) else []
    models = [each.get("model") for each in owners if isinstance(each, dict)]
    for section in (data.get("target"), *models):
        if isinstance(section, dict) and str(section.get("model")).startswith(("./", "../")):
            section["model"] = str((folder / section["model"]).resolve())


def parse_config(data: dict[str, Any], source: str = "config") -> Config:
    """Check a config given as nested dicts. Raises ConfigError as `load_config` does."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        lines = [_describe(dict(item)) for item in error.errors()]
        raise ConfigError(f"{source}: " + "; ".join(lines)) from error


def _describe(item: dict[str, Any]) -> str:
    location = [str(part) for part in item["loc"]]
    key = ".".join(location)
    if item["type"] != "extra_forbidden":
        message = str(item["msg"]).removeprefix("Value error, ")
        return f"{key}: {message}" if key else message
    valid = _valid_keys(item["loc"][:-1])
    nearest = difflib.get_close_matches(location[-1], valid, n=1, cutoff=0.0)
    hint = f"did you mean {nearest[0]!r}?" if nearest else ""
    return f"{key}: unknown key; {hint} Valid keys: {', '.join(sorted(valid))}"


def _valid_keys(location: tuple[str | int, ...]) -> list[str]:
    section: type[BaseModel] = Config
    for part in location:
        if isinstance(part, str) and part in section.model_fields:
            section = _section_of(section.model_fields[part].annotation) or section
    return list(section.model_fields)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The config section inside a type such as `list[Section]` or `Section | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _section_of(argument)
        if found is not None:
            return found
    return None
