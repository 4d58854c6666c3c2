"""What only a GPU can show (`make test-gpu`): equal bits, equal logits, sharding, speed.

Needs nothing but tiny random checkpoints. The throughput figures are printed, never judged.
"""

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.model import RaggedModel, Row
from core.noise import uniform
from core.sampling import draw, process_logits
from core.types import Rule, SamplingParams, VerifyBatch, VerifyOpen, VerifyRow
from tests.test_families import load, truth
from tests.test_noise import uniform_numpy
from tests.tiny_models import SERVED, TinyFactory, load_reference, save_tiny
from verifier_service.engine import VerifierEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
TOLERANCE = 1e-3  # fp32 on CUDA sums in another order
TEXT = [(37 * i * i + 11 * i) % 251 for i in range(150)]


def check_ragged(model: RaggedModel, path: Path) -> None:
    """A prompt beside a draft beside a single token, then a rollback, against the CPU."""
    expected = truth(load_reference(path))
    for sequence, length in enumerate((70, 20, 33)):
        model.open(sequence)
        model.forward([Row(sequence, 0, TEXT[:length], 0)])
    model.forward([Row(1, 20, [5, 5, 5], 3), Row(0, 70, [9], 1)])
    rows = [Row(0, 70, TEXT[70:75], 5), Row(1, 20, TEXT[20:21], 1), Row(2, 33, TEXT[33:90], 3)]
    wanted = [expected(TEXT[: r.position + len(r.token_ids)], r.num_logits) for r in rows]
    assert (model.forward(rows).cpu() - torch.cat(wanted)).abs().max().item() < TOLERANCE


def test_noise_has_the_bits_of_numpy() -> None:
    """Breaks when a drafter on a GPU and a target on a CPU draw with different noise."""
    seeds, positions = [0, 1, 2**64 - 1, 12345678901234567890], [0, 7, 131071, 2**31]
    got = uniform(seeds, positions, 5000, "cuda").cpu().numpy()
    want = [uniform_numpy(s, p, 5000) for s, p in zip(seeds, positions, strict=True)]
    assert np.array_equal(got, np.stack(want))


def test_draws_equal_the_cpus() -> None:
    """Breaks when the two ways through core.sampling keep other tokens or draw another one."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 4000, generator=generator) * 4
    params = [
        SamplingParams(t, k, p, 11 * i, Rule.COUPLED if t else Rule.GREEDY)
        for i, (t, k, p) in enumerate([(0, 0, 1), (0.7, 0, 1), (1, 50, 1), (1.3, 0, 0.9)] * 3)
    ]
    on_gpu = process_logits(logits.cuda(), params).cpu()
    assert torch.equal(on_gpu.isinf(), process_logits(logits, params).isinf())
    positions = list(range(12))
    assert torch.equal(
        draw(logits.cuda(), params, positions).cpu(), draw(logits, params, positions)
    )


@pytest.mark.parametrize("kind", SERVED)
def test_ragged_forward_equals_transformers(kind: str, tiny: TinyFactory) -> None:
    """Breaks when a CUDA attention kernel treats a mask, a view or a padded query differently."""
    check_ragged(load(tiny(kind), device_map={"": 0}), tiny(kind))


def test_layers_over_all_devices(tiny_llama: Path, tmp_path: Path) -> None:
    """Breaks when a layer's cache, mask or index is on another device than the layer; with one
    GPU the last layer is offloaded to the CPU instead."""
    last: Any = torch.cuda.device_count() - 1 or "cpu"
    device_map = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0}
    device_map |= dict.fromkeys(["model.layers.1", "model.layers.2", "model.norm", "lm_head"], last)
    model = load(tiny_llama, device_map=device_map, offload_folder=str(tmp_path))
    assert model.num_stages == min(2, torch.cuda.device_count())
    check_ragged(model, tiny_llama)
    check_ragged(load(tiny_llama, device_map="auto"), tiny_llama)


def test_submitting_waits_for_no_device(tiny_llama: Path) -> None:
    """Breaks when something in a forward makes the host wait: sharded devices would take turns."""
    last = torch.cuda.device_count() - 1
    device_map = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0}
    device_map |= dict.fromkeys(["model.layers.1", "model.layers.2", "model.norm", "lm_head"], last)
    model = load(tiny_llama, device_map=device_map)
    model.num_stages = 2  # with one device too: nothing may wait there either
    engine = VerifierEngine(model)
    prompts = {i: TEXT[: 20 + i] for i in range(4)}
    opens = tuple(VerifyOpen(i, SamplingParams(), 128) for i in prompts)
    engine.verify(0, VerifyBatch(0, opens=opens))
    rows = [VerifyRow(i, 0, tuple(prompt), (5, 6)) for i, prompt in prompts.items()]
    engine.verify(0, VerifyBatch(1, tuple(rows)))
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = [VerifyBatch(2, tuple(rows[:2])), VerifyBatch(3, tuple(rows[2:]))]
        submitted = [engine.submit(0, batch) for batch in batches]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    verdicts = [verdict for each in submitted for verdict in engine.complete(each).verdicts]
    expected = truth(load_reference(tiny_llama))
    for verdict, prompt in zip(verdicts, prompts.values(), strict=True):
        assert verdict.token_ids[0] == expected(prompt, 1)[0].argmax().item()


def test_throughput(tmp_path: Path) -> None:
    """Prints forwards per second of a 100M-parameter bf16 model; breaks only by failing to run."""
    path = save_tiny(
        "llama", tmp_path, tokenizer=False, std=0.02, hidden_size=768, intermediate_size=2048,
        num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4, head_dim=64,
        vocab_size=32000, max_position_embeddings=4096,
    )  # fmt: skip
    model = load(path, dtype="bfloat16", device_map={"": 0}, max_length=2048, max_sequences=32)
    rng = random.Random(0)
    for sequence in range(32):
        model.open(sequence)
        for start in (0, 512):
            tokens = [rng.randrange(32000) for _ in range(512)]
            model.forward([Row(sequence, start, tokens, 0)])
    for num_rows, count in ((1, 1), (1, 5), (8, 1), (8, 5), (32, 1), (32, 5)):
        rows = [Row(s, 1024, [rng.randrange(32000)] * count, count) for s in range(num_rows)]
        model.forward(rows)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(20):
            model.forward(rows)
        torch.cuda.synchronize()
        each_ms = (time.perf_counter() - started) / 20 * 1e3
        print(f"{num_rows} rows x {count} tokens at 1024: {each_ms:.2f} ms", flush=True)
