"""The benchmark's prompts, written for it.

CHAT is open talk, where prompt lookup finds what the text itself repeats. GROUNDED are summaries,
edits and extractions whose answers say again what the prompt says (also with a model as small as
the embedded one, which does not copy everything that it is told to). MIXED takes half of each, in
turns. These lists are eight tasks long: one batch. EXTRACTIONS ask for JSON.
"""

from typing import Final

CHAT: Final = (
    "Tell me a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain to a child why the sky is blue and why it turns red in the evening.",
    "List ten things to pack for a week of hiking in the mountains, each with its reason.",
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "What are the differences between a virus and a bacterium? Answer in a few paragraphs.",
    "Write a friendly e-mail that invites my colleagues to a picnic in the park on Saturday.",
    "Describe step by step how to bake a simple loaf of bread at home.",
    "Give me advice on learning to play the guitar as an adult with little time.",
)

_HARBOUR = """\
The harbour of Vessby was built in 1821, when the old landing place had silted up. Two stone
piers, each 240 metres long, protect it from the westerly storms. Until 1905 its trade was
salted herring, which went to Hamburg and Riga in oak barrels. When the herring stayed away,
the town council bought a steam dredger, deepened the basin to six metres, and leased the
northern quay to a shipyard. The shipyard built 112 coastal steamers before it closed in 1958.
Today the harbour has 85 berths for sailing boats, a fish market on Thursdays, and a museum in
the former barrel store. The museum shows the tools of the coopers, a model of the steam
dredger, and the log books of the harbour masters."""

_BEES = """\
Bumblebees live in small colonies of fifty to four hundred animals. In spring the queen, who
has slept through the winter under leaves or in loose soil, looks for a nest: an empty mouse
hole, a bird box, or a tuft of dry grass. She builds a pot of wax and fills it with nectar, so
that she can stay on her first eggs when it rains. After three weeks the first workers hatch
and take over the search for pollen and nectar. Because bumblebees warm their flight muscles by
shivering, they fly at five degrees, when honeybees still stay at home. In late summer the
colony raises young queens and drones. The old queen, the workers and the drones die with the
first frost; only the young queens survive."""

_MINUTES = """\
Minutes of the meeting of the garden association, 14 March. Present: Anna Berg, Tomas Lind,
Priya Nair, Oskar Holm. The water pump by plot 12 is broken again; Tomas Lind will ask two
firms for an offer by 1 April. The compost area will be moved behind the tool shed; Priya Nair
will draw a plan and show it at the next meeting. The yearly fee stays at 60 euros per plot.
Anna Berg will write to the members who have not paid yet. The summer party is on 21 June;
Oskar Holm will borrow tables and benches from the fire brigade. The next meeting is on 11
April at seven in the tool shed."""

_CODE = """\
def load_orders(path):
    orders = []
    with open(path) as file:
        for line in file:
            customer, product, count, price = line.strip().split(";")
            orders.append((customer, product, int(count), float(price)))
    return orders

def total_by_customer(orders):
    totals = {}
    for customer, product, count, price in orders:
        totals[customer] = totals.get(customer, 0.0) + count * price
    return totals

def print_totals(totals):
    for customer in sorted(totals):
        print(customer, round(totals[customer], 2))"""

_CATALOGUE = """\
The Falcon 300 is a folding bicycle with 20 inch wheels, eight gears and a weight of 11.9
kilograms; it costs 849 euros. The Falcon 500 has 20 inch wheels, eleven gears and a weight of
10.8 kilograms; it costs 1,190 euros. The Heron 200 is a city bicycle with 28 inch wheels,
seven gears and a weight of 16.4 kilograms; it costs 599 euros. The Heron 400 Electric has 28
inch wheels, eight gears, a motor of 250 watts and a weight of 22.7 kilograms; it costs 2,350
euros. The Wren 100 is a bicycle for children with 16 inch wheels, one gear and a weight of 6.2
kilograms; it costs 279 euros."""

GROUNDED: Final = (
    f"{_HARBOUR}\n\nSummarise the text above in its own words and sentences, in the same order.",
    f"{_BEES}\n\nRepeat the text above, but leave out the last sentence.",
    f"{_MINUTES}\n\nList each task in the minutes above: who will do what, and until when.",
    f"{_CODE}\n\nRename `orders` to `purchases` in the code above and write out the whole code.",
    f"{_CATALOGUE}\n\nExtract every bicycle from the text above, one a line, with all its figures.",
    f"{_HARBOUR}\n\nRepeat the text above, with `Vessby` replaced by `Ostvik`.",
    f"{_CODE}\n\nAdd a docstring to each function in the code above and write out the whole code.",
    f"{_MINUTES}\n\nExtract everything in the minutes above that Tomas Lind and Anna Berg will do.",
)

MIXED: Final = tuple(task for pair in zip(CHAT[:4], GROUNDED[:4], strict=True) for task in pair)

_FIELDS = "a JSON array of objects with the fields name, text, number and kind"

EXTRACTIONS: Final = tuple(
    f"{text}\n\nWrite {what} from the text above as {_FIELDS}."
    for text, what in (
        (_HARBOUR, "all ships, buildings and goods"),
        (_BEES, "all animals and places"),
        (_MINUTES, "all people and what they will do"),
        (_CATALOGUE, "all bicycles"),
    )
)
