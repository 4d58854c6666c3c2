"""Checkpoints of drafters that borrow their target's embedding and head.

Such a directory holds `config.json`, `model.safetensors` (the layers and what else was trained,
and the ids of the draft vocabulary, if the head was narrowed to one) and `forerun.json`, which
names the target: a path, absolute or from the directory, or `embedded:NAME`. The target's
tokenizer serves both. Logits of a narrowed head are spread over the target's ids, -inf where the
drafter has no token, so that everything behind the model is as with any other. Knows nothing of
training and drafting.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from core.embedded import resolve_model
from core.errors import ModelError

MANIFEST = "forerun.json"
_WEIGHTS = "model.safetensors"
_DRAFT_TOKEN_IDS = "draft_token_ids"
_HASHED_VALUES = 1 << 16


@dataclass(frozen=True, slots=True)
class SharedCheckpoint:
    """A drafter's checkpoint that is complete only together with its target's.

    target: directory of the target. draft_token_ids: int64 ascending, None for the whole
    vocabulary. tensors: of the whole network by name, the target's embedding and head included.
    """

    target: Path
    draft_token_ids: Tensor | None
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, path: str | Path) -> "SharedCheckpoint | None":
        """None for a directory that is an ordinary checkpoint. Raises ModelError for one whose
        target is not there or is not the one that the drafter was made for."""
        folder, target = Path(path), target_of(path)
        if target is None:
            return None
        try:
            digest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["target_digest"]
            own = load_file(folder / _WEIGHTS)
            shared = target_tensors(target)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ModelError(f"model: {folder} cannot be loaded: {error!r}") from error
        if digest != target_digest(shared):
            raise ModelError(
                f"model: {folder} was made for another target than {target}: the embeddings differ"
            )
        draft_token_ids = own.pop(_DRAFT_TOKEN_IDS, None)
        ids = None if draft_token_ids is None else draft_token_ids.long()
        return cls(target, ids, shared | own)

    def complete(self, network: Any, device_map: Any = "cpu") -> None:
        """Give a network of the drafter's config its weights, in the type that it has, and keep of
        its head only the draft vocabulary. A drafter is too small to be spread over devices.

        Raises ModelError unless the weights are all there, and for a device map of several parts.
        """
        if not isinstance(device_map, str):
            raise ModelError("model: a drafter that shares weights is on one device: device_map")
        network.to(single_device(device_map))
        text = network.config.get_text_config()
        try:
            found = network.load_state_dict(self.tensors, strict=False)
        except RuntimeError as error:  # other shapes
            raise ModelError(f"model: the drafter does not fit {self.target}: {error}") from error
        tied = network._tied_weights_keys or () if text.tie_word_embeddings else ()
        if missing := set(found.missing_keys) - set(tied):
            raise ModelError(f"model: neither the drafter nor {self.target} has {min(missing)}")
        if self.draft_token_ids is not None:
            self._narrow(network, self.draft_token_ids, text.vocab_size)

    def _narrow(self, network: Any, ids: Tensor, vocab_size: int) -> None:
        keep_head_rows(network, ids)

        def spread(module: nn.Module, inputs: Any, output: Any) -> Any:
            logits = output.logits  # [1, n, draft vocabulary]
            output.logits = spread_logits(logits, ids, vocab_size)
            return output

        network.register_forward_hook(spread)


def write_shared(
    folder: Path,
    tensors: dict[str, Tensor],
    draft_token_ids: Sequence[int] | None,
    manifest: dict[str, Any],
) -> None:
    """Write the weights, and the manifest with its "target" and whatever else it tells.

    Raises ModelError when the target's checkpoint is not one whose weights can be shared.
    """
    shared = target_tensors(_locate(folder, manifest["target"]))
    own = dict(tensors)
    if draft_token_ids is not None:
        own[_DRAFT_TOKEN_IDS] = torch.tensor(draft_token_ids, dtype=torch.int32)
    save_file(own, folder / _WEIGHTS, metadata={"format": "pt"})
    text = json.dumps({**manifest, "target_digest": target_digest(shared)}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def keep_head_rows(network: Any, token_ids: Tensor) -> None:
    """Replace the network's head by the rows of these ids."""
    head = network.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(f"model: {type(network).__name__} has no head that could be narrowed")
    network.set_output_embeddings(head_rows(head.weight, head.bias, token_ids))


def spread_logits(logits: Tensor, token_ids: Tensor, vocab_size: int) -> Tensor:
    """`[.., n]` logits of these ids as `[.., vocab_size]`, -inf elsewhere."""
    wide = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    return wide.index_copy_(-1, token_ids.to(logits.device), logits)


def head_rows(weight: Tensor, bias: Tensor | None, token_ids: Tensor) -> nn.Linear:
    """A head of these rows of another one's `[vocab_size, D]` weight and bias; not trainable."""
    ids = token_ids.to(weight.device)
    narrow = nn.Linear(weight.shape[1], len(ids), bias=bias is not None, device="meta")
    narrow.weight = nn.Parameter(weight.detach()[ids], requires_grad=False)
    if bias is not None:
        narrow.bias = nn.Parameter(bias.detach()[ids], requires_grad=False)
    return narrow


def single_device(device_map: str) -> str:
    """The one device of what is too small to be spread, where a config leaves the choice open."""
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device_map


def target_of(path: str | Path) -> Path | None:
    """The directory of a drafter's target; None for an ordinary checkpoint. Raises ModelError."""
    folder = Path(path)
    if not (folder / MANIFEST).exists():
        return None
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return _locate(folder, manifest["target"])
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model: {folder / MANIFEST} cannot be read: {error!r}") from error


def target_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint that belong to no layer. Raises ModelError without any."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            found |= {name: weights.get_tensor(name) for name in _outside_layers(weights.keys())}
    if not found:
        raise ModelError(f"model: {folder} has no safetensors weights that a drafter could share")
    return found


def target_digest(tensors: dict[str, Tensor]) -> str:
    """Tells one target's embeddings from another's, by the first values of each tensor."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        values = tensors[name].flatten()[:_HASHED_VALUES].contiguous()
        digest.update(f"{name} {tuple(tensors[name].shape)} {values.dtype}".encode())
        digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _outside_layers(names: Iterable[str]) -> list[str]:
    return [name for name in names if ".layers." not in name]


def _locate(folder: Path, target: str) -> Path:
    """The target's directory; a relative path begins at the drafter's."""
    path = Path(resolve_model(target)).expanduser()
    path = path if path.is_absolute() else folder / path
    if not path.is_dir():
        raise ModelError(f"model: {folder} needs its target, and {target} is no directory")
    return path
