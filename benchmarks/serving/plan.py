"""What is measured: arms (a server and its mode), loads, lengths, and the order of turns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from nwor.tree_shape import TreeShape

#: Modes of an NWOR server; each is an arm of its own.
MODES = ("off", "stage", "cow")
STOCK = "stock"
AUTO = "auto"
#: ``auto`` with windows that fit each request.
FITTED = "fitted"
#: Windows are trees for few requests, and chains for more; where the engine chooses, behind :data:`AUTO`.
TREE = "tree"
#: vLLM's adaptive verification, in ``stage``; behind :data:`STOCK` in stock.
ADAPTIVE = "adaptive"
#: Most draft tokens of the arm that chooses them.
MOST_CHOSEN = 8
#: The arms of the core grid.
CORE_ARMS = (STOCK, "off", "stage")
#: The loads of the core grid, by shape; the arrivals are meant to be about half of what an H100 serves.
CORE_LOADS = {"8b": "c1,c16,c64,p12", "1b": "c1,c16,c64,p30", "tiny": "c1,c4,p2", "demo": "c1,c8,c32"}
#: Share of what a stock server can serve that a relative Poisson load may ask for, at most.
MOST_SHARE = 1.5


def core_loads(shape: str) -> str:
    """Return the loads of the core grid; a model that is enlarged to a shape has that shape's."""
    return CORE_LOADS.get(shape) or CORE_LOADS[shape.rpartition("-")[2]]


@dataclass(frozen=True)
class Arm:
    """A server and the mode that it is in.

    Attributes:
        name: as it is called in results, such as ``stage`` or ``stock@2``.
        mode: ``stock``, or a mode of NWOR.
        k: draft tokens of a step; 0 is no speculation. For ``auto`` the most.
        chosen: whether the server chooses the draft tokens of each step.
        tree: what windows of k draft tokens are; None where all are chains.
        adaptive: whether vLLM verifies those of the k draft tokens alone that are likely to be accepted.

    """

    name: str
    mode: str
    k: int
    chosen: bool = False
    tree: TreeShape | None = None
    adaptive: bool = False

    @property
    def fits(self) -> bool:
        """Whether the server may choose fewer draft tokens for some requests of a step."""
        return self.name == FITTED

    @property
    def server(self) -> str:
        """Name of the server that this arm runs on; arms of one server share it."""
        if self.tree is not None:
            return f"nwor@{self.name.replace('@', '-')}"
        if self.chosen:
            return f"nwor@{self.name}"
        kind = f"{ADAPTIVE}-" if self.adaptive else ""
        return f"{STOCK if self.mode == STOCK else 'nwor'}@{kind}{self.k}"


def parse_arm(text: str, k: int) -> Arm:
    """Return the arm that ``stock``, ``off``, ``stage``, ``cow`` names; ``@2`` behind it sets its k.

    ``auto`` is ``stage`` with draft tokens that the server chooses, up to :data:`MOST_CHOSEN`, and ``fitted``
    is ``auto`` with windows that fit each request. ``tree@16x6`` is ``stage`` with trees of 16 nodes, 6 deep,
    and ``auto-tree@16x6`` chooses among them and chains.
    ``adaptive@6`` and ``stock-adaptive@6`` verify the likely ones of 6 draft tokens.

    Raises:
        ValueError: for anything else.

    """
    if text.strip() in (AUTO, FITTED):
        return Arm(text.strip(), MODES[1], MOST_CHOSEN, chosen=True)
    if match := re.fullmatch(rf"({AUTO}-)?{TREE}@(\d+)x(\d+)(?:x(\d+))?", text.strip()):
        nodes, depth, width = (int(number) if number else None for number in match.groups()[1:])
        shape = TreeShape.of(nodes or 0, depth, width)
        return Arm(text.strip(), MODES[1], shape.nodes, chosen=bool(match[1]), tree=shape)
    if match := re.fullmatch(rf"({STOCK}-)?{ADAPTIVE}@([1-9]\d*)", text.strip()):
        return Arm(text.strip(), STOCK if match[1] else MODES[1], int(match[2]), adaptive=True)
    mode, at, number = text.strip().partition("@")
    if mode not in (STOCK, *MODES) or (at and not number.isdecimal()):
        raise ValueError(
            f"{text!r} is no arm: use stock, {', '.join(MODES)}, and @K for another k, as stock@2; or auto, "
            "fitted, tree@16x6, auto-tree@16x6, adaptive@6, stock-adaptive@6"
        )
    own = int(number) if at else k
    if own == 0 and mode != STOCK:
        raise ValueError(f"{text!r} speculates not at all: without drafts there is nothing to stage")
    return Arm(mode if own == k else f"{mode}@{own}", mode, own)


@dataclass(frozen=True)
class Load:
    """How requests come.

    Attributes:
        name: ``c16`` (16 clients, each sends its next request when it has its answer), ``p12`` (Poisson, 12 a
            second) or ``p50%`` (Poisson, half of what stock vLLM serves at most).
        clients: clients of a closed loop; 0 with Poisson arrivals.
        rate: requests a second; 0 in a closed loop, and until the capacity is known.
        share: share of stock's capacity; 0 where the rate is given.

    """

    name: str
    clients: int = 0
    rate: float = 0.0
    share: float = 0.0


def parse_load(text: str) -> Load:
    """Return the load of a name.

    Raises:
        ValueError: if it is no name of a load.

    """
    text = text.strip()
    if match := re.fullmatch(r"c([1-9]\d*)", text):
        return Load(text, clients=int(match[1]))
    if match := re.fullmatch(r"p(\d+(?:\.\d+)?)(%?)", text):
        number = float(match[1])
        if match[2] and 0 < number <= 100 * MOST_SHARE:
            return Load(text, share=number / 100)
        if not match[2] and number > 0:
            return Load(text, rate=number)
    raise ValueError(f"{text!r} is no load: use c16 (16 clients), p12 (12 requests/s) or p50% (of capacity)")


@dataclass(frozen=True)
class Lengths:
    """Log-normal lengths of prompts and answers, by their medians.

    Attributes:
        prompt: median of the prompts, in tokens.
        answer: median of the answers.
        prompt_sigma: of the logarithm.
        answer_sigma: of the logarithm.
        least: fewest tokens of either.
        most_prompt: longest prompt.
        most_answer: longest answer.
        shared: share of the prompts that begin with a common prefix.

    """

    prompt: int
    answer: int
    prompt_sigma: float = 0.6
    answer_sigma: float = 0.5
    least: int = 8
    most_prompt: int = 6000
    most_answer: int = 2000
    shared: float = 0.0

    @property
    def name(self) -> str:
        """Return the medians, as in ``512/256``."""
        return f"{self.prompt}/{self.answer}"


def parse_lengths(text: str, max_len: int, shared: float = 0.0) -> Lengths:
    """Return the lengths of ``512/256``, cut so that a prompt with its answer fits into ``max_len`` tokens.

    Args:
        text: the medians; ``512/256:0.5`` for prompts of which half begin with a common prefix.
        max_len: longest prompt and answer together.
        shared: share of prompts with a common prefix where ``text`` gives none.

    Raises:
        ValueError: if it is not of that form, or does not fit.

    """
    match = re.fullmatch(r"(\d+)/(\d+)(?::(0|1|0?\.\d+))?", text.strip())
    if match is None or not int(match[1]) or not int(match[2]):
        raise ValueError(
            f"{text!r} are no lengths: give the medians of prompts and answers, as 512/256, and behind a "
            "colon the share of prompts with a common prefix, as 512/256:0.5"
        )
    shared = shared if match[3] is None else float(match[3])
    prompt, answer = int(match[1]), int(match[2])
    most_answer = min(4 * answer, max_len // 2)
    most_prompt = min(6000, max_len - most_answer - 16)
    if most_prompt < prompt:
        raise ValueError(f"prompts around {prompt} tokens do not fit into {max_len}")
    return Lengths(prompt, answer, most_prompt=most_prompt, most_answer=most_answer, shared=shared)


@dataclass(frozen=True)
class Size:
    """How many requests a closed loop needs: before the window, and in it."""

    ramp: int
    measured: int

    @property
    def total(self) -> int:
        """Requests to prepare: when the last is sent, all clients are still busy."""
        return self.ramp + self.measured


def size(clients: int, scale: float = 1.0) -> Size:
    """Return how many requests a closed loop of so many clients takes.

    The window begins when as many requests have ended as there are clients. It ends when none is left.
    """
    measured = max(8, min(4 * clients, max(64, 2 * clients)))
    return Size(clients, max(2, round(measured * scale)) + clients - 1)


def order(arms: Sequence[Arm], turn: int) -> list[Arm]:
    """Return the arms in the order of a turn: every arm is first, middle and last equally often.

    Two turns in a row are each other's reverse, so that a drift of the machine falls on all arms.
    """
    rotations = [
        tuple(arms[(start + step) % len(arms)] for step in range(len(arms))) for start in range(len(arms))
    ]
    orders = list(itertools.chain.from_iterable((one, one[::-1]) for one in rotations))
    return list(orders[turn % len(orders)])
