"""The bundled demo model: a small code-completion model and its EAGLE head.

``model/`` holds the target, ``draft/`` the head; ``training/`` is the code that made both. Importing this
package imports neither torch nor vLLM.
"""

import json
from pathlib import Path

__all__ = ["draft_method", "draft_path", "model_path"]

_HERE = Path(__file__).resolve().parent


def _folder(name: str) -> Path:
    folder = _HERE / name
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"the bundled demo model is incomplete: {folder} has no config.json; "
            "reinstall the package or check the working copy out again"
        )
    return folder


def model_path() -> Path:
    """Folder of the bundled target model (weights, configuration, tokenizer, chat template).

    Raises:
        FileNotFoundError: the installation lacks the folder.
    """
    return _folder("model")


def draft_path() -> Path:
    """Folder of the bundled EAGLE head; its embedding and output layer are the target's.

    Raises:
        FileNotFoundError: the installation lacks the folder.
    """
    return _folder("draft")


def draft_method() -> str:
    """Speculative method that the bundled head was trained for: ``"eagle"`` or ``"eagle3"``.

    Raises:
        FileNotFoundError: the installation lacks the folder.
    """
    config = json.loads((draft_path() / "config.json").read_text(encoding="utf-8"))
    return "eagle3" if "Eagle3" in config["architectures"][0] else "eagle"
