"""Puts the attached pools' drafters beside a target: the one place that knows both services.

A verifier knows only the drafters' interface and a drafter only the target's model; neither
imports the other's package. Where their processes are started, this joins them.
"""

from collections.abc import Sequence

from core.config import DrafterPoolConfig
from core.model import RaggedModel
from core.types import AttachedInfo
from drafter_service.drafters import attach_drafter
from verifier_service.attached import Attach, Attached


def attacher(pools: Sequence[DrafterPoolConfig]) -> Attach:
    """What a verifier calls with its loaded target, to get the drafters of `pools`.

    The call raises ConfigError when a drafter does not fit the target, ModelError when one cannot
    be loaded.
    """

    def attach(target: RaggedModel) -> list[Attached]:
        return [_attached(pool, target) for pool in pools]

    return attach


def _attached(pool: DrafterPoolConfig, target: RaggedModel) -> Attached:
    drafter = attach_drafter(pool, target)
    info = AttachedInfo(
        pool=pool.name,
        kind=drafter.kind,
        max_draft_tokens=pool.max_draft_tokens,
        has_distributions=drafter.has_distributions,
    )
    return Attached(info, drafter)
