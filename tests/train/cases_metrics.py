"""Ranks whose metrics meet servers that don't answer well."""

from __future__ import annotations

import http.server
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from lockstep_train import __main__ as trainer
from lockstep_train.engine import step as engine_step
from lockstep_train.report import reporter
from lockstep_train.report.sinks.sink import Point, Sink


def train_against_server(answer: str, document: str) -> int:
    """Train with MLflow at a server on this machine that hangs or answers 500. `document`: the run file, without its address."""
    released = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if answer == "hang":
                released.wait()
                return
            self.send_response(500)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *arguments: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    run = json.loads(Path(document).read_text())
    address = f"http://anna:hunter2@127.0.0.1:{server.server_port}"
    run["training"]["metrics"] = {"tensorBoard": False, "mlflow": {"trackingUri": address}}
    mine = Path(document).with_suffix(f".{os.environ['RANK']}.json")
    mine.write_text(json.dumps(run))
    os.environ["LOCKSTEP_RUN"] = str(mine)
    reporter.DRAIN_SECONDS["Done"] = 1.0
    try:
        return trainer.main([])
    finally:
        released.set()


def die_after(step: int) -> int:
    """Train, and be killed while the step after `step` is computed, when all that was measured until then has arrived everywhere."""
    real, deliver, put = engine_step.seed_micro_batch, Sink._deliver, Sink.put
    counts = {"put": 0, "delivered": 0}

    def counted_put(sink: Sink, point: Point) -> None:
        counts["put"] += 1
        put(sink, point)

    def counted_deliver(sink: Sink, batch: list[Point]) -> bool:
        arrived = deliver(sink, batch)
        counts["delivered"] += len(batch)
        return arrived

    def seed(seed: int, at: int, micro: int, on: int) -> None:
        if at == step + 1 and on == 0:
            while counts["delivered"] < counts["put"]:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        real(seed, at, micro, on)

    engine_step.seed_micro_batch, Sink._deliver, Sink.put = seed, counted_deliver, counted_put
    return trainer.main([])
