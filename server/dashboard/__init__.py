"""The live page at /dashboard: static files, read once, with headers that keep it on its own host.

The page takes its figures from a route beside it, which has those of /metrics as JSON, and the mode switch
from /admin/nwor, both in the browser. Every address in it is relative, so it works behind a proxy that adds a
prefix. See docs/dashboard.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Metric

from nwor.engine.eligibility import REASONS

#: Where the page's files lie; all of them are served, and nothing else.
STATIC = Path(__file__).parent / "static"

#: The page's own file, served at /dashboard itself.
PAGE = "index.html"

#: Where the page finds its figures, and how the names of those begin.
FIGURES, FIGURE_NAMES = "/dashboard/metrics.json", ("nwor_", "vllm:", "process_start_time_seconds")

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}

#: Sent with the page and each of its files.
HEADERS = {
    # The browser itself then refuses other hosts, inline code, sending forms, and being framed.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # A new version is seen at the next load; what has not changed costs an answer without a body.
    "Cache-Control": "no-cache",
}

Endpoint = Callable[[Request], Awaitable[Response]]


def _vllm_registry() -> CollectorRegistry:
    """Return what vLLM's /metrics tells."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    return get_prometheus_registry()


def make_router(registry: Callable[[], CollectorRegistry] = _vllm_registry) -> APIRouter:
    """Return the page's routes.

    Args:
        registry: returns where the figures are.

    Raises:
        FileNotFoundError: the package was installed without the page's files.

    """
    if not (STATIC / PAGE).is_file():
        raise FileNotFoundError(f"{STATIC / PAGE} is missing: install the package again")
    router = APIRouter(include_in_schema=False)

    def add(path: str, endpoint: Endpoint) -> None:
        router.add_api_route(path, endpoint, methods=["GET", "HEAD"], response_model=None)

    for file in sorted(STATIC.rglob("*")):
        name = file.relative_to(STATIC).as_posix()
        if file.suffix in _TYPES:
            add(
                "/dashboard" if name == PAGE else f"/dashboard/{name}",
                _serve(file.read_bytes(), _TYPES[file.suffix]),
            )
    add("/dashboard/reasons.json", _reasons)

    def figures() -> Response:
        """Answer with the figures; not in the event loop, since several processes' are read from files."""
        return JSONResponse(
            samples_of(registry().collect()), headers={**HEADERS, "Cache-Control": "no-store"}
        )

    router.add_api_route(FIGURES, figures, methods=["GET", "HEAD"], response_model=None)
    add("/dashboard/", _without_slash)
    return router


def install(app: FastAPI, registry: Callable[[], CollectorRegistry] = _vllm_registry) -> None:
    """Add the page to an application; ``registry`` as for :func:`make_router`."""
    app.include_router(make_router(registry))


def samples_of(metrics: Iterable[Metric]) -> dict[str, list[dict[str, Any]]]:
    """Return what the page reads of some metrics.

    Returns:
        By name, samples with ``labels`` and ``value``; None for a value that is not finite, since JSON has no
        such numbers. Histograms' buckets are left out.

    """
    found: dict[str, list[dict[str, Any]]] = {}
    for metric in metrics:
        for sample in metric.samples:
            if sample.name.startswith(FIGURE_NAMES) and not sample.name.endswith("_bucket"):
                value = sample.value if isfinite(sample.value) else None
                found.setdefault(sample.name, []).append({"labels": sample.labels, "value": value})
    return found


def _serve(content: bytes, media_type: str) -> Endpoint:
    headers: Mapping[str, str] = {**HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def endpoint(request: Request) -> Response:
        known = request.headers.get("if-none-match", "").split(",")
        if headers["ETag"] in [tag.strip().removeprefix("W/") for tag in known]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return endpoint


async def _reasons(_: Request) -> Response:
    """Say what each reason for writing directly means, for the page's table."""
    return JSONResponse({name: reason.text for name, reason in REASONS.items()}, headers=HEADERS)


async def _without_slash(_: Request) -> Response:
    """Send the browser to the address that the page's relative addresses count from."""
    return Response(status_code=308, headers={**HEADERS, "Location": "../dashboard"})
