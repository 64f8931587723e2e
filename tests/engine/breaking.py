"""For the probe of engine tests: makes one of NWOR's parts raise, once."""

from __future__ import annotations

from typing import Any

from nwor.engine.attention.target_layers import target_layers

MESSAGE = "broken on purpose"


class Breaking:
    """Mixed into a probe, which is mixed into the worker by ``worker_extension_cls``."""

    model_runner: Any
    rank: int

    def break_once(self, where: str, steps: int, rank: int | None = None) -> None:
        """Make a part of NWOR raise once, in a verify step some steps from now; then it is whole again.

        Args:
            where: the part, as :meth:`_part` knows it; with "after " in front it does its work first.
            steps: steps with a window batch before that one.
            rank: the only rank that it is to happen on; None for all.

        """
        self.broken = ""
        if rank not in (None, self.rank):
            return
        part = where.removeprefix("after ")
        owner, attribute, calls = self._part(part)
        calls_left = steps * calls + calls // 2
        own = vars(owner).get(attribute)  # None where only the class has it
        original = getattr(owner, attribute)

        def broken(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls_left
            if calls_left:
                calls_left -= 1
                return original(*args, **kwargs)
            if own is None:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, own)
            self.broken = where
            if part == "launch":
                return self._breaks_when_launched(original(*args, **kwargs))
            if part != where:
                original(*args, **kwargs)
            raise RuntimeError(f"{MESSAGE}: {where}")

        setattr(owner, attribute, broken)

    def _breaks_when_launched(self, commit: Any) -> Any:
        def broken(rejected: Any) -> None:
            commit(rejected)
            raise RuntimeError(f"{MESSAGE}: launch")

        return broken

    def _part(self, part: str) -> tuple[Any, str, int]:
        """Return whose attribute a part is, its name, and how often it is called in a step."""
        rank = self.model_runner.nwor
        window, layers = rank.window, list(target_layers(self.model_runner).values())
        (_, group_ops), *more = window.group_ops
        assert not more
        parts: dict[str, tuple[Any, str, int]] = {
            "plan": (rank._planner, "known", 1),
            "begin": (window, "begin", 1),
            "stage": (window, "stage", len(layers)),
            "attend": (layers[len(layers) // 2].impl.nwor, "attend", 1),
            "commit": (window, "commit", 1),
            "launch": (group_ops, "prepared", 1),
            "timing": (rank.timer, "_add", 1),
            "log": (group_ops, "log", 1),
            "restore": (group_ops, "restore", 1),
        }
        if part == "split":
            from nwor.engine.attention.cpu import NworCPUAttentionMetadataBuilder

            parts[part] = (NworCPUAttentionMetadataBuilder, "build_rest", 1)
        trees = getattr(self.model_runner, "_nwor_trees", None)
        if trees is not None:
            parts["place"] = (trees.tables, "place", 1)
            parts["settle"] = (trees.tables, "settle", 1)
        return parts[part]

    def was_broken(self) -> str:
        """Return what has raised since it was asked for; empty where nothing has yet."""
        return self.broken
