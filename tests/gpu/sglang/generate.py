"""Token ids that a served model gives: generate.py engine|http|server MODEL RESULT PORT JSON-OF-ARGUMENTS.

`engine` is sgl.Engine with its own scheduler process, `http` the server as a user starts it, `server` the
same with arguments that no flag gives.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import starting

#: asked one after the other: which of two come together would be chance, and with it the order of sums
PROMPTS = [[(11 * i + 5) % 1000 for i in range(40)], [(13 * i + 1) % 1000 for i in range(33)]]
OPTIONS: dict[str, Any] = {
    "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
    "return_logprob": True,
}
#: seconds that a server may take to be up
PATIENCE = 180


def engine(arguments: dict[str, Any]) -> Any:
    """All prompts, two times, by the engine."""
    import sglang

    served = sglang.Engine(**arguments)
    try:
        return [[served.generate(input_ids=prompt, **OPTIONS) for prompt in PROMPTS] for _ in range(2)]
    finally:
        served.shutdown()


def http(arguments: dict[str, Any]) -> Any:
    """The same, by the server and its command line."""
    flags = [flag for key, value in arguments.items() for flag in flag_of(key, value)]
    return asked(["-m", "sglang.launch_server", *flags], arguments["port"])


def server(arguments: dict[str, Any]) -> Any:
    """The same, by a server started from Python."""
    return asked([__file__, "serve", json.dumps(arguments)], arguments["port"])


def serve(arguments: str) -> None:
    """What `server` starts."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    launch_server(ServerArgs(**json.loads(arguments)))


def asked(command: list[str], port: int) -> Any:
    """What a server answers to all prompts, two times."""
    with subprocess.Popen([sys.executable, *command]) as server:
        try:
            address = f"http://127.0.0.1:{port}"
            wait(server, f"{address}/health")
            request = f"{address}/generate"
            return [[post(request, {"input_ids": p, **OPTIONS}) for p in PROMPTS] for _ in range(2)]
        finally:
            server.terminate()


def flag_of(key: str, value: Any) -> list[str]:
    """An argument on the command line."""
    name = "--" + key.replace("_", "-")
    return [name] if value is True else [name, str(value)]


def wait(server: subprocess.Popen[bytes], address: str) -> None:
    """Until the server answers."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.3)
    raise SystemExit(f"the server is not up, its exit status is {server.poll()}")


def post(address: str, document: Any) -> Any:
    """What a server answers."""
    request = urllib.request.Request(
        address, json.dumps(document).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


def main(kind: str, model: str, result: str, port: str, more: str) -> None:
    """Serve, ask, write down."""
    begin = time.monotonic()
    arguments = {"model_path": model, "port": int(port), **starting.ARGUMENTS, **json.loads(more)}
    answers = {"engine": engine, "http": http, "server": server}[kind](arguments)
    told = [
        {
            "ids": [one["output_ids"] for one in answer],
            "logprobs": [[step[0] for step in one["meta_info"]["output_token_logprobs"]] for one in answer],
        }
        for answer in answers
    ]
    Path(result).write_text(json.dumps(told))
    print(f"{kind} {model}: {told[0]['ids']} after {time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    serve(sys.argv[2]) if sys.argv[1] == "serve" else main(*sys.argv[1:])
