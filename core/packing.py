"""Weights laid out once for oneDNN, so that bf16 products on a CPU read them at full speed.

Plain `torch.nn.Linear` re-lays a bf16 weight at every call, which costs more than the product
itself for the few rows of a decode step. Layers that are given the same input one after the other
(query, key and value; gate and up) become one product, since a long read is faster than several
short ones. Both give the bits of the plain product, and a row's do not depend on how many rows
there are. fp32 is left alone: there oneDNN and the plain product differ in the last bits, and
little is gained. Knows nothing of models beyond their
modules: which layers share an input is seen in a forward, not read off their names.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

#: A single row of more values than this is summed in another order than one of several rows, so
#: it is computed twice. Nothing is read twice for that; the second row is nearly free.
MAX_SINGLE_ROW = 1024


class _Product:
    """`x [W1; W2; ...]^T + [b1; b2; ...]` of one or more layers, computed once per input."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.sizes = [linear.out_features for linear in linears]
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def part(self, index: int, x: Tensor) -> Tensor:
        """The output of layer `index`; the others' are kept until the last has been asked for."""
        if self._input is not x:
            is_single = x.numel() == x.shape[-1] > MAX_SINGLE_ROW
            rows = torch.cat([x, x], dim=-2) if is_single else x
            output = torch.ops.mkldnn._linear_pointwise(
                rows, self._packed, self._bias, "none", [], ""
            )
            if is_single:
                output = output[..., :1, :]
            if len(self.sizes) == 1:
                return output  # type: ignore[no-any-return]
            self._input, self._outputs = x, output.split(self.sizes, dim=-1)
        output = self._outputs[index]
        if index == len(self.sizes) - 1:
            self._input, self._outputs = None, ()
        return output


class PackedLinear(nn.Module):
    """`y = x W^T + b` with W in oneDNN's own layout (opaque: it has no readable values).

    Its product may serve other layers that get the same `x`; a layer that is given another `x`
    computes the product for that one.
    """

    def __init__(self, linear: nn.Linear, product: _Product | None = None, index: int = 0) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        # Plain attributes, not parameters: they must not be moved, cast or saved.
        self._product = product or _Product([linear])
        self._index = index

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`, bf16."""
        return self._product.part(self._index, x)

    def extra_repr(self) -> str:
        """As nn.Linear's."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


def can_pack() -> bool:
    """Whether this build of torch on this CPU has the operators and fast bf16 products."""
    has_operators = hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    )
    return has_operators and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@contextlib.contextmanager
def watch_inputs(model: nn.Module) -> Iterator[list[list[nn.Linear]]]:
    """While a forward runs inside, collect the linear layers that share an input, in order."""
    groups: list[list[nn.Linear]] = []
    last: list[Tensor] = []

    def watch(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(module, nn.Linear)
        if last and last[0] is inputs[0]:
            groups[-1].append(module)
        else:
            groups.append([module])
            last[:] = [inputs[0]]

    hooks = [m.register_forward_pre_hook(watch) for m in model.modules() if type(m) is nn.Linear]
    try:
        yield groups
    finally:
        for hook in hooks:
            hook.remove()


def pack_linears(model: nn.Module, groups: Sequence[Sequence[nn.Linear]] = ()) -> int:
    """Replace every plain bf16 CPU `nn.Linear` of `model`; returns the bytes of their weights.

    `groups`: layers that share an input, from `watch_inputs`. Quantised layers, subclasses and
    layers whose weights are offloaded stay as they are. A weight that something else uses too (a
    tied embedding) lives on; the others are freed.
    """
    if not can_pack():
        return 0
    packed: dict[nn.Module, PackedLinear] = {}
    for group in groups:
        members = list(dict.fromkeys(group))
        alike = len({member.bias is None for member in members}) == 1
        if alike and len(members) == len(group) > 1 and all(map(_is_packable, members)):
            product = _Product(members)
            packed |= {m: PackedLinear(m, product, i) for i, m in enumerate(members)}
    num_bytes = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and _is_packable(child):
                num_bytes += child.weight.nbytes
                setattr(parent, name, packed.get(child) or PackedLinear(child))
    return num_bytes


def _is_packable(module: nn.Linear) -> bool:
    return (
        type(module) is nn.Linear
        and not hasattr(module, "_hf_hook")
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.bfloat16
    )
