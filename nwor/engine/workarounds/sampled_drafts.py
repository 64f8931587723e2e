"""Sampled draft tokens on model runner V1: a request's seed holds, and its ``top_k`` and ``top_p`` count.

vLLM draws them with random numbers that no request's seed has a part in: two runs of a seeded request verify
other drafts, and give other tokens. It also draws from all tokens, of which those beyond ``top_k`` or
``top_p`` cannot be accepted. Rejection sampling is exact for any distribution that drafts are really drawn
from, so what drafts are drawn from changes their acceptance alone (Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding", 2023, theorem 3.5). Model runner V2 draws by seed and position.

And vLLM keeps the probabilities of the last pass alone. Where a request sits a step out, its drafts outlive
them, and the whole batch is verified as if its drafts had been certain: exact as well, but other tokens.
"""

from __future__ import annotations

from functools import wraps
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch

_MARK = "_nwor_seeded"


class DraftGenerators:
    """Generators for draft tokens, each derived from a request's own, which is left as it is.

    A request's generator moves on whenever a token of it is sampled. The derived one begins anew then, and
    goes on where nothing was sampled in between: with the passes of one window.
    """

    def __init__(self) -> None:
        self._derived: WeakKeyDictionary[torch.Generator, tuple[bytes, torch.Generator]] = WeakKeyDictionary()

    def of(self, generator: torch.Generator) -> torch.Generator:
        """Return the generator to draw a request's next drafts with.

        Args:
            generator: the request's own, on any device.

        """
        state = blake2b(generator.get_state().numpy().tobytes(), digest_size=8).digest()
        before, derived = self._derived.get(generator, (b"", None))
        if derived is None:
            derived = torch.Generator(device=generator.device)
        if before != state:
            derived.manual_seed(int.from_bytes(state, "little"))
            self._derived[generator] = (state, derived)
        return derived


def sample(
    logits: torch.Tensor, metadata: Any, generators: DraftGenerators, use_fp64_gumbel: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw draft tokens; the likeliest ones for greedy requests.

    Args:
        logits: [rows, vocabulary], any float dtype; as many rows of each request, one request after another.
        metadata: vLLM's ``SamplingMetadata``, by request; one of them is not greedy.
        generators: of seeded requests.
        use_fp64_gumbel: vLLM's setting of the random numbers' dtype.

    Returns:
        Tokens [rows], int64, and the probabilities that they were drawn with [rows, vocabulary], float32.

    """
    from vllm.v1.sample.ops.topk_topp_sampler import (
        apply_top_k_top_p,
        empty_exponential_noise_like,
        sample_with_exponential_noise,
    )
    from vllm.v1.sample.sampler import _SAMPLING_EPS

    each = logits.shape[0] // metadata.temperature.shape[0]

    def by_row(values: torch.Tensor | None) -> torch.Tensor | None:
        return values if values is None or each == 1 else values.repeat_interleave(each)

    temperature: Any = by_row(metadata.temperature)
    greedy = temperature < _SAMPLING_EPS
    scaled = logits.to(torch.float32) / torch.where(greedy, 1.0, temperature).unsqueeze(1)
    probabilities = apply_top_k_top_p(scaled, by_row(metadata.top_k), by_row(metadata.top_p)).softmax(dim=-1)
    noise = empty_exponential_noise_like(probabilities, use_fp64_gumbel)
    if each * len(metadata.generators) < noise.shape[0]:
        noise.exponential_()
    for request, generator in metadata.generators.items():
        rows = noise[request * each : (request + 1) * each]
        rows.exponential_(generator=generators.of(generator))
    tokens = sample_with_exponential_noise(probabilities.clone(), noise)
    if not metadata.all_random:
        tokens = torch.where(greedy, probabilities.argmax(dim=-1), tokens)
    return tokens, probabilities


class KeptProbabilities:
    """Probabilities of drafts whose requests sit a step out.

    Attributes:
        rows: by request, [drafts, vocabulary].

    """

    def __init__(self) -> None:
        self.rows: dict[str, torch.Tensor] = {}
        self._batch: set[str] = set()

    def begin_step(self, runner: Any) -> None:
        """Keep what the step that begins does not need yet, and forget what the last one had.

        Args:
            runner: vLLM's V1 runner, whose batch is this step's, and whose probabilities are the last pass'.

        """
        if runner._draft_probs is None and not self.rows:
            return  # nothing drawn, nothing kept: most engines, in every step
        last, self._batch = self._batch, set(runner.input_batch.req_ids)
        self.rows = {
            request: rows
            for request, rows in self.rows.items()
            if request not in last and request in runner.requests
        }
        if runner._draft_probs is None:
            return
        for index, request in enumerate(runner._draft_prob_req_ids):
            if request not in self._batch and request in runner.requests:
                self.rows[request] = runner._draft_probs[index].clone()

    def of(self, runner: Any, metadata: Any) -> torch.Tensor:
        """Return [drafts of the step, vocabulary], the probabilities that they were drawn with.

        Drafts that were not drawn were certain; greedy requests need none.

        Args:
            runner: vLLM's V1 runner, with the probabilities of the last pass.
            metadata: vLLM's ``SpecDecodeMetadata``.

        """
        known = dict(self.rows)
        if runner._draft_probs is not None:
            known.update(zip(runner._draft_prob_req_ids, runner._draft_probs, strict=False))
        vocabulary = next(iter(known.values())).shape[-1]
        parts: list[torch.Tensor] = []
        start = 0
        for request, count in zip(runner.input_batch.req_ids, metadata.num_draft_tokens, strict=False):
            rows = known.get(request)
            if rows is None:
                drafts = metadata.draft_token_ids[start : start + count]
                # A draft that a grammar has struck out is -1.
                certain = torch.nn.functional.one_hot(drafts.long().clamp(min=0), vocabulary)
                parts.append(certain.to(next(iter(known.values())).dtype))
            else:
                parts.append(rows[:count])
            start += count
        return torch.cat(parts)


def _mend_runner() -> None:
    """Exchange what V1 does with probabilities of drafts, in this process, once."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    update, probabilities = GPUModelRunner._update_states, GPUModelRunner._get_spec_decode_draft_probs
    if getattr(update, _MARK, False):
        return
    kept: WeakKeyDictionary[Any, KeptProbabilities] = WeakKeyDictionary()

    @wraps(update)
    def _update_states(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = update(self, *args, **kwargs)
        kept.setdefault(self, KeptProbabilities()).begin_step(self)
        return result

    @wraps(probabilities)
    def _get_spec_decode_draft_probs(self: Any, spec_decode_metadata: Any) -> torch.Tensor | None:
        own = kept.get(self)
        if own is None or (self._draft_probs is None and not own.rows):
            return probabilities(self, spec_decode_metadata)
        return own.of(self, spec_decode_metadata)

    setattr(_update_states, _MARK, True)
    GPUModelRunner._update_states = _update_states
    GPUModelRunner._get_spec_decode_draft_probs = _get_spec_decode_draft_probs


def mend() -> None:
    """Exchange the method of V1's drafters that draws tokens, in this process, once."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    _mend_runner()
    stock = SpecDecodeBaseProposer._sample_from_logits
    if getattr(stock, _MARK, False):
        return
    generators = DraftGenerators()

    @wraps(stock)
    def _sample_from_logits(
        self: Any, logits: torch.Tensor, sampling_metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self._enable_probabilistic_draft_probs or sampling_metadata.all_greedy:
            return stock(self, logits, sampling_metadata)
        return sample(logits, sampling_metadata, generators, self.use_fp64_gumbel)

    setattr(_sample_from_logits, _MARK, True)
    SpecDecodeBaseProposer._sample_from_logits = _sample_from_logits
