"""layout.py: what of the machine is seen, each once, and a working directory that holds none of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from agenttrain.errors import SandboxError
from agenttrain.sandbox.layout import layout


def test_what_lies_in_something_seen_is_not_seen_twice(tmp_path: Path) -> None:
    """And what isn't there is left out; links are resolved on the machine and stand where they stood."""
    data = tmp_path / "data"
    (data / "in").mkdir(parents=True)
    (tmp_path / "link").symlink_to(data)
    seen = layout((str(data / "in"), str(data), str(tmp_path / "none"), str(tmp_path / "link"), "/usr/bin"))
    ours = [bind for bind in seen.binds if bind[1].startswith(str(tmp_path))]
    assert ours == [(os.path.realpath(data), str(data)), (os.path.realpath(data), str(tmp_path / "link"))]
    assert [target for _, target in seen.binds if target.startswith("/usr")] == ["/usr"]


@pytest.mark.parametrize("visible", ["/", "/sandbox/data"])
def test_nothing_is_seen_where_the_sandboxs_own_files_are(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One place in every sandbox, whatever the machine has there."""
    monkeypatch.setattr(os.path, "exists", lambda path: True)
    with pytest.raises(SandboxError, match=rf"^{visible} can't be seen in a sandbox, whose own files are in /sandbox"):
        layout((visible,))


def test_this_python_is_found_by_its_name() -> None:
    """In a folder of PATH that is seen."""
    seen = layout()
    first = seen.env["PATH"].split(":")[0]
    assert os.path.exists(f"{first}/python") or (f"{first}/python", sys.executable) in seen.links
    assert any(sys.executable.startswith(f"{target}/") for _, target in seen.binds)
    assert seen.env | {"PATH": ""} == {"PATH": "", "HOME": "/tmp", "LANG": "C.UTF-8", "TMPDIR": "/tmp"}


def test_secrets_of_etc_are_not_seen() -> None:
    """Users are made up, and names are looked up as the machine does only with its network."""
    targets = [target for _, target in layout().binds]
    assert not {"/etc", "/etc/passwd", "/etc/shadow", "/etc/ssl", "/etc/resolv.conf"} & set(targets)
    assert "root:x:0:0" in dict(layout().files)["/etc/passwd"]
    with_network = [target for _, target in layout(network=True).binds]
    assert ("/etc/resolv.conf" in with_network) == os.path.exists("/etc/resolv.conf")
