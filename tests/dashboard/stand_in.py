"""A server without an engine: the page's own routes, real admin routes, and metrics that a test sets.

The metrics have the names of the real ones (test_real_server.py and test_prometheus.py hold that true).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge
from vllm.v1.engine.exceptions import EngineDeadError

from nwor.config import NworConfig
from nwor.engine.trees.requirements import CHAIN_REASONS
from nwor.engine.worker import NworWorkerMixin
from nwor.modes import Mode
from nwor.tree_shape import TreeShape
from nwor.worker_state import WorkerState
from server import dashboard
from server.admin_api import routes as admin_routes
from server.api import http_errors

KEY = "boss-key"
TOKEN_BYTES = 2560
DRAFTS = 4


class Metrics:
    """One engine process' registry; a new one is a restart, with every counter at zero."""

    def __init__(
        self,
        engines: tuple[str, ...] = ("0",),
        *,
        speculation: bool = True,
        nwor: bool = True,
        statistics: bool = True,
        choice: bool = False,
        tree: TreeShape | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self.engines = engines
        self.drafts = DRAFTS if tree is None else tree.nodes
        self.started = Gauge("process_start_time_seconds", "Start.", registry=self.registry)
        self.started.set(time.time())
        self.counters: dict[str, Counter] = {}
        self.gauges: dict[str, Gauge] = {}
        if not statistics:
            return
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
            self._gauge(name)
        self._counter("vllm:generation_tokens")
        if speculation:
            for name in ("drafts", "draft_tokens", "accepted_tokens"):
                self._counter(f"vllm:spec_decode_num_{name}")
            self._counter("vllm:spec_decode_num_accepted_tokens_per_pos", "position")
        if speculation and nwor:
            self._counter("nwor_windows", "outcome")
            self._counter("nwor_kv_write_bytes", "path")
            self._counter("nwor_kv_write_bytes_baseline")
            self._counter("nwor_direct_windows", "reason")
            self._counter("nwor_accounting_mismatches", "figure")
            self._gauge("nwor_staging_held_bytes")
            self._gauge("nwor_mode", "mode")
            self.set_mode("stage")
        if choice:
            self._counter("nwor_draft_steps", "draft_tokens")
            for name in ("draft_tokens_chosen", "draft_tokens_auto", "seconds_without_drafts"):
                self._gauge(f"nwor_{name}")
            self._gauge("nwor_draft_acceptance_estimate", "position")
            self.choose(4, [0.73, 0.52, 0.35, 0.2])
        if tree is not None:
            for name, value in (("nwor_tree_nodes", tree.nodes), ("nwor_tree_depth", tree.depth)):
                self._gauge(name)
                self.set(name, value)
            self._counter("nwor_chain_requests", "reason")
            for reason in CHAIN_REASONS:
                self.inc("nwor_chain_requests", 0, reason)

    def choose(self, drafts: int, estimate: list[float], auto: bool = True, without: float = 0.0) -> None:
        """Show that draft tokens were chosen, and by which estimate."""
        self.set("nwor_draft_tokens_chosen", drafts)
        self.set("nwor_draft_tokens_auto", auto)
        self.set("nwor_seconds_without_drafts", without)
        for position, chance in enumerate(estimate):
            self.set("nwor_draft_acceptance_estimate", chance, str(position))
        self.inc("nwor_draft_steps", 10, str(drafts))

    def _counter(self, name: str, *labels: str) -> None:
        self.counters[name] = Counter(name, ".", ("engine", "model_name", *labels), registry=self.registry)
        self._show_zero(self.counters[name], labels)

    def _gauge(self, name: str, *labels: str) -> None:
        self.gauges[name] = Gauge(name, ".", ("engine", "model_name", *labels), registry=self.registry)
        self._show_zero(self.gauges[name], labels)

    def _show_zero(self, metric: Any, labels: tuple[str, ...]) -> None:
        for engine in self.engines if not labels else ():
            metric.labels(engine, "demo")

    def inc(self, name: str, amount: float, *labels: str, engine: str = "0") -> None:
        """Add to a counter."""
        self.counters[name].labels(engine, "demo", *labels).inc(amount)

    def set(self, name: str, value: float, *labels: str, engine: str = "0") -> None:
        """Set a gauge."""
        self.gauges[name].labels(engine, "demo", *labels).set(value)

    def set_mode(self, mode: str, engine: str | None = None) -> None:
        """Show a mode, of one engine or of all."""
        for name in self.engines if engine is None else (engine,):
            for known in Mode:
                self.set("nwor_mode", known.value == mode, known.value, engine=name)

    def add_windows(self, by_accepted: list[int], mode: str = "stage", engine: str = "0") -> None:
        """Count windows of as many draft tokens as all have, element a of the list with a accepted tokens."""
        windows = sum(by_accepted)
        accepted = sum(tokens * number for tokens, number in enumerate(by_accepted))
        drafts = windows * self.drafts
        self.inc("vllm:generation_tokens", windows + accepted, engine=engine)
        self.inc("vllm:spec_decode_num_drafts", windows, engine=engine)
        self.inc("vllm:spec_decode_num_draft_tokens", drafts, engine=engine)
        self.inc("vllm:spec_decode_num_accepted_tokens", accepted, engine=engine)
        for position in range(self.drafts):
            reached = sum(by_accepted[position + 1 :])
            self.inc("vllm:spec_decode_num_accepted_tokens_per_pos", reached, str(position), engine=engine)
        if "nwor_windows" not in self.counters:
            return
        outcome = {"stage": "committed", "cow": "restored", "off": "direct"}[mode]
        self.inc("nwor_windows", windows, outcome, engine=engine)
        written = {
            "stage": {"commit": windows + accepted},
            "cow": {"direct": windows + drafts, "log": drafts, "restore": drafts - accepted},
            "off": {"direct": windows + drafts},
        }[mode]
        for path, tokens in written.items():
            self.inc("nwor_kv_write_bytes", tokens * TOKEN_BYTES, path, engine=engine)
        self.inc("nwor_kv_write_bytes_baseline", (windows + drafts) * TOKEN_BYTES, engine=engine)


class Worker(NworWorkerMixin):
    """What the admin routes call on a rank, on a state without a model."""

    def __init__(self, rank: int, state: WorkerState) -> None:
        self.rank = rank
        self.model_runner = SimpleNamespace(nwor=SimpleNamespace(state=state))


class Engine:
    """One engine of two ranks, behind the one call that the admin routes make."""

    def __init__(self, on_mode: Any) -> None:
        settings = {"mode": "stage", "modes": ["off", "stage"], "draft_tokens": "auto:0-6"}
        self.vllm_config = SimpleNamespace(additional_config={"nwor": settings})
        self.errored = False
        self.on_mode = on_mode
        config = NworConfig.from_mapping(settings)
        self.ranks = [WorkerState(config, config.mode, steps=7) for _ in range(2)]
        self.workers = [Worker(rank, state) for rank, state in enumerate(self.ranks)]
        self.engine_core = self

    async def call_utility_all_async(
        self, utility: str, method: str, timeout: float | None, args: tuple[Any, ...], kwargs: None
    ) -> list[list[Any]]:
        assert utility == "collective_rpc"
        if self.errored:
            raise EngineDeadError
        answers = [getattr(worker, method)(*args) for worker in self.workers]
        self.on_mode(self.ranks[0].mode_in_force.value)
        return [answers]


class StandIn:
    """What the browser talks to; a test changes it while it serves."""

    def __init__(self, port: int, root: str = "") -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}{root}"
        self.root = root
        self.metrics = Metrics()
        self.health = 200
        #: Answers the page's question for figures with this instead of the registry.
        self.metrics_answer: Response | None = None
        self.engine = Engine(lambda mode: self.metrics.set_mode(mode))
        self.requests: list[tuple[str, str, str]] = []
        self.key: str | None = KEY
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def app(self) -> FastAPI:
        app = FastAPI()
        http_errors.install(app)
        admin_routes.install(app, self.engine, self.key, None)
        dashboard.install(app, lambda: self.metrics.registry)

        @app.get("/health")
        async def health() -> Response:
            return Response(status_code=self.health)

        @app.middleware("http")
        async def note(request: Request, call_next: Any) -> Response:
            self.requests.append((request.method, str(request.url), request.headers.get("authorization", "")))
            if self.metrics_answer is not None and request.url.path.endswith(dashboard.FIGURES):
                return self.metrics_answer
            answer: Response = await call_next(request)
            return answer

        if not self.root:
            return app
        # A proxy that serves everything under a prefix, and nothing beside it.
        outer = FastAPI()
        outer.mount(self.root, app)
        return outer

    def start(self) -> None:
        """Serve until :meth:`stop`."""
        config = uvicorn.Config(
            self.app(), host="127.0.0.1", port=self.port, log_level="warning", lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the server ended before it was ready"
            time.sleep(0.01)

    def stop(self) -> None:
        """Close the port."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._server.force_exit = True
            self._thread.join(10)
        self._server = None


@contextlib.contextmanager
def serve(port: int, root: str = "") -> Iterator[StandIn]:
    """Serve a stand-in while the context lasts."""
    server = StandIn(port, root)
    server.start()
    try:
        yield server
    finally:
        server.stop()
