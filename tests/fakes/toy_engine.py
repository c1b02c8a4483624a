"""The engine of docs/how-to/add-an-engine.md: says its model's name, word for word, over HTTP."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--listen", "--weights", "--name", "--slots", "--context", "--threads"):
        parser.add_argument(flag)
    given = parser.parse_args()
    with open(given.weights, "rb") as weights:
        if weights.read(4) != b"GGUF":
            sys.exit("these are no weights")
    key = os.environ["TOY_KEY"]
    made = [0]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def log_message(self, format: str, *args: object) -> None:
            sys.stderr.write(format % args + "\n")

        def answer(self, status: int, body: str, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body.encode())

        def do_GET(self) -> None:
            if self.path == "/health":
                return self.answer(200, "{}")
            if self.path == "/metrics":
                return self.answer(200, f"toy_tokens_total {made[0]}\n", "text/plain")
            if self.headers.get("Authorization") != f"Bearer {key}":
                return self.answer(401, "{}")
            return self.answer(200, json.dumps({"data": [{"id": given.name, "owned_by": "toy-engine"}]}))

        def do_POST(self) -> None:
            wish = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.headers.get("Authorization") != f"Bearer {key}":
                return self.answer(401, "{}")
            words = [f"toy{number} " for number in range(wish.get("max_tokens") or 4)]
            made[0] += len(words)
            usage = {"prompt_tokens": len(wish["prompt"].split()), "completion_tokens": len(words)}
            last = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": usage}
            if not wish.get("stream"):
                last["choices"][0]["text"] = "".join(words)  # type: ignore[index]
                return self.answer(200, json.dumps(last))
            events = [{"choices": [{"index": 0, "text": word}]} for word in words] + [last]
            body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
            return self.answer(200, f"{body}data: [DONE]\n\n", "text/event-stream")

    host, _, port = given.listen.partition(":")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    server = ThreadingHTTPServer((host, int(port)), Handler)
    sys.stderr.write("listening\n")
    sys.stderr.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
