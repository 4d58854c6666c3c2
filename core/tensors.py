"""Tensors as bytes and back: what the target tells a remote drafter of its tokens.

The elements travel in the target's own type, untouched, so that a remote drafter computes with the
very values an attached one would see. Knows nothing of what they mean.
"""

import torch
from torch import Tensor

from core.errors import InvalidRequestError
from core.params import Features


def features_to_bytes(position: int, values: Tensor) -> Features:
    """`[n, F]` values of the tokens from `position` on, copied to the host."""
    dtype = str(values.dtype).removeprefix("torch.")
    data = values.contiguous().cpu().view(torch.uint8).numpy().tobytes()
    features = Features(position, values.shape[0], dtype, data)
    assert not features.problem, features.problem
    return features


def features_from_bytes(features: Features) -> Tensor:
    """`[n, F]` on the CPU. Raises InvalidRequestError for a wrong type or length."""
    if features.problem:
        raise InvalidRequestError("features", features.problem)
    flat = torch.frombuffer(bytearray(features.data), dtype=getattr(torch, features.dtype))
    return flat.view(features.num_tokens, -1)
