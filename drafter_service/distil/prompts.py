"""The built-in prompts of `forerun distil`: what the target is asked for its training text.

Templates over subjects, in eight classes that take turns, so that any beginning of the list is as
mixed as the whole. The list is the same on every machine. `HELD_OUT` was written by hand and shares
no wording with it: acceptance is measured there. Knows nothing of models and tokens.
"""

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from core.errors import InvalidRequestError
from drafter_service.distil.templates import CLASSES, SLOTS, WORD_CLASSES

#: So many prompts come from the lists above before words take over.
_NUM_LISTED = 1280
#: Forty prompts that no training text begins with: chat, stories, explanations, lists, code.
HELD_OUT = (
    "My neighbour plays the drums every evening. What could I say to him without a quarrel?",
    "I feel tired every afternoon at work. What might help?",
    "Is it better to shower in the morning or before bed?",
    "What would be a nice gift for someone who already has everything?",
    "Hello! I just finished my first day at a new school and I am not sure how it went.",
    "How can I tell whether a watermelon is ripe?",
    "Do you think people will ever live under water?",
    "What is a polite way to leave a party early?",
    "Write a short story about a tailor who sews a coat out of fog.",
    "Tell me a tale in which the winter refuses to end and a small bird finds out why.",
    "Write a story that begins with the words: Nobody had used the elevator since Tuesday.",
    "Invent a fable about a snail that wants to win a race.",
    "Write a ghost story that takes place in a bakery and ends happily.",
    "Tell a story about twins who swap places for one day at the circus.",
    "Write about a postman who delivers a parcel to the wrong planet.",
    "A violin is found in the belly of a shark. Write the story of how it got there.",
    "Explain how a refrigerator keeps food cold.",
    "How do noise-cancelling headphones remove sound?",
    "Why does ice float on water, and what would happen if it did not?",
    "Explain what a mortgage is to somebody who has never borrowed money.",
    "How does a sundial show the time?",
    "What happens in the body when we get a fever?",
    "Explain how GPS finds the position of a phone.",
    "Why did the dodo die out?",
    "List eight things to check before driving a long distance.",
    "Give me six names for a sailing boat and a reason for each.",
    "What are nine words that describe the smell of rain?",
    "List the steps for changing a flat tyre.",
    "Name twelve animals that are awake at night.",
    "Give me a packing list for a weekend at a lake with two small children.",
    "List seven uses for old newspapers.",
    "What are some good questions to ask a grandfather about his youth?",
    "Write a Python function that returns the longest word of a sentence.",
    "Write a JavaScript function that shuffles an array.",
    "Write Python code that counts the lines of all text files in a folder.",
    "Write a C program that prints a triangle of stars.",
    "How do I read a JSON file in Python and print one of its fields?",
    "Write a Python class for a bank account with deposit and withdraw.",
    "Write an SQL query that finds the three customers who spent the most.",
    "Write a Python function that turns a Roman numeral into an integer.",
)


def built_in(words: Sequence[str] = (), seed: int = 0) -> Iterator[str]:
    """The built-in prompts in an order of the seed's, each once, some 20,000 at least.

    `words`: of the target's vocabulary; without any, all prompts are made of the lists here.
    """
    rng = random.Random(seed)
    subjects = {slot: text.split("|") for slot, text in SLOTS.items()}
    seen: set[str] = set()
    yield from _filled(CLASSES, subjects, rng, seen, _NUM_LISTED if words else 1 << 30)
    if words:
        subjects["word"] = list(words)
        yield from _filled(WORD_CLASSES, subjects, rng, seen, 1 << 30)


def _filled(
    classes: dict[str, str],
    subjects: dict[str, list[str]],
    rng: random.Random,
    seen: set[str],
    count: int,
) -> Iterator[str]:
    """Up to `count` prompts that were not `seen`; fewer when new ones become rare."""
    templates = [text.split("|") for text in classes.values()]
    misses = 0
    while misses < 1000:
        for options in templates:
            prompt = rng.choice(options)
            for slot in subjects:
                while f"{{{slot}}}" in prompt:  # one by one: two persons are two
                    prompt = prompt.replace(f"{{{slot}}}", rng.choice(subjects[slot]), 1)
            misses += 1
            if prompt not in seen:
                misses = 0
                seen.add(prompt)
                yield prompt
                count -= 1
                if count == 0:
                    return


def whole_words(tokens: Iterable[str]) -> list[str]:
    """The lower-case words of 4 to 12 letters among a vocabulary's decoded tokens, in its order."""
    found = (token.strip() for token in tokens if token.startswith(" "))
    return [word for word in dict.fromkeys(found) if re.fullmatch("[a-z]{4,12}", word)]


def read_prompts(path: Path) -> list[str]:
    """A file's prompts, one a line; empty lines and repetitions are left out.

    Raises InvalidRequestError for a file that cannot be read or holds none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError("prompts", f"{path}: {error}") from error
    prompts = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not prompts:
        raise InvalidRequestError("prompts", f"{path} holds no prompt")
    return prompts
