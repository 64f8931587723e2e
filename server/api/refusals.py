"""The exception for what a client has to change; vLLM's handlers and streams answer it with 400."""

from __future__ import annotations

from vllm.exceptions import VLLMValidationError


class RefusalError(VLLMValidationError):
    """A refused request: its message is the answer's, its parameter the answer's ``param``."""

    def __str__(self) -> str:
        """Return the sentence alone: the parameter has a field of its own."""
        return str(self.args[0])
