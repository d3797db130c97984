"""The mark a plugin puts on its hook implementations: `@hookimpl`."""

from __future__ import annotations

import pluggy

hookimpl = pluggy.HookimplMarker("agenttrain")
hookspec = pluggy.HookspecMarker("agenttrain")
