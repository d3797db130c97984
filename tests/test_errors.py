import builtins
import pickle
import re

import pytest

from agenttrain import errors

OWN = [value for value in vars(errors).values() if isinstance(value, type) and value.__module__ == errors.__name__]
ROW = re.compile(r"^(?P<indent>[ │├└─]*)(?P<name>\w+)(?: +\((?P<builtin>\w+)\))?")


def drawn_tree() -> dict[str, tuple[str | None, str | None]]:
    """Class name to (class above, built-in type), as the docstring draws it."""
    assert errors.__doc__ is not None
    lines = [line.removeprefix("    ") for line in errors.__doc__.splitlines() if line.startswith("    ")]
    tree: dict[str, tuple[str | None, str | None]] = {}
    above: dict[int, str] = {}
    for line in lines:
        row = ROW.match(line)
        assert row is not None
        depth = len(row["indent"]) // 4
        tree[row["name"]] = (above[depth - 1] if depth else None, row["builtin"])
        above[depth] = row["name"]
    return tree


def real_tree() -> dict[str, tuple[str | None, str | None]]:
    """The same from the classes; the root of ours is an Exception, which the docstring needs not say."""
    tree: dict[str, tuple[str | None, str | None]] = {}
    for error in OWN:
        ours = [base.__name__ for base in error.__bases__ if base in OWN]
        builtin = [base.__name__ for base in error.__bases__ if base not in OWN]
        tree[error.__name__] = (ours[0] if ours else None, builtin[0] if builtin else None)
    tree["AgenttrainError"] = (None, None)
    return tree


def test_the_tree_in_the_docstring_is_the_real_one() -> None:
    """Every class, under its own, with its built-in type, in the order they are defined."""
    assert list(drawn_tree().items()) == list(real_tree().items())


@pytest.mark.parametrize("error", OWN, ids=lambda error: error.__name__)
def test_an_error_crosses_processes_with_its_message(error: type[BaseException]) -> None:
    """Workers send them; class and text arrive."""
    sent = error("runs/x can't be read. Name a run.")
    arrived = pickle.loads(pickle.dumps(sent))
    assert (type(arrived), str(arrived)) == (error, "runs/x can't be read. Name a run.")


@pytest.mark.parametrize("name", drawn_tree())
def test_an_error_is_also_its_built_in_type(name: str) -> None:
    """Code that knows nothing of agenttrain catches it as what it is."""
    builtin = drawn_tree()[name][1] or "Exception"
    assert issubclass(getattr(errors, name), getattr(builtins, builtin))


def test_catching_the_root_catches_ours_and_nothing_else() -> None:
    """All but what users raise and what ends a rollout from inside."""
    outside = {error.__name__ for error in OWN if not issubclass(error, errors.AgenttrainError)}
    assert outside == {"PolicyFailure", "RolloutStop"}


def test_an_agents_own_handler_lets_the_end_of_a_rollout_pass() -> None:
    """`except Exception` in a node doesn't swallow it."""
    assert not issubclass(errors.RolloutStop, Exception)
    assert issubclass(errors.PolicyFailure, Exception)


def test_every_class_says_what_it_is() -> None:
    """One line each."""
    assert all(error.__doc__ for error in OWN)
