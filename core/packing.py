"""Weights laid out once for oneDNN, so that bf16 products on a CPU read them at full speed.

Plain `torch.nn.Linear` re-lays a bf16 weight at every call, which costs more than the product
itself for the few rows of a decode step. The packed product gives the same bits. fp32 is left
alone: there oneDNN and the plain product differ in the last bits, and little is gained. Knows
nothing of models beyond their modules.
"""

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """`y = x W^T + b` with W in oneDNN's own layout (opaque: it has no readable values)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        # Plain attributes, not parameters: they must not be moved, cast or saved.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`, bf16."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, "none", [], ""
        )
        return output

    def extra_repr(self) -> str:
        """As nn.Linear's."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


def can_pack() -> bool:
    """Whether this build of torch on this CPU has the operators and fast bf16 products."""
    has_operators = hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    )
    return has_operators and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linears(model: nn.Module) -> int:
    """Replace every plain bf16 CPU `nn.Linear` of `model`; returns how many were replaced.

    Quantised layers, subclasses and layers whose weights are offloaded stay as they are. A weight
    that something else uses too (a tied embedding) lives on; the others are freed.
    """
    if not can_pack():
        return 0
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and _is_packable(child):
                setattr(parent, name, PackedLinear(child))
                count += 1
    return count


def _is_packable(module: nn.Linear) -> bool:
    return (
        type(module) is nn.Linear
        and not hasattr(module, "_hf_hook")
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.bfloat16
    )
