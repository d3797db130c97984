"""Which versions of SGLang are spoken to, and which one is tested."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

TESTED = "0.5.23"
"""What `agenttrain sglang setup` installs, and the tests run against."""
SUPPORTED = SpecifierSet(">=0.5.12,<0.6", prereleases=True)


def is_supported(version: object) -> bool:
    """Whether servers of that version are spoken to; False for what is no version.

    Example: is_supported("0.5.23.post1") -> True, is_supported("0.4.9") -> False
    """
    try:
        return Version(str(version)) in SUPPORTED
    except InvalidVersion:
        return False
