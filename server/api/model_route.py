"""``GET /v1/models/{id}``, which vLLM leaves out of OpenAI's API."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, HTTPException, Request


def install(app: FastAPI) -> None:
    """Add the route."""

    @app.get("/v1/models/{model_id:path}", summary="Show one model")
    async def show_model(model_id: str, raw_request: Request) -> dict[str, Any]:
        listed = await raw_request.app.state.openai_serving_models.show_available_models()
        for card in listed.data:
            if card.id == model_id:
                found: dict[str, Any] = card.model_dump()
                return found
        names = ", ".join(card.id for card in listed.data)
        raise HTTPException(
            HTTPStatus.NOT_FOUND, f"The model {model_id!r} does not exist: this server has {names}."
        )
