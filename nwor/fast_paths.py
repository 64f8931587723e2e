"""Fast paths: what NWOR shortens of vLLM's own code, in every mode, and which of them are in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nwor.config import NworConfig

#: The fast paths by the setting that turns them off.
FAST_PATHS = {
    "fast_host": ("scheduler", "scheduler_steps", "inputs", "launches"),
    "fast_sampling": ("drafting", "verifying"),
    "fast_drafting": ("first_pass",),
}

#: What is said of a path that nobody has spoken for.
OTHER_RUNNER = "only model runner V2 on CUDA has it"
NO_STEP_YET = "not known before the engine's first step; a scheduler of one's own never has it"
TURNED_OFF = "turned off by --no-{}"

_OF_SCHEDULER = ("scheduler", "scheduler_steps")


class FastPaths:
    """The fast paths of one rank and of the scheduler that sends it its steps.

    Args:
        config: the settings that the engine was started with.

    """

    def __init__(self, config: NworConfig) -> None:
        self._why_not: dict[str, str | None] = {}
        for setting, paths in FAST_PATHS.items():
            wanted = getattr(config, setting)
            for path in paths:
                default = NO_STEP_YET if path in _OF_SCHEDULER else OTHER_RUNNER
                self._why_not[path] = default if wanted else TURNED_OFF.format(setting.replace("_", "-"))

    def note(self, found: Mapping[str, str | None]) -> None:
        """Take in what is known of some paths.

        Args:
            found: by path, why it is not in place; None where it is.

        Raises:
            KeyError: for a path that :data:`FAST_PATHS` does not name.

        """
        for path, why_not in found.items():
            if path not in self._why_not:
                raise KeyError(path)
            self._why_not[path] = why_not

    def report(self) -> dict[str, Any]:
        """Return plain JSON values: by setting, the active paths and why the others are not."""
        return {
            setting: {
                "active": [path for path in paths if self._why_not[path] is None],
                "inactive": {path: why for path in paths if (why := self._why_not[path]) is not None},
            }
            for setting, paths in FAST_PATHS.items()
        }
