"""Tiny block-diffusion drafters in the real format, and transformers' own drafts.

A drafter fits any tiny target of four layers. `generate_assisted` is the library's whole `generate`
with `speculation_type="dflash"`, made to accept as many tokens of each round as a test wants.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForImageTextToText,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    MuseGlimmerConfig,
    PreTrainedModel,
)
from transformers.generation import utils as generation
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from core.config import DrafterPoolConfig, ModelConfig
from core.drafter import DraftJob, TargetFeatures
from core.features import FeatureTap
from core.model import RaggedModel, Row
from core.types import SamplingParams
from drafter_service.drafters import attach_drafter
from drafter_service.drafters.dflash import DflashDrafter
from tests.tiny_models import BOS, EOS, VOCAB_SIZE, _randomize
from tests.verifying import GREEDY, model_config

WINDOW, BLOCK = 12, 4
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Pair:
    """Checkpoints of a target and its drafter."""

    target: Path
    drafter: Path
    dtype: str = "float32"

    def config(self, path: Path) -> ModelConfig:
        config = model_config(path, max_sequences=6, max_batch_tokens=256, max_length=256)
        return config.model_copy(update={"dtype": self.dtype})

    def load(self) -> RaggedModel:
        return RaggedModel.load(self.config(self.target))

    def pool(self, **changes: object) -> DrafterPoolConfig:
        return DrafterPoolConfig(
            name="near", kind="dflash", attached=True, model=self.config(self.drafter), **changes
        )

    def attach(self) -> tuple[DflashDrafter, RaggedModel]:
        model = self.load()
        return attach_drafter(self.pool(), model), model  # type: ignore[return-value]


def save_drafter(path: Path, seed: int = 7, **overrides: Any) -> Path:
    """Write a drafter: layers of both types, told of the first, a middle and the last layer."""
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "sliding_window": WINDOW,
        "layer_types": [SLIDING, FULL, SLIDING],
        "block_size": BLOCK,
        "mask_token_id": VOCAB_SIZE - 1,
        "target_layer_ids": [0, 2, 3],
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
    }
    model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**{**fields, **overrides}))
    _randomize(model, seed, 0.35)
    model.save_pretrained(path)
    return path


def save_muse(path: Path) -> Path:
    """Write a target of the family whose drafters these are: a norm in its embedding that drafters
    are trained without, and logits that are scaled and capped."""
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "sliding_window": WINDOW,
        "bos_token_id": BOS,
        "eos_token_id": None,
        "pad_token_id": EOS,
    }
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = MuseGlimmerConfig(
        text_config=text,
        vision_config={**vision, "num_attention_heads": 2, "pos_emb_height": 4, "pos_emb_width": 4},
        out_hidden_size=64,
        projector_hidden_size=16,
        image_token_id=VOCAB_SIZE - 1,
        video_token_id=VOCAB_SIZE - 2,
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    _randomize(model, 0, 0.35)
    model.save_pretrained(path)
    return path


def load_drafter(path: Path) -> PreTrainedModel:
    """The library's model."""
    return AutoModel.from_pretrained(path, local_files_only=True, dtype=torch.float32).eval()


def generate_assisted(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    full: Sequence[int],
    start: int,
    accepted: Sequence[int],
) -> list[tuple[int, list[int]]]:
    """The library's whole assisted `generate`: (length, proposal) of each round.

    It accepts so many tokens of each round in turn: its candidates are replaced by those of `full`,
    its own greedy text, up to there.
    """
    rounds: list[tuple[int, list[int]]] = []
    count = drafter.config.block_size - 1

    class Scripted(DFlashTokenCandidateGenerator):  # type: ignore[misc]
        def get_candidates(  # type: ignore[no-untyped-def]
            self, input_ids, model_kwargs, model_outputs, is_first_iteration, **rest
        ):
            size = input_ids.shape[1]
            found, _ = super().get_candidates(
                input_ids, model_kwargs, model_outputs, is_first_iteration, **rest
            )
            if not is_first_iteration:
                right = accepted[len(rounds) % len(accepted)]
                rounds.append((size, found[0, size:].tolist()))
                script = torch.tensor([list(full[size : size + count])])
                script[:, right:] = (script[:, right:] + 1) % VOCAB_SIZE
                found = torch.cat([input_ids, script], dim=1)
            return found, None

    stock = generation.DFlashTokenCandidateGenerator
    generation.DFlashTokenCandidateGenerator = Scripted
    prompt = torch.tensor([list(full[:start])])
    try:
        with torch.no_grad():
            output = target.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                assistant_model=drafter,
                speculation_type="dflash",
                max_length=len(full) - count - 1,
                do_sample=False,
            )
    finally:
        generation.DFlashTokenCandidateGenerator = stock
    text = output[0].tolist()
    assert text == list(full[: len(text)]), "the peer's own text is not greedy"
    return [each for each in rounds if len(each[1]) == count]


def told(model: RaggedModel, drafter: DflashDrafter, tokens: Sequence[int]) -> torch.Tensor:
    """Features of these tokens."""
    tap = FeatureTap(model, drafter.needs)
    model.open(9)
    model.forward([Row(9, 0, tokens, 0)])
    [values] = tap.read([9])
    model.close(9)
    tap.close()
    return values


def job(
    tokens: Sequence[int],
    wanted: int,
    values: torch.Tensor,
    part: tuple[int, int],
    sequence: int = 1,
    params: SamplingParams = GREEDY,
) -> DraftJob:
    """A job that tells of the positions in `part`."""
    features = TargetFeatures(part[0], values[slice(*part)])
    return DraftJob(sequence, tokens, wanted, params, 0, features)
