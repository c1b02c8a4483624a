"""A fake llama-server, run as a real child process: healthy by default, broken in the way a test asks for.

    python engine.py --host 127.0.0.1 --port 8080 -m MODEL --alias NAME [llama-server's flags] [--fake-KNOB V]

The knobs are the fields of `knobs.Knobs`; they come from flags (``--fake-load-time 2``) and, below those, as
JSON from the variable FAKE_ENGINE (``{"load_time": 2}``), so that a profile's `env` can set them.
The key comes from LLAMA_API_KEY. Answers, log lines, statuses and exit codes are those that llama-server
b11434 was seen to give. The standard library is enough.

Beside llama-server's own paths, without a key:
    GET  /fake/stats   pid, launch, knobs, children, counts, slots in use, the last request
    POST /fake/do      any of: {"set": {knob: value}}  {"crash": SIGNAL}  {"exit": CODE}  {"freeze": true}
                       {"child": KIND}  {"say": [LINES]}

asyncio is imported only once it is going to serve, so that questions and failures are answered in no time.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import faults
import knobs as table

if TYPE_CHECKING:
    import asyncio

    from http1 import Connection, Request

HELP = """----- common params -----

-h,    --help, --usage                  print usage and exit
--version                               show version and build info
-c,    --ctx-size N                     size of the prompt context (default: 0, 0 = loaded from model)
-m,    --model FNAME                    model path to load
--list-devices                          print list of available devices and exit

----- server-specific params -----

-a,    --alias STRING                   set model name aliases
--host HOST                             ip address to listen
--port PORT                             port to listen
-np,   --parallel N                     number of server slots
--metrics                               enable prometheus compatible metrics endpoint
"""
VERSION = "version: 0.6.0-dev (build 0, commit unknown)\nbuilt with GNU 12.2.0 for Linux x86_64\n"
TEMPLATE = "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endfor -%}"


class Engine:
    """One fake engine that serves."""

    def __init__(self, options: table.Options, knobs: table.Knobs, launch: int, key: str) -> None:
        import asyncio
        import random

        self.options, self.knobs, self.launch, self.key = options, knobs, launch, key
        self.ready = False
        self.changed = asyncio.Event()  # replaced whenever a knob is set
        self.ended = asyncio.Event()
        self.free = asyncio.Semaphore(options.slots)
        self.waiting = 0
        self.slots: list[dict[str, Any] | None] = [None] * options.slots
        self.counts = dict.fromkeys(
            ("requests", "completions", "finished", "cancelled", "tokens", "prompt", "peak"), 0
        )
        self.children: list[int] = []
        self.last: dict[str, Any] = {}
        self.started = time.time()
        self.noise = random.Random(knobs.seed)
        self.connections: set[Connection] = set()
        self.server: asyncio.Server | None = None

    @property
    def name(self) -> str:
        return self.knobs.model_id or self.options.alias or os.path.basename(self.options.model)

    @property
    def slot_context(self) -> int:
        return self.options.context // self.options.slots

    def log(self, text: str, level: str = "I") -> None:
        faults.log(text, level, jsonl=self.options.jsonl)

    # -- life ------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Load, serve until stopped, and return the exit code."""
        import asyncio

        if self.knobs.ignore_term:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.block = faults.ballast(self.knobs.memory)
        self._later(self.knobs.exit_from == "start")
        self.log("srv  llama_server: initializing ...")
        if not self.knobs.load_refuse and not await self.listen():
            return 1
        for kind in self.knobs.children:
            self.child(kind)
        flood = asyncio.create_task(self.flood())
        await self.load()
        if self.knobs.load_refuse and not await self.listen():
            return 1
        self.ready = True
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            if not (self.knobs.ignore_term and number == signal.SIGTERM):
                loop.add_signal_handler(number, self.ended.set)
        self.log("srv  llama_server: model loaded")
        self.log(f"srv  llama_server: listening on http://{self.options.host}:{self.options.port}")
        self._later(self.knobs.exit_from == "ready")
        await self.ended.wait()
        self.log("srv    operator(): operator(): cleaning up before exit...")
        flood.cancel()
        assert self.server is not None
        self.server.close()
        await asyncio.sleep(self.knobs.stop_time)
        return self.knobs.stop_code

    def _later(self, now: bool) -> None:
        import asyncio

        if now and self.knobs.exit_after >= 0:
            asyncio.get_running_loop().call_later(self.knobs.exit_after, faults.end, self.knobs.exit_code)

    async def listen(self) -> bool:
        """Bind and listen; a taken port, real or pretended, is reported as by the real one."""
        import asyncio

        host, port = self.options.host, self.options.port
        try:
            if self.knobs.port_taken < 0 or self.launch <= self.knobs.port_taken:
                raise OSError("pretended")
            self.server = await asyncio.start_server(self.client, host, port + self.knobs.port_shift)
        except OSError:
            self.log(
                f"srv         start: couldn't bind HTTP server socket, hostname: {host}, port: {port}", "E"
            )
            self.log("srv    operator(): operator(): cleaning up before exit...")
            self.log("srv  llama_server: exiting due to HTTP server error", "E")
            return False
        return True

    async def load(self) -> None:
        """Take `load_time`, with stages in the log at equal intervals and the work asked for."""
        import asyncio

        loop, knobs = asyncio.get_running_loop(), self.knobs
        self.log(f"srv    load_model: loading model '{self.options.model}'")
        started, told = loop.time(), 0
        step = faults.work(knobs.load_work, self.options.model)
        while (passed := loop.time() - started) < knobs.load_time:
            while told < int(passed / knobs.load_time * (knobs.load_lines + 1)):
                told += 1
                self.log(f"load_tensors: stage {told} of {knobs.load_lines}")
            next(step)
            await asyncio.sleep(0.005)
        for stage in range(told, knobs.load_lines):  # what a machine that was busy has skipped
            self.log(f"load_tensors: stage {stage + 1} of {knobs.load_lines}")

    async def flood(self) -> None:
        """Write `log_rate` bytes a second into the log, as long as it is asked for."""
        import asyncio

        loop = asyncio.get_running_loop()
        while True:
            if not self.knobs.log_rate:
                await self.change()
                continue
            started = loop.time()
            faults.raw(faults.flood(self.knobs.log_rate, self.knobs.log_kind, 0.05))
            await asyncio.sleep(max(0.0, started + 0.05 - loop.time()))

    def child(self, kind: str) -> int:
        """Fork a child that stays."""
        keep = [socket.fileno() for socket in self.server.sockets] if self.server else []
        if "sockets" in kind.split("+"):
            keep += [c.writer.get_extra_info("socket").fileno() for c in self.connections]
        pid = faults.spawn(kind, keep)
        self.children.append(pid)
        return pid

    async def change(self) -> None:
        """Wait until a knob is set."""
        await self.changed.wait()

    # -- requests --------------------------------------------------------------------------------------

    async def client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        import asyncio

        from http1 import BadRequest, Connection, Gone

        connection = Connection(reader, writer)
        self.connections.add(connection)
        try:
            while connection.open:
                request = await connection.request()
                answer = asyncio.create_task(self.route(connection, request))
                left = asyncio.create_task(connection.gone.wait())
                await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
                left.cancel()
                if not answer.done():
                    answer.cancel()  # the client left: its slot is free at once
                    await asyncio.wait({answer})
                    break
                answer.result()
        except (Gone, BadRequest, ValueError) as error:
            if not isinstance(error, Gone):
                import contextlib

                with contextlib.suppress(Gone):
                    await connection.refuse(400, str(error))
        finally:
            self.connections.discard(connection)
            await connection.close()

    async def route(self, c: Connection, request: Request) -> None:
        """Answer one request."""
        from completion import complete

        path, knobs = request.path, self.knobs
        if path.startswith("/fake/"):
            return await self.control(c, request)
        self.counts["requests"] += 1
        hidden = {k: v for k, v in request.headers.items() if k != "authorization"}
        if path not in {"/health", "/v1/health"}:
            self.last = {"path": path, "headers": hidden, "body": request.body.decode(errors="replace")}
        if path in {"/health", "/v1/health"} and knobs.health == "hang":
            while self.knobs.health == "hang":
                await self.change()
        if not self.ready:
            return await c.refuse(503, "Loading model")
        if path in {"/health", "/v1/health"}:
            return await (
                c.answer(200, {"status": "ok"}) if self.knobs.health == "ok" else c.refuse(500, "not well")
            )
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.key and self.key not in {given, request.headers.get("x-api-key")}:
            self.log("srv    operator(): unauthorized: Invalid API Key", "W")
            return await c.refuse(401, "Invalid API Key")
        if request.method == "GET":
            return await self.get(c, path)
        if path in {"/v1/completions", "/v1/chat/completions"}:
            return await complete(self, c, request)
        if path in {"/tokenize", "/detokenize", "/apply-template"}:
            return await self.texts(c, request)
        return await c.refuse(404, "File Not Found")

    async def get(self, c: Connection, path: str) -> None:
        """Answer what is only read."""
        n_ctx = self.slot_context
        if path in {"/v1/models", "/models"}:
            entry = {"id": self.name, "object": "model", "created": int(self.started), "owned_by": "llamacpp"}
            meta = {
                "n_vocab": 262144,
                "n_ctx": n_ctx,
                "n_ctx_train": 32768,
                "n_params": 268098176,
                "size": 246587904,
            }
            models = [
                {"name": self.name, "model": self.name, "type": "model", "capabilities": ["completion"]}
            ]
            return await c.answer(200, {"models": models, "object": "list", "data": [entry | {"meta": meta}]})
        if path == "/props":
            settings = {"params": {"temperature": 0.8, "seed": 4294967295}, "n_ctx": n_ctx}
            props = {"default_generation_settings": settings, "total_slots": self.options.slots}
            props |= {
                "model_alias": self.options.alias,
                "model_path": self.options.model,
                "build_info": "b0-unknown",
            }
            props |= {
                "chat_template": TEMPLATE,
                "bos_token": "<bos>",
                "eos_token": "<eos>",
                "is_sleeping": False,
            }
            return await c.answer(200, props)
        if path == "/slots":
            return await c.answer(
                200,
                [
                    {"id": i, "n_ctx": n_ctx, "speculative": False, "is_processing": job is not None}
                    | (job or {})
                    for i, job in enumerate(self.slots)
                ],
            )
        if path == "/metrics" and self.options.metrics:
            values = {
                "prompt_tokens_total": self.counts["prompt"],
                "tokens_predicted_total": self.counts["tokens"],
                "n_decode_total": self.counts["tokens"],
                "requests_processing": sum(job is not None for job in self.slots),
                "requests_deferred": self.waiting,
            }
            kinds = {name: "counter" if name.endswith("total") else "gauge" for name in values}
            text = "".join(f"# TYPE llamacpp:{k} {kinds[k]}\nllamacpp:{k} {v}\n" for k, v in values.items())
            return await c.answer(200, text, "text/plain; version=0.0.4")
        if path == "/metrics":
            return await c.refuse(
                501, "This server does not support metrics endpoint. Start it with `--metrics`"
            )
        return await c.refuse(404, "File Not Found")

    async def texts(self, c: Connection, request: Request) -> None:
        """Tokenize, detokenize, apply the chat template."""
        import json

        body = json.loads(request.body or b"{}")
        if request.path == "/tokenize":
            ids = ([2] if body.get("add_special") else []) + table.word_ids(body["content"])
            return await c.answer(200, {"tokens": ids})
        if request.path == "/detokenize":
            base = table.token_id(0)
            return await c.answer(
                200, {"content": "".join(table.token_text(i - base) for i in body["tokens"])}
            )
        turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in body["messages"])
        return await c.answer(200, {"prompt": turns + "<|im_start|>assistant\n"})

    async def control(self, c: Connection, request: Request) -> None:
        """Answer the tests."""
        import asyncio
        import json

        if request.path == "/fake/stats":
            stats = {
                "pid": os.getpid(),
                "launch": self.launch,
                "knobs": self.knobs.as_dict(),
                "last": self.last,
            }
            stats |= {
                "children": self.children,
                "busy": sum(job is not None for job in self.slots),
                **self.counts,
            }
            return await c.answer(200, stats)
        done: dict[str, Any] = {}
        for order, value in json.loads(request.body).items():
            match order:
                case "set":
                    self.knobs = self.knobs.having(value)
                    before, self.changed = self.changed, asyncio.Event()
                    before.set()
                case "say":
                    faults.raw("".join(f"{line}\n" for line in value).encode())
                case "child":
                    done["pid"] = self.child(value)
                case "crash" | "exit":
                    code = -int(value) if order == "crash" else int(value)
                    asyncio.get_running_loop().call_later(0.01, faults.end, code)  # once this is answered
                case "freeze":
                    asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), signal.SIGSTOP)
                case _:
                    raise ValueError(f"fake engine: no order {order!r}")
        return await c.answer(200, done)


def main(argv: list[str]) -> int:
    """Answer at once what needs no server, else serve."""
    try:
        options, knobs, launch = table.parse(argv, os.environ)
    except ValueError as error:
        faults.raw(f"{error}\n".encode())
        return 1
    if {"-h", "--help", "--usage"} & set(argv):
        faults.raw(HELP.encode(), 1)
        return 0
    if "--version" in argv:
        faults.raw(VERSION.encode())
        return 0
    if "--list-devices" in argv:
        faults.raw(f"Available devices:\n{knobs.list_devices}\n".encode(), 1)
        return 0
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.alarm(knobs.life)
    faults.raw("".join(f"{line}\n" for line in knobs.say).encode())
    if knobs.exit_after == 0 and knobs.exit_from == "start":
        faults.end(knobs.exit_code)
    sys.modules["ssl"] = None  # type: ignore[assignment]  # asyncio does without, and imports 15 ms sooner
    import asyncio

    async def serve() -> int:
        return await Engine(options, knobs, launch, os.environ.get("LLAMA_API_KEY", "")).run()

    return asyncio.run(serve())


if __name__ == "__main__":
    faults.end(main(sys.argv[1:]))  # without the interpreter's goodbyes: a grandchild must not delay it
