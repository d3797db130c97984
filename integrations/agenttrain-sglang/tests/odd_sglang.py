"""A small server that speaks as much of SGLang's HTTP as a run needs, starts in no time, and misbehaves as it is told.

Started in place of SGLang's Python by an environment folder that a test writes: `bin/python` runs this file. What it
does is read again for each request from how.json in that folder. It draws ids from (seed, position) and has no weights:
their name is all that it keeps.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FOLDER, ARGUMENTS = Path(sys.argv[1]), sys.argv[2:]
STATE: dict[str, Any] = {"weight_version": "default", "sampled": 0, "adapters": set(), "aborted": set(), "broken": 0}
LOCK = threading.Lock()


def how() -> dict[str, Any]:
    """What the test wants now.

    start_s: until it listens; end: words that it ends with at its start; health_s: until it says that it is well;
    breaks: connections of calls that break before an answer; token_s: per sampled id; answer: (status, body) of each
    call, or fields that replace those of its answers.
    """
    try:
        return dict(json.loads((FOLDER / "how.json").read_text()))
    except ValueError:
        return {}


def argument(name: str) -> str:
    return ARGUMENTS[ARGUMENTS.index(name) + 1]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/health":
            time.sleep(how().get("health_s", 0.0))
            self.say(200, {})
        elif self.path == "/server_info":
            self.say(200, server_info())
        elif self.path == "/model_info":
            told = {"model_path": argument("--model-path"), "model_type": "qwen3"}
            self.say(200, {**told, "weight_version": STATE["weight_version"]})
        elif self.path == "/metrics":
            self.say(200, f"sglang:generation_tokens_total {STATE['sampled']}\n")
        else:
            self.say(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.path == "/generate":
            self.generate(body)
        elif self.path == "/weights_checker":
            self.say(404, {"detail": "Not Found"})
        else:
            if (status := how().get("update", 200)) != 200 and self.path == "/update_weights_from_tensor":
                self.say(status, {"message": "no room for them"})
                return
            if self.path == "/load_lora_adapter_from_tensors":
                STATE["adapters"].add(body["lora_name"])
            if self.path == "/unload_lora_adapter":
                STATE["adapters"].discard(body["lora_name"])
            if self.path == "/abort_request":
                STATE["aborted"].add(body["rid"])
            name = body.get("weight_version") or body.get("new_version")
            if name is not None and not how().get("stuck"):
                STATE["weight_version"] = name
            self.say(200, {"success": True})

    def generate(self, body: dict[str, Any]) -> None:
        if STATE["broken"] < how().get("breaks", 0):
            STATE["broken"] += 1
            self.close_connection = True
            return
        wanted, sampling = how().get("answer", {}), body["sampling_params"]
        if body.get("lora_path") not in (None, *STATE["adapters"]):
            self.say(400, {"error": {"message": f"{body['lora_path']} is not loaded"}})
            return
        version, n = STATE["weight_version"], sampling["max_new_tokens"]
        first = len(body["input_ids"])
        ids = [(sampling["sampling_seed"] * 31 + i * 7) % 300 for i in range(first, first + n)]
        done = sampled(n, body["rid"], how().get("token_s", 0.0))
        is_aborted, ids, n = done < n, ids[:done], done
        with LOCK:
            STATE["sampled"] += n
        if isinstance(wanted, list):
            self.say(*wanted)
            return
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": "abort"} if is_aborted else {"type": "length", "length": n},
            "prompt_tokens": first,
            "weight_version": version,
            "output_token_logprobs": [[-3.5, id, None] for id in ids],
            "cached_tokens": 0,
        }
        self.say(
            200, {"output_ids": wanted.get("output_ids", ids), "meta_info": {**meta, **wanted.get("meta_info", {})}}
        )

    def say(self, status: int, content: Any) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())
        except OSError:
            pass  # the caller is gone

    def log_message(self, *_: object) -> None:
        pass


def sampled(n: int, rid: str, token_s: float) -> int:
    """How many of n ids were sampled until the call was aborted."""
    for done in range(n):
        if rid in STATE["aborted"]:
            return done
        time.sleep(token_s)
    return n


def server_info() -> dict[str, Any]:
    told = {"version": "0.5.23", "dtype": "float32", "device": "cpu", "tp_size": 1, "max_req_input_len": 500}
    return told | {"enable_deterministic_inference": True} | how().get("server_info", {})


class Listening(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


if __name__ == "__main__":
    time.sleep(how().get("start_s", 0.0))
    if end := how().get("end"):
        sys.exit(end)
    Listening(("127.0.0.1", int(argument("--port"))), Handler).serve_forever()
