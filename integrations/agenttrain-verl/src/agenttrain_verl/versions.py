"""Which veRL is spoken to, and whether it is installed: an error before Ray starts, not a traceback in an actor.

Only what is installed is asked, nothing is imported: veRL's import takes seconds and fails without its extras.
"""

from __future__ import annotations

from importlib import metadata

from agenttrain.errors import PluginError
from packaging.specifiers import SpecifierSet
from packaging.version import Version

SUPPORTED = {
    "verl": SpecifierSet("==0.9.1"),
    "TransferQueue": SpecifierSet(">=0.1.10,<0.2"),
    "tensordict": SpecifierSet("==0.10.0"),
    "ray": SpecifierSet(">=2.41,<3"),
    "transformers": SpecifierSet(">=5.5.3,<5.11,!=5.6.0"),
    "cachetools": SpecifierSet(">=5"),
    "fastapi": SpecifierSet(">=0.115"),
    "uvicorn": SpecifierSet(">=0.30"),
}
"""Distributions without which veRL's trainer with agent loops can't be imported, to their accepted versions.

veRL is taken exactly: agenttrain overrides and patches methods of it that are no interface. tensordict stands at the
one version that both veRL's metadata and its list_of_dict_to_tensordict accept.
"""
TESTED = {"verl": "0.9.1", "TransferQueue": "0.1.11", "tensordict": "0.10.0", "ray": "2.60.0", "transformers": "5.10.4"}
INSTALL = (
    'pip install "agenttrain-verl[verl]" (in a clone: '
    'pip install -c constraints.txt -e . -e "integrations/agenttrain-verl[verl]")'
)


def installed(name: str) -> str | None:
    """The version of a distribution. None: it isn't installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_versions() -> None:
    """Hold what is installed against what is supported.

    Raises:
        PluginError: something is missing or of another version; it names all of them.
    """
    if wrong := [fault for name, accepted in SUPPORTED.items() if (fault := _fault(name, accepted))]:
        raise PluginError(f"The trainer 'verl' can't start: {'; '.join(wrong)}. Install what it needs: {INSTALL}.")


def _fault(name: str, accepted: SpecifierSet) -> str | None:
    version = installed(name)
    if version is None:
        return f"{name} is not installed ({accepted} is needed)"
    if not accepted.contains(Version(version), prereleases=True):
        return f"{name} is {version}, and {accepted} is needed"
    return None
