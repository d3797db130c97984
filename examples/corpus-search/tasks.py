"""Tasks of the corpus search: the world of a split becomes rows of tasks.jsonl.

Four families. "direct": one document tells, and for half of the kinds its snippet tells already. "two_hop": the first
document names what to search for next. "outdated": an older count stands in the search before the newest, which alone
counts. "distractor": a relative of the same surname stands in the search before the one who is asked for.

Knows nothing of the agent or of the policy.

    python tasks.py --split held_out --seed 1 --n 300
"""

import argparse
import json
import random
from collections.abc import Iterator
from itertools import cycle, islice
from typing import NamedTuple

import corpus

QUESTIONS = {
    "founded": ("In which year was {} founded?", "When was {} founded?"),
    "built": ("In which year was {} built?", "When was {} built?"),
    "works": ("In which town does {} work?", "Where does {} work?"),
    "builder": ("By whom was {} built?", "Who built {}?"),
    "people": ("How many people live in {}?", "How many people does {} have?"),
    "founded_where_works": ("In which year was the town founded where {} works?", "When was the town of {} founded?"),
    "builder_works": ("In which town does the builder of {} work?", "Where does the builder of {} work?"),
    "called": ("In which town does the {} work?", "Where does the {} work?"),
}
"""Wordings by kind of question."""

FAMILIES = ("direct", "two_hop", "outdated", "distractor")
QUOTA = (*("direct", "two_hop", "outdated") * 2, "direct", "two_hop", "direct", "distractor")
"""The families of ten rows."""


class Fact(NamedTuple):
    """What can be asked about."""

    family: str
    kind: str
    about: str
    """What the question names."""
    answer: str
    via: str | None = None
    """What the first of two documents names. None: one hop is enough."""


def facts(world: corpus.World) -> Iterator[Fact]:
    """Everything that can be asked about a world."""
    towns = {town.name: town for town in world.towns}
    for town in world.towns:
        yield Fact("direct", "founded", town.name, str(town.founded))
        yield Fact("direct" if town.before is None else "outdated", "people", town.name, str(town.people))
    for person in world.people:
        yield Fact("direct", "works", person.name, person.town)
        yield Fact("two_hop", "founded_where_works", person.name, str(towns[person.town].founded), via=person.town)
    for _, person in world.relatives:
        yield Fact("distractor", "called", person.call, person.town)
    for machine in world.machines:
        yield Fact("direct", "built", machine.name, str(machine.built))
        yield Fact("direct", "builder", machine.name, machine.builder.name)
        yield Fact("two_hop", "builder_works", machine.name, machine.builder.town, via=machine.builder.name)


def facts_in_turn(world: corpus.World, rng: random.Random) -> Iterator[Fact]:
    """Facts without end, in the order of QUOTA; each of a family comes once before any comes again."""
    known = list(facts(world))
    rng.shuffle(known)
    by_family = {family: cycle([fact for fact in known if fact.family == family]) for family in FAMILIES}
    for family in cycle(QUOTA):
        yield next(by_family[family])


def row(fact: Fact, wording: str, *, id: str, split: str) -> dict:
    """One row of tasks.jsonl."""
    return {
        "id": id,
        "input": {"messages": [{"role": "user", "content": wording.format(fact.about)}]},
        "reference": fact.answer,
        "split": split,
        "metadata": {"family": fact.family, "kind": fact.kind},
    }


def tasks(split: str, seed: int, n: int) -> list[dict]:
    """The first n rows of a split; a longer list begins with a shorter one."""
    rng = random.Random(f"tasks {split} {seed}")
    known = facts_in_turn(corpus.world(split, seed), rng)
    return [
        row(fact, rng.choice(QUESTIONS[fact.kind]), id=f"{split}-{seed}-{at}", split=split)
        for at, fact in enumerate(islice(known, n))
    ]


def main() -> None:
    """Print the rows that the command line asks for."""
    parser = argparse.ArgumentParser(description="Print tasks of the corpus search, one JSON object a line.")
    parser.add_argument("--split", choices=("train", "held_out"), required=True)
    parser.add_argument("--seed", type=int, default=1, help="that of the corpus")
    parser.add_argument("--n", type=int, default=100, help="how many")
    options = parser.parse_args()
    for task in tasks(options.split, options.seed, options.n):
        print(json.dumps(task))


if __name__ == "__main__":
    main()
