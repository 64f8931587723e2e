"""Trees on one rank: puts the parts in place and calls them at their moment of a step."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nwor.config import NworConfig
from nwor.engine.attention.target_layers import draft_layers
from nwor.engine.trees import known_sources
from nwor.engine.trees.agreement import Agreement
from nwor.engine.trees.requirements import check_engine, most_requests, needs_chain
from nwor.engine.trees.sampler import TreeSampler
from nwor.engine.trees.speculator import TreeDrafts
from nwor.engine.trees.tables import TreeTables
from nwor.engine.vllm_features import mask_stride

if TYPE_CHECKING:
    from nwor.engine.window_manager import WindowManager

logger = logging.getLogger("vllm.nwor.trees")


class TreeDecoding:
    """The trees of one rank.

    Args:
        runner: vLLM's model runner V2, its models loaded.
        tables: the trees.
        rates: as :class:`TreeSampler` takes them.

    Attributes:
        tables: likewise.
        chains: requests so far whose windows had to be chains, by reason; those of vLLM's warm-up are none.

    """

    def __init__(self, runner: Any, tables: TreeTables, rates: Sequence[Sequence[float]] = ()) -> None:
        self.tables = tables
        self._runner = runner
        if rates:
            tables.assume_probabilities()
        self.chains: dict[str, int] = {}
        # Those that have not ended: vLLM adds a request anew after it was preempted.
        self._linear: set[str] = set()
        self._windows: WindowManager | None = None
        self._custom = bool(runner.model_config.logits_processors)
        self._batch: Any = None
        self._agreement = Agreement(runner.device)
        # What the ranks have agreed on in the step under way.
        self._refusing: torch.Tensor | None = None
        self._sampler = TreeSampler(runner.rejection_sampler, tables, self._refusing_now, rates)
        runner.rejection_sampler = self._sampler
        self._drafts = TreeDrafts(runner.speculator, tables, self._refusing_next)

    @classmethod
    def install(cls, runner: Any) -> TreeDecoding | None:
        """Return what makes a runner's windows trees; None where nobody asked for them.

        Raises:
            ConfigError: if the engine cannot have them.

        """
        config = NworConfig.from_additional_config(runner.vllm_config.additional_config)
        if config is None or config.tree is None:
            return None
        check_engine(runner.vllm_config, config)
        known_sources.check()
        shape = config.tree
        most = most_requests(runner.vllm_config, config)
        tables = TreeTables(shape, runner.max_num_reqs, runner.max_num_tokens, runner.device, most)
        _shrink_bitmask(runner)
        logger.info(
            "Windows are trees (%s): %d nodes, %d deep, %d wide",
            shape.kind,
            shape.nodes,
            shape.depth,
            shape.width,
        )
        return cls(runner, tables, config.tree_acceptance_rates)

    def attach(self, windows: WindowManager, runner: Any) -> None:
        """Let a rank's windows be trees, once its layers are bound and before graphs are captured."""
        # vLLM forgets what was made beside weights where it sleeps deeply, and keeps what is made here.
        for owner in (
            self.tables,
            self.tables.candidates,
            self._agreement,
            self._sampler,
            self._drafts.growth,
        ):
            _make_anew(owner)
        self._windows = windows
        windows.state.chain_requests = self.chains
        if windows.window is None:
            logger.warning("Windows are never trees: nothing is staged in this engine")
        windows.use_trees(self.tables)
        if self._drafts.growth is not None:
            self._drafts.growth.attach(draft_layers(runner), runner.nwor_cache_views)

    def expected_bytes(self, graphs_measured: bool) -> int:
        """Return the memory that :meth:`attach` and graphs of the drafter's passes will take.

        Args:
            graphs_measured: whether those graphs are among the ones that vLLM measures.

        """
        growth = self._drafts.growth
        return 0 if growth is None else growth.expected_bytes(draft_layers(self._runner), graphs_measured)

    def _refusing_now(self) -> torch.Tensor:
        attended = self._windows is not None and self._windows.attends_trees
        self._refusing = self._agreement.refusing(not attended)
        return self._refusing

    def _refusing_next(self) -> torch.Tensor:
        possible = self._windows is not None and self._windows.trees_possible
        known, self._refusing = self._refusing, None
        # Ranks have to draft the same. One that has failed since then says so when the drafts are verified.
        if known is not None and not self._agreement.alone:
            return known
        return self._agreement.refusing(not possible)

    def add(self, requests: Sequence[Any], slots: Mapping[str, int]) -> None:
        """Look at what new requests ask for."""
        for request in requests:
            reason = needs_chain(request.sampling_params, self._custom)
            self.tables.set_linear(slots[request.req_id], reason is not None)
            if reason is not None:
                self._count(request.req_id, reason)

    def _count(self, request_id: str, reason: str) -> None:
        windows = self._windows
        if windows is None or not windows.state.serving or request_id in self._linear:
            return
        self._linear.add(request_id)
        if reason not in self.chains:
            logger.info("Requests with %s have chains: vLLM's kernels for them know no trees", reason)
        self.chains[reason] = self.chains.get(reason, 0) + 1
        windows.state.forget_facts()

    def begin(self, verified: Iterable[str], rows: Mapping[str, int]) -> bool:
        """Begin a step; return whether any of its windows may be a tree, or is longer than chains are.

        Args:
            verified: the requests whose draft tokens it verifies.
            rows: of each request.

        """
        tables, longest = self.tables, 1 + self.tables.shape.longest_chain
        tables.verifies_trees = not tables.growing.isdisjoint(verified) or any(
            rows[request] > longest for request in verified
        )
        return tables.verifies_trees

    def forget(self, request_ids: Iterable[str]) -> None:
        """Let go of requests that have ended."""
        self._linear.difference_update(request_ids)
        self.tables.growing.difference_update(request_ids)

    def place(self, batch: Any) -> None:
        """Prepare a step's rows, once its slots are computed and before the first layer runs."""
        self._refusing = None
        self._batch = batch if batch.num_draft_tokens else None
        if self._batch is not None:
            self.tables.place(batch)

    def settle(self, num_sampled: torch.Tensor) -> None:
        """Note which rows are kept, once the step is sampled and before the commit.

        Args:
            num_sampled: int32 [requests].

        """
        batch, self._batch = self._batch, None
        if batch is None:
            return
        try:
            self.tables.settle(batch, num_sampled)
        except Exception as error:
            self.tables.settle_plainly(batch, num_sampled)
            if self._windows is not None:
                self._windows.state.fail("settle", error)


def _make_anew(owner: object) -> None:
    """Put the tensors of an object into memory that is allocated now."""
    held = vars(owner) if owner is not None else {}
    for name, value in held.items():
        if isinstance(value, torch.Tensor):
            held[name] = value.clone()
        elif isinstance(value, (list, tuple)) and value and all(isinstance(x, torch.Tensor) for x in value):
            held[name] = type(value)(x.clone() for x in value)


def _shrink_bitmask(runner: Any) -> None:
    """Give what a grammar allows as many rows as a step can have, not those of a tree for every request.

    With 1024 requests, trees of 60 nodes and 128k tokens vLLM's own would take a GiB of the device.
    """
    stock = getattr(runner, "structured_outputs_worker", None)
    if stock is None or len(stock.logits_indices) <= runner.max_num_tokens:
        return
    if mask_stride(runner.vllm_config) is not None:
        return  # each request then has as many rows, whatever it has drafts
    rows = runner.max_num_tokens
    stock.logits_indices = torch.zeros_like(stock.logits_indices[:rows])
    stock.grammar_bitmask = torch.zeros_like(stock.grammar_bitmask[:rows])
