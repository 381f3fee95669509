"""A small HTTP server: POST /generate streams text as it comes, GET /metrics is for Prometheus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from signal import SIGTERM, default_int_handler, signal

from prometheus_client import generate_latest
from tokenizers.decoders import DecodeStream

import selective_compile as sc
from selective_compile import tiny_model

# Not all that `Engine.submit` takes is for whoever reaches a port, as is whose cached prefixes one shares.
OPTIONS = {"prompt", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "seed", "stop_strings", "regex"}


@contextmanager
def serving(port: int = 8000, compile: bool = True) -> Iterator[ThreadingHTTPServer]:
    """Whoever enters calls `serve_forever`; port 0: any that is free."""
    model, tokenizer = tiny_model.load()
    engine = sc.Engine(model, sc.EngineConfig(compile=compile))
    engine.warm_up()
    metrics = sc.runtime.EngineMetrics(engine)

    class Server(ThreadingHTTPServer):
        request_queue_size = 1024  # clients that come at one moment; the system turns away those beyond

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # text comes in chunks: who did not get the last one knows that some is missing
        timeout = 60  # seconds for a body to come, and for a reader to read
        begun = False  # the answer

        def handle(self) -> None:  # one request a connection: what nobody read of it is not taken for another
            with suppress(OSError):  # the client has gone
                self.handle_one_request()
                self.rfile.read(0 if self.begun else 1 << 24)  # left unread, it may undo the answer, an error

        def do_POST(self) -> None:  # each in a thread of its own; the engine batches them
            if self.requestline != "POST /generate HTTP/1.1":
                return self.send_error(404)
            try:
                if not 0 <= (length := int(self.headers["Content-Length"] or 0)) <= 1 << 20:  # 1 MiB
                    return self.send_error(413)
                body = json.loads(self.rfile.read(length))
                if not (isinstance(body, dict) and isinstance(body.get("prompt"), str) and body.keys() <= OPTIONS):
                    raise ValueError(f"a request must be an object with a prompt, a string, of {sorted(OPTIONS)}")
                request = engine.submit(tokenizer(body.pop("prompt")).input_ids, tokenizer=tokenizer, **body)
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                return self.send_error(400, explain=str(error))
            text = DecodeStream(skip_special_tokens=True)  # a character may take several tokens
            try:
                for token in request if self.server.fileno() >= 0 else ():  # closed: too late for `cancel_all`
                    if piece := text.step(tokenizer.backend_tokenizer, token):
                        self.send_chunks(piece.encode())
            except RuntimeError as error:  # the engine has ended it
                self.log_error("%s", error)
            finally:
                request.cancel()  # unless it has finished, its reader has gone
            if request.finish_reason in ("stop", "length"):
                self.send_chunks(b"")
            elif not self.begun:
                self.send_error(500 if request.error else 503, explain=request.error)

        def do_GET(self) -> None:
            if self.requestline != "GET /metrics HTTP/1.1":
                return self.send_error(404)
            self.send_chunks(generate_latest(metrics.registry), b"")

        def send_chunks(self, *texts: bytes) -> None:
            if not self.begun:
                self.begun = True
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; charset=utf-8")
                self.send_header("Transfer-Encoding", "chunked")
                self.send_header("Connection", "close")
                self.end_headers()
            self.wfile.write(b"".join(b"%x\r\n%b\r\n" % (len(text), text) for text in texts))  # b"" is the last

    with engine.running(), Server(("127.0.0.1", port), Handler) as server:
        try:
            yield server
        finally:
            server.server_close()
            engine.cancel_all()  # who reads would else compute the rest


def main(port: int = 8000, compile: bool = True) -> None:
    signal(SIGTERM, default_int_handler)  # as Ctrl-C: it leaves `serving`
    with suppress(KeyboardInterrupt), serving(port, compile) as server:
        print(f"""curl -N localhost:{server.server_port}/generate -d '{{"prompt": "letters a to h:"}}'""", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
