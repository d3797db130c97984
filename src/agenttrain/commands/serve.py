"""`agenttrain serve`: an OpenAI-compatible address over a policy, until it is ended."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agenttrain.commands.arguments import STOPPED, CommandEnded, Engine, Json, print_json, work
from agenttrain.errors import ConfigError

if TYPE_CHECKING:
    from agenttrain.serving.attached import Serving

LOOPBACK = ("127.0.0.1", "::1", "localhost")
CLOSES_IN_S = 15.0
"""How long a policy may take to be unloaded: its engine's process gets 10 seconds."""


def serve_command(
    run: Annotated[str, typer.Argument(help="A run's id or path, the folder of a policy, or promoted.", metavar="RUN")],
    host: Annotated[str, typer.Option("--host", help="Where it listens; 0.0.0.0 for every interface.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 picks a free one.")] = 8000,
    name: Annotated[str | None, typer.Option("--name", help="Of the model in /v1/models; RUN unless given.")] = None,
    strict_model: Annotated[bool, typer.Option("--strict-model", help="Refuse requests for other models.")] = False,
    api_key_env: Annotated[
        str | None, typer.Option("--api-key-env", help="Variable with the key that clients have to send.")
    ] = None,
    most_open: Annotated[int, typer.Option("--most-open", min=1, help="Requests in work at one time.")] = 256,
    drain_s: Annotated[
        float, typer.Option("--drain-s", min=0, help="Seconds that requests in work get once it is to end.")
    ] = 10.0,
    engine: Engine = None,
    json: Json = False,
) -> int:
    """Serve a policy as an OpenAI-compatible address, until Ctrl-C (exit 130) or SIGTERM (exit 0)."""
    from agenttrain.address.app import Address, Settings
    from agenttrain.address.server import answer_until_ended, listening, url_of
    from agenttrain.exporters import exporting, wanted_exporter
    from agenttrain.serving.attached import open_serving

    key = _key(api_key_env)
    exporter, serving = wanted_exporter(), open_serving(run, engine=engine)
    settings = Settings(name=name or model_name(run, serving), key=key, strict_model=strict_model, most_open=most_open)
    with listening(host, port) as sock:
        url = url_of(sock)
        _say(f"loading {run}; {url.removesuffix('/v1')}/health tells when it is ready")
        if host not in LOOPBACK and settings.key is None:
            _say(f"note: whoever reaches {host} may use it. Name a variable with a key: --api-key-env VAR")
        ready = False

        def tell() -> None:
            nonlocal ready
            ready = True
            _say(f"serving {run} at {url}\n  OPENAI_BASE_URL={url} OPENAI_API_KEY={_key_hint(api_key_env)}")
            if json:
                print_json({"address": url, "name": settings.name, **serving.describe()})

        try:
            with exporting(exporter, Path(run).name), work():
                ended = answer_until_ended(Address(serving, settings), sock, drain_s=drain_s, on_ready=tell)
        finally:
            _close(serving)
    return _exit_code(ended, ready=ready)


def model_name(run: str, serving: Serving) -> str:
    """As /v1/serving and the answers name who serves; a ledger, in which that changes, by its own name."""
    told = serving.describe()
    return str(told["serves"]) if told["promotion"] is None else Path(run).name


def _exit_code(ended: signal.Signals, *, ready: bool) -> int:
    """0 after SIGTERM, by which servers are ended; 130 after Ctrl-C."""
    code = STOPPED if ended is signal.SIGINT else 0
    if not ready:
        raise CommandEnded(code, "ServerStopped", f"{ended.name} came before the policy was loaded.")
    return code


def _close(serving: Any) -> None:
    """Unload the policy; one that still loads is left to the end of the process."""
    import threading

    closing = threading.Thread(target=serving.close, name="agenttrain-close", daemon=True)
    closing.start()
    closing.join(CLOSES_IN_S)


def _key(variable: str | None) -> str | None:
    from agenttrain.config import environment

    if variable is None:
        return None
    key = environment(variable)
    if not key:
        raise ConfigError(f"--api-key-env {variable}: that variable is not set. export {variable}=… holds the key.")
    return key


def _key_hint(variable: str | None) -> str:
    return "unused" if variable is None else f"${variable}"


def _say(text: str) -> None:
    typer.echo(text, err=True)
