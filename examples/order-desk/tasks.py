"""Tasks of the order desk: a seed and a split become rows of tasks.jsonl.

A task is a question about one order and the small world that answers it: the order's item and quantity, the item's
price and stock, and what stands in the way. An order may be merged into another, an item may be listed under an SKU,
and a tool may time out at its first call.

Invariant: order ids (those merged into as well) and items are split by hash, so a held-out task never names one that a
training task names. Knows nothing of the agent or of the policy.

    python tasks.py --split train --seed 1 --n 3
"""

import argparse
import hashlib
import json
import random
from collections.abc import Callable
from typing import NamedTuple

# fmt: off
ADJECTIVES = (
    "red", "blue", "green", "black", "white", "gray", "oak", "pine",
    "steel", "brass", "glass", "clay", "small", "large", "round", "square",
)
NOUNS = (
    "lamp", "desk", "chair", "mug", "rope", "vase", "clock", "shelf",
    "stool", "frame", "bowl", "tray", "plate", "hook", "bench", "crate",
    "fan", "jar", "box", "cart", "bell", "drum", "kite", "lens",
)
# fmt: on
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
"""First letters of order ids: without I and O, which look like digits."""

QUESTIONS = {
    "total": (
        "What is the total price of order {order}?",
        "How much does order {order} cost in total?",
        "Total cost for {order}, please.",
    ),
    "left": (
        "How many units are left in stock after order {order} ships?",
        "What stock remains once {order} has shipped?",
        "Units remaining after shipping {order}?",
    ),
    "unit": (
        "What is the unit price of the item in order {order}?",
        "Price of one unit of what {order} contains?",
        "How much is a single unit from order {order}?",
    ),
    "stock": (
        "How many units of the item in order {order} are in stock?",
        "Current stock of what {order} contains?",
        "What is the stock level for the item of order {order}?",
    ),
}
"""Wordings by kind of question."""

LOOKUP = {"total": "get_price", "unit": "get_price", "left": "get_stock", "stock": "get_stock"}
"""The tool that a kind needs after get_order."""


class Odds(NamedTuple):
    """How often things stand in the way of an answer, each from 0 to 1."""

    merged: float
    listed: float
    timeout: float
    """For each of the three lookups."""


ODDS = Odds(merged=0.19, listed=0.11, timeout=0.045)


def is_held_out(entity: str) -> bool:
    """Whether an order id or an item belongs to the held-out tasks: a quarter of them do."""
    return hashlib.sha256(entity.encode()).digest()[0] < 64


def order_id(rng: random.Random) -> str:
    """An order id such as B407, of either split."""
    return rng.choice(LETTERS) + str(rng.randint(100, 999))


def item(rng: random.Random) -> str:
    """An item such as 'red lamp', of either split."""
    return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"


def sku(rng: random.Random) -> str:
    """An SKU such as 'SKU 4471'. SKUs are common to both splits."""
    return f"SKU {rng.randint(1000, 9999)}"


def draw(entity: Callable[[random.Random], str], rng: random.Random, *, split: str) -> str:
    """The first entity drawn that belongs to the split."""
    while is_held_out(drawn := entity(rng)) != (split == "held_out"):
        pass
    return drawn


def answer(kind: str, world: dict) -> int:
    """The number that answers a kind of question in a world."""
    return {
        "total": world["qty"] * world["price"],
        "left": world["stock"] - world["qty"],
        "unit": world["price"],
        "stock": world["stock"],
    }[kind]


def n_errors(kind: str, world: dict) -> int:
    """How many kinds of error (merged, listed, timeout) stand on the shortest way to the answer: 0 to 3."""
    timed_out = {"get_order", LOOKUP[kind]} & set(world["timeouts"])
    return (world["merged"] is not None) + (world["sku"] is not None) + bool(timed_out)


def task(split: str, seed: int, index: int, odds: Odds = ODDS) -> dict:
    """One row of tasks.jsonl, the same for the same arguments; its `context` is what the tools see."""
    rng = random.Random(f"{split} {seed} {index}")
    kind = rng.choice(list(QUESTIONS))
    qty = rng.randint(2, 19)
    world = {
        "order": draw(order_id, rng, split=split),
        "item": draw(item, rng, split=split),
        "qty": qty,
        "price": rng.randint(11, 99),
        "stock": qty + rng.randint(5, 80),
        "merged": draw(order_id, rng, split=split) if rng.random() < odds.merged else None,
        "sku": sku(rng) if rng.random() < odds.listed else None,
        "timeouts": [name for name in ("get_order", "get_price", "get_stock") if rng.random() < odds.timeout],
    }
    question = rng.choice(QUESTIONS[kind]).format(order=world["order"])
    return {
        "id": f"{split}-{seed}-{index}",
        "input": {"messages": [{"role": "user", "content": question}]},
        "reference": answer(kind, world),
        "split": split,
        "metadata": {"kind": kind, "errors": n_errors(kind, world)},
        "context": world,
    }


def main() -> None:
    """Print the rows that the command line asks for."""
    parser = argparse.ArgumentParser(description="Print tasks of the order desk, one JSON object a line.")
    parser.add_argument("--split", choices=("train", "held_out"), required=True)
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other tasks")
    parser.add_argument("--n", type=int, default=100, help="how many")
    options = parser.parse_args()
    for index in range(options.n):
        print(json.dumps(task(options.split, options.seed, index)))


if __name__ == "__main__":
    main()
