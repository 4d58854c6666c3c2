"""Rows whose tokens stand side by side, against the stock model run on each branch alone.

Windows are 16 tokens, so that branches cross them.
"""

import random
from dataclasses import dataclass, field

import pytest
import torch

from core.errors import InvalidRequestError
from core.model import RaggedModel, Row
from core.tree import Node
from tests.test_families import TOLERANCE, load, truth
from tests.tiny_models import VOCAB_SIZE, TinyFactory, load_reference


@dataclass
class Slot:
    """What a sequence's slot holds: plain tokens, and each node with the text that ends in it."""

    plain: list[int]
    nodes: list[Node] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)

    def grow(self, rng: random.Random, sequence: int, count: int) -> tuple[Row, list[list[int]]]:
        """A row of `count` random nodes behind random others, and the text of each."""
        position = len(self.plain) + len(self.nodes)
        added: list[list[int]] = []
        for index in range(position, position + count):
            places = [(Node(n), self.plain[:n]) for n in range(len(self.plain) + 1)[-5:]]
            places += zip(self.nodes, self.texts, strict=True)
            parent, text = rng.choice(places)
            self.nodes.append(parent.child(index))
            self.texts.append([*text, rng.randrange(VOCAB_SIZE)])
            added.append(self.texts[-1])
        row = Row(sequence, position, [t[-1] for t in added], count, self.nodes[-count:])
        return row, added

    def keep(self, choice: int) -> Node:
        """Make one node's text the plain one."""
        node, self.plain = self.nodes[choice], self.texts[choice]
        self.nodes, self.texts = [], []
        return node


def check(model: RaggedModel, rows: list[Row], texts: list[list[int]], expected) -> None:
    """Every wanted token's logits are those of its text alone; greedy choices are the same."""
    logits = model.forward(rows)
    wanted = torch.cat([expected(text, 1) for text in texts])
    assert (logits - wanted).abs().max().item() < TOLERANCE
    assert torch.equal(logits.argmax(-1), wanted.argmax(-1))
    model.cache.check()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma2", "gpt_oss", "gemma3n_text"])
def test_a_branch_has_the_logits_of_its_text_alone(kind: str, tiny: TinyFactory) -> None:
    """Breaks when a node sees what stands beside it, misses an ancestor, or has a wrong position or
    window: trees that grow over several forwards, beside plain rows and other trees; one branch
    is kept, moved, and goes on as plain text."""
    path = tiny(kind)
    model, expected, rng = load(path), truth(load_reference(path)), random.Random(3)
    slots = {s: Slot([rng.randrange(VOCAB_SIZE) for _ in range(n)]) for s, n in enumerate((30, 4))}
    for sequence, slot in slots.items():
        model.open(sequence)
        model.forward([Row(sequence, 0, slot.plain, 0)])
    model.open(2)
    plain: list[int] = []
    for counts in ((3, 5), (1, 1), (7, 2), (34, 3)):
        rows, texts = [], []
        for (sequence, slot), count in zip(slots.items(), counts, strict=True):
            row, added = slot.grow(rng, sequence, count)
            rows.append(row)
            texts += added
        plain += (new := [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 4))])
        rows.append(Row(2, len(plain) - len(new), new, 1))
        check(model, rows, [*texts, plain], expected)
    for sequence, slot in slots.items():
        model.cache.keep(sequence, slot.keep(rng.choice([20, 30, -1]) % len(slot.nodes)))
        assert list(model.cache.token_ids(sequence)) == slot.plain
    for slot in slots.values():
        slot.plain.append(7)
    rows = [Row(s, len(slot.plain) - 1, [7], 1) for s, slot in slots.items()]
    check(model, rows, [slot.plain for slot in slots.values()], expected)


def test_nodes_behind_nothing_and_alone(tiny: TinyFactory) -> None:
    """Breaks when a tree without plain tokens in front of it sees none or everything, in a long
    row that is attended alone and in a short one."""
    path = tiny("llama")
    model, expected, rng = load(path), truth(load_reference(path)), random.Random(4)
    model.open(0)
    slot = Slot([])
    for count in (40, 3):
        row, texts = slot.grow(rng, 0, count)
        check(model, [row], texts, expected)


def test_a_slot_moves_with_its_nodes(tiny: TinyFactory) -> None:
    """Breaks when closing a neighbour moves a slot's plain tokens only."""
    path = tiny("llama")
    model, expected, rng = load(path), truth(load_reference(path)), random.Random(5)
    slots = {s: Slot([rng.randrange(VOCAB_SIZE) for _ in range(9)]) for s in range(3)}
    for sequence, slot in slots.items():
        model.open(sequence)
        model.forward([Row(sequence, 0, slot.plain, 0)])
    for num_left in (3, 2, 1):
        rows, texts = [], []
        for sequence, slot in slots.items():
            row, added = slot.grow(rng, sequence, 4)
            rows.append(row)
            texts += added
        check(model, rows, texts, expected)
        model.close(gone := sorted(slots)[num_left // 2])
        del slots[gone]


def test_cutting_forgets_all_nodes(tiny: TinyFactory) -> None:
    """Breaks when a plain row is put behind the nodes of an abandoned tree."""
    path = tiny("llama")
    model, expected, rng = load(path), truth(load_reference(path)), random.Random(6)
    slot = Slot([1, 2, 3, 4])
    model.open(0)
    model.forward([Row(0, 0, slot.plain, 0)])
    for _ in range(2):
        row, texts = slot.grow(rng, 0, 6)
        check(model, [row], texts, expected)
        model.truncate(0, 3)
        slot = Slot([1, 2, 3])
    check(model, [Row(0, 3, [9], 1)], [[1, 2, 3, 9]], expected)


def test_the_same_in_bf16_as_far_as_bf16_goes(tiny: TinyFactory) -> None:
    """Breaks when the path with fixed bits, which cuts rows into blocks and reads keys in steps,
    shows a node too much or too little."""
    path = tiny("mistral")
    model, expected = load(path, dtype="bfloat16"), truth(load_reference(path))
    rng, slot = random.Random(7), Slot([rng_token % VOCAB_SIZE for rng_token in range(5, 200, 7)])
    model.open(0)
    model.forward([Row(0, 0, slot.plain, 0)])
    for count in (3, 40, 6):
        row, texts = slot.grow(rng, 0, count)
        logits = model.forward([row])
        wanted = torch.cat([expected(text, 1) for text in texts])
        assert (logits - wanted).abs().mean().item() < 0.1


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (Row(0, 3, [1], 1, [Node(2, (3,))]), "not behind all 4"),
        (Row(0, 4, [1], 1, [Node(2, (5,))]), "is at another"),
        (Row(0, 4, [1], 1, [Node(5, (4,))]), "plain tokens that are not there"),
        (Row(0, 4, [1], 1, [Node(2, (3, 4))]), "plain tokens that are not there"),
        (Row(0, 4, [1, 2], 1, [Node(2, (4,)), Node(2, (4, 4, 5))]), "behind a later one"),
        (Row(0, 4, [1, 2], 1, [Node(2, (4,))]), "2 tokens have as many"),
    ],
)
def test_impossible_trees_are_refused(row: Row, problem: str, tiny: TinyFactory) -> None:
    """A wrong index would read another text's keys, or none, without a word."""
    model = load(tiny("llama"))
    model.open(0)
    model.forward([Row(0, 0, [1, 2, 3, 4], 0)])
    with pytest.raises(InvalidRequestError, match=problem):
        model.forward([row])
    assert model.length(0) == 4
