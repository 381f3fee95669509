"""A small HTTP server: POST /generate streams text as it comes, GET /metrics is for Prometheus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import generate_latest
from tokenizers.decoders import DecodeStream

import selective_compile as sc
from selective_compile import tiny_model
from selective_compile.runtime import EngineMetrics

# Not all that `Engine.submit` takes is for whoever reaches a port, as is whose cached prefixes one shares.
OPTIONS = {"prompt", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "seed", "stop_strings", "regex"}


@contextmanager
def serving(port: int = 8000, compile: bool = True) -> Iterator[ThreadingHTTPServer]:
    """Whoever enters calls `serve_forever`; port 0: any that is free."""
    model, tokenizer = tiny_model.load()
    engine = sc.Engine(model, sc.EngineConfig(compile=compile))
    engine.warm_up()
    metrics = EngineMetrics(engine)

    class Handler(BaseHTTPRequestHandler):
        timeout = 60  # seconds for a body to come, and for a reader to read

        def do_POST(self) -> None:  # each in a thread of its own; the engine batches them
            try:
                body: Any = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)))
                if not isinstance(body, dict) or not {"prompt"} <= body.keys() <= OPTIONS:
                    raise ValueError(f"a request must be an object with a prompt, of {sorted(OPTIONS)}")
                request = engine.submit(tokenizer(body.pop("prompt")).input_ids, tokenizer=tokenizer, **body)
            except (ValueError, TypeError, RecursionError) as error:
                return self.send_error(400, explain=str(error))
            text = DecodeStream(skip_special_tokens=True)  # a character may take several tokens
            try:
                self.send_response(200)
                self.end_headers()
                for token in request:
                    self.wfile.write((text.step(tokenizer.backend_tokenizer, token) or "").encode())
            except OSError:
                request.cancel()  # its reader has gone
            except RuntimeError as error:  # the engine has ended it
                self.log_error("%s", error)

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(generate_latest(metrics.registry))

    with engine.running(), ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        try:
            yield server
        finally:
            engine.cancel_all()  # who reads would else compute the rest


if __name__ == "__main__":
    with serving() as server:
        print('curl -N localhost:8000/generate -d \'{"prompt": "letters a to m:", "max_new_tokens": 60}\'')
        server.serve_forever()
