"""A service as the launcher sees one: /health, /ready, /metrics, SIGTERM ends it. For tests of the launcher.

`python fake_service.py ROOM`; the port comes from the same variables that a real service reads. Files in the
folder $FAKE_DIR change how it behaves: `ROOM.broken` makes it exit at once, `ROOM.stuck` makes it deaf to SIGTERM.
"""

import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

PORTS = {
    "gateway": "BATON_GATEWAY_INTERNAL_PORT",
    "scheduler": "BATON_SCHEDULER_PORT",
    "prefix_index": "BATON_INDEX_PORT",
    "prefill": "BATON_WORKER_HEALTH_PORT",
    "decode": "BATON_WORKER_HEALTH_PORT",
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = (
            b'baton_gateway_requests_total{reason="a"} 3\nbaton_gateway_requests_total{reason="b"} 4\n'
            if self.path == "/metrics"
            else b"ok"
        )
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def main(room: str) -> None:
    folder = Path(os.environ["FAKE_DIR"])
    if (folder / f"{room}.broken").exists():
        print(f'{{"event": "no such luck", "level": "error", "room": "{room}"}}', flush=True)
        sys.exit(int((folder / f"{room}.broken").read_text() or 1))

    def end(*_: object) -> None:
        if (folder / f"{room}.stuck").exists():
            return
        with (folder / "ended").open("a") as file:
            file.write(f"{room} {time.monotonic()}\n")
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    name = os.environ["BATON_WORKER_NAME"]
    print(f'{{"event": "listening", "level": "info", "name": "{name}"}}', flush=True)
    print(f'{{"event": "odd", "level": "warning", "name": "{name}"}}', flush=True)
    HTTPServer(("127.0.0.1", int(os.environ[PORTS[room]])), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
