"""What the server reads from model folders before any engine starts. Needs neither torch nor vLLM."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.errors import StartupError

# Keys under which a config.json may nest the settings of the language model.
_NESTED = ("text_config", "transformer_layer_config", "model")
# How the width of a drafter's target is named, in the order in which they count.
_TARGET_WIDTHS = ("target_hidden_size", "backbone_hidden_size")
# Methods whose drafters read tokens alone.
_OWN_STATES = ("draft_model", "pard")


@dataclass(frozen=True)
class ModelShape:
    """The figures of a ``config.json`` that decide whether a draft fits a target; None where it has none."""

    vocab_size: int | None
    hidden_size: int | None
    target_hidden_size: int | None
    architectures: tuple[str, ...]


def is_local(model: str) -> bool:
    """Whether ``model`` names something on this machine."""
    return Path(model).expanduser().exists()


def looks_like_path(model: str) -> bool:
    """Whether ``model`` can only be a path: it starts like one, or is no ``name`` or ``owner/name``."""
    if "://" in model:
        return False
    return model.startswith((os.sep, ".", "~")) or model.count("/") > 1 or model.endswith("/")


def check_model(model: str, role: str) -> None:
    """Check that a model can be found without asking anyone.

    Args:
        model: a folder, or a Hugging Face id.
        role: what the model is for, as it stands in the message ("model", "draft").

    Raises:
        StartupError: a path that does not exist, or a folder that is not a model's.

    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not any((path / name).is_file() for name in ("config.json", "params.json")):
            raise StartupError(
                f"the {role} folder {model!r} has no config.json: pass the folder of the weights"
            )
        return
    if path.exists() or "://" in model:
        return
    offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")
    if looks_like_path(model):
        raise StartupError(f"there is no {role} folder {model!r}: check the path")
    if offline and not _is_cached(model):
        raise StartupError(
            f"there is no {role} folder {model!r}, and the Hugging Face Hub may not be asked for that name "
            "(HF_HUB_OFFLINE is set): check the path, or unset HF_HUB_OFFLINE"
        )


def _is_cached(model: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(model, "config.json"), str)
    except HFValidationError:
        return False


def read_config(model: str) -> dict[str, Any] | None:
    """Return a local model's ``config.json``, or None where there is none to read.

    Raises:
        StartupError: the file is not a JSON object.

    """
    path = Path(model).expanduser() / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise StartupError(f"{path} is not a model's configuration: it holds no JSON object")
    return config


def read_shape(config: dict[str, Any]) -> ModelShape:
    """Return the figures that decide whether two models fit, from a ``config.json``."""
    layers = [config] + [config[key] for key in _NESTED if isinstance(config.get(key), dict)]

    def figure(name: str) -> int | None:
        for layer in layers:
            value = layer.get(name)
            if isinstance(value, int):
                return value
        return None

    return ModelShape(
        vocab_size=figure("vocab_size"),
        hidden_size=figure("hidden_size"),
        target_hidden_size=next(filter(None, map(figure, _TARGET_WIDTHS)), None),
        architectures=tuple(str(name) for name in config.get("architectures") or ()),
    )


def check_draft(model: str, draft: str, method: str) -> None:
    """Check that a drafter fits its target, as far as both can be read here.

    Args:
        model: the target.
        draft: the drafter.
        method: how it drafts, as :mod:`server.drafters` names it.

    Raises:
        StartupError: the vocabularies differ, or the width of the hidden states that the drafter reads.

    """
    target_config, draft_config = read_config(model), read_config(draft)
    if target_config is None or draft_config is None:
        return
    target, drafter = read_shape(target_config), read_shape(draft_config)
    reads_states = method not in _OWN_STATES
    advice = (
        "pass the drafter that was trained for this model"
        if reads_states
        else "pass a draft model with the vocabulary of this one"
    )
    # Medusa heads have the target's, whatever they say.
    if method != "medusa" and _differ(target.vocab_size, drafter.vocab_size):
        raise StartupError(
            f"the draft {draft!r} does not fit the model: its vocab_size is {drafter.vocab_size}, "
            f"the model's is {target.vocab_size}: {advice}"
        )
    # A head may be narrower than its target; it then says which width it reads.
    reads = drafter.target_hidden_size or drafter.hidden_size
    if reads_states and _differ(target.hidden_size, reads):
        raise StartupError(
            f"the draft {draft!r} does not fit the model: its hidden_size is {reads}, "
            f"the model's is {target.hidden_size}: {advice}"
        )


def _differ(one: int | None, other: int | None) -> bool:
    return one is not None and other is not None and one != other
