"""The corpus: a seed becomes a made-up world of towns, people and machines, and short documents that tell of it.

Not every document can be taken at its word. An old count of a town's people names the newer one, and the relative of
somebody has their surname and stands in a search before them.

Invariant: names are split by hash, so whatever a held-out question names is named in no training question. Knows
nothing of the agent or of the policy.

    python corpus.py --seed 1 > corpus.jsonl
"""

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import islice, product
from typing import NamedTuple

# fmt: off
PLACES = (
    "Port", "Upper", "Lower", "North", "South", "East", "West", "Old",
    "New", "Great", "Little", "High", "Long", "Stone", "White", "Green",
)
STEMS = (
    "Elm", "Ash", "Ford", "Marsh", "Haven", "Mill", "Field", "Moor", "Bay", "Cliff", "Lake", "Glen",
    "Grove", "Heath", "Ridge", "Vale", "Wick", "Cross", "Creek", "Dale", "Fen", "Gate", "Holm", "Spring",
)
WOMEN = ("Ada", "Bea", "Cora", "Dora", "Eva", "Fay", "Gwen", "Hope", "Ida", "June", "Kate", "Lena")
MEN = ("Abel", "Ben", "Carl", "Dan", "Emil", "Finn", "Gus", "Hal", "Ian", "Jack", "Karl", "Leo")
SURNAMES = (
    "Brook", "Cole", "Drake", "Finch", "Frost", "Gale", "Hale", "Hart", "Hill", "Hunt", "Kerr", "Lamb",
    "Lane", "Moss", "Nash", "Page", "Pike", "Reed", "Rook", "Shaw", "Snow", "Vane", "Webb", "Wren",
    "Bell", "Cobb", "Dove", "Flint", "Grey", "Nott", "Stark", "Thorn",
)
TRADES = (
    "baker", "cooper", "dyer", "farmer", "glazier", "joiner",
    "mason", "miller", "potter", "saddler", "tanner", "weaver",
    "barber", "carter", "gilder", "tailor",
)
MACHINES = ("Loom", "Pump", "Press", "Crane", "Lathe", "Kiln")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
# fmt: on
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"


class Town(NamedTuple):
    """A town and how many live there."""

    name: str
    founded: int
    people: int
    counted: int
    """The year of the newest count."""
    before: int | None
    """How many people an older count found. None: there is no older count."""


class Person(NamedTuple):
    """Somebody who works in a town."""

    given: str
    surname: str
    trade: str
    town: str

    @property
    def name(self) -> str:
        """Such as Ada Brook."""
        return f"{self.given} {self.surname}"

    @property
    def call(self) -> str:
        """Such as baker Brook: nobody else in a world is called so."""
        return f"{self.trade} {self.surname}"


class Machine(NamedTuple):
    """A machine and who built it when."""

    name: str
    built: int
    builder: Person


class World(NamedTuple):
    """All that the documents tell of one split."""

    towns: list[Town]
    people: list[Person]
    relatives: list[tuple[Person, Person]]
    """Somebody, and whose relative they are: one of `people`, of the same surname and another trade."""
    machines: list[Machine]


class Sizes(NamedTuple):
    """How many of each there are in a world."""

    towns: int = 75
    twice_counted: int = 60
    people: int = 60
    relatives: int = 25
    machines: int = 40


SIZES = Sizes()
"""Those of corpus.jsonl."""


@cache
def is_held_out(name: str) -> bool:
    """Whether a name belongs to the held-out questions: a quarter of them do."""
    return hashlib.sha256(name.encode()).digest()[0] < 64


def world(split: str, seed: int, sizes: Sizes = SIZES) -> World:
    """The world of a split, the same for the same arguments; none of its names occurs in the other split's."""
    rng = random.Random(f"{split} {seed}")
    names = _shuffled((f"{place} {stem}" for place, stem in product(PLACES, STEMS)), split, rng)
    towns = [_town(name, rng) for name in names[: sizes.towns]]
    towns = [town._replace(before=None) if at >= sizes.twice_counted else town for at, town in enumerate(towns)]
    strangers = _strangers(split, towns, rng)
    people = [next(strangers) for _ in range(sizes.people)]
    relatives = list(islice(_relatives(people, list(strangers)), sizes.relatives))
    numbers = (f"{kind} {letter}{n}" for kind, letter, n in product(MACHINES, LETTERS, range(10, 100)))
    machines = [
        Machine(name, rng.randint(1850, 1989), rng.choice(people))
        for name in _shuffled(numbers, split, rng)[: sizes.machines]
    ]
    return World(towns, people, relatives, machines)


def _shuffled(names: Iterable[str], split: str, rng: random.Random) -> list[str]:
    """The names of a split in a random order."""
    own = [name for name in names if is_held_out(name) == (split == "held_out")]
    rng.shuffle(own)
    return own


def _town(name: str, rng: random.Random) -> Town:
    people, before = rng.sample(range(200, 1000), 2)
    return Town(name, rng.randint(1300, 1849), people, rng.randint(2006, 2025), before)


def _strangers(split: str, towns: list[Town], rng: random.Random) -> Iterator[Person]:
    """People of a split in a random order: no name and no call twice."""
    calls = dict.fromkeys(_shuffled((f"{t} {s}" for t, s in product(TRADES, SURNAMES)), split, rng))
    for name in _shuffled((f"{given} {surname}" for given, surname in product(WOMEN + MEN, SURNAMES)), split, rng):
        given, surname = name.split()
        call = next((call for call in calls if call.endswith(f" {surname}")), None)
        if call is not None:
            del calls[call]
            yield Person(given, surname, call.split()[0], rng.choice(towns).name)


def _relatives(people: list[Person], strangers: list[Person]) -> Iterator[tuple[Person, Person]]:
    """(a stranger of the same surname, somebody) for everybody for whom there is one left."""
    for person in people:
        found = next((other for other in strangers if other.surname == person.surname), None)
        if found is not None:
            strangers.remove(found)
            yield found, person


def texts(world: World, next_id: Callable[[], str], rng: random.Random) -> Iterator[tuple[str, str]]:
    """(id, text) of every document about a world."""
    for town in world.towns:
        yield next_id(), f"{town.name} was founded in {town.founded}. Market day is {rng.choice(DAYS)}."
        newest = next_id()
        yield newest, f"{town.name} has {town.people} people, counted in {town.counted}."
        if town.before is not None:
            year = town.counted - rng.randint(8, 40)
            old = f"{town.name} has {town.before} people, counted in {year}."
            yield next_id(), f"{old} Newer count of {town.name}: {newest}."
    for person in world.people:
        yield next_id(), f"{person.name} is a {person.trade}. {_pronoun(person)} works in {person.town}."
    for person, of in world.relatives:
        kin = "aunt" if person.given in WOMEN else "uncle"
        who = f"{person.name}, {kin} of the {of.call}, is a {person.trade}."
        yield next_id(), f"{who} {_pronoun(person)} works in {person.town}."
    for machine in world.machines:
        yield next_id(), f"{machine.name} was built in {machine.built} by {machine.builder.name}."


def _pronoun(person: Person) -> str:
    return "She" if person.given in WOMEN else "He"


def documents(worlds: list[World], seed: int) -> dict[str, str]:
    """Id to text of every document about some worlds, in a random order that the seed gives."""
    rng = random.Random(seed)
    ids = iter(rng.sample(range(100, 1000), 900))
    pairs = [pair for world in worlds for pair in texts(world, lambda: f"D{next(ids)}", rng)]
    return dict(sorted(pairs))


def main() -> None:
    """Print the corpus of both splits."""
    parser = argparse.ArgumentParser(description="Print the corpus, one JSON object a line.")
    parser.add_argument("--seed", type=int, default=1, help="another seed gives another corpus")
    seed = parser.parse_args().seed
    for id, text in documents([world("train", seed), world("held_out", seed)], seed).items():
        print(json.dumps({"id": id, "text": text}))


if __name__ == "__main__":
    main()
