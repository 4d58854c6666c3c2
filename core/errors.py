"""The exception tree. One tree, one boundary: `core.rpc` turns these into gRPC statuses.

ForerunError
├── ConfigError            a config file or option is wrong           (process exits 2)
├── InvalidRequestError    the caller's fault; names the field        INVALID_ARGUMENT
├── OverloadedError        try again later                            RESOURCE_EXHAUSTED
├── UnavailableError       a service that is needed is not there      UNAVAILABLE
├── UnauthenticatedError   no token, or a wrong one                   UNAUTHENTICATED
├── HandshakeError         two services do not fit; names both sides  FAILED_PRECONDITION
└── ModelError             a model cannot be loaded or run            FAILED_PRECONDITION
"""


class ForerunError(Exception):
    """Base of all errors that forerun raises on purpose."""


class ConfigError(ForerunError):
    """A config file or option is wrong; the message names the key."""


class InvalidRequestError(ForerunError):
    """A request is wrong. `field` is the dotted name of the offending field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class OverloadedError(ForerunError):
    """No room now. `retry_after_s` says when to try again."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(ForerunError):
    """A service that is needed cannot be reached."""


class UnauthenticatedError(ForerunError):
    """The call carries no token, or a wrong one."""


class HandshakeError(ForerunError):
    """Two services do not fit together; the message names both sides."""


class ModelError(ForerunError):
    """A model cannot be loaded, or is of a kind that cannot be served."""
