"""The front end's output processor: what an aborted request is answered with."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from server.api.output_processor import MendedOutputProcessor

PROMPT = [5, 6, 7, 8]


def waiting_request(kind: RequestOutputKind, **params: Any) -> tuple[OutputProcessor, RequestOutputCollector]:
    """Return a processor with one request that has computed nothing yet, and where its outputs arrive."""
    request = EngineCoreRequest(
        request_id="inner",
        external_req_id="outer",
        prompt_token_ids=PROMPT,
        mm_features=None,
        sampling_params=SamplingParams(output_kind=kind, detokenize=False, **params),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    processor = OutputProcessor(tokenizer=None, log_stats=False)
    processor.__class__ = MendedOutputProcessor
    outputs = RequestOutputCollector(kind, "inner")
    processor.add_request(request, None, queue=outputs)
    return processor, outputs


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("by", ["engine", "inner", "outer"])
@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
def test_an_aborted_prompt_has_an_entry_for_each_token(kind: RequestOutputKind, by: str, flat: bool) -> None:
    processor, outputs = waiting_request(kind, prompt_logprobs=2, flat_logprobs=flat)
    if by == "engine":
        ended = EngineCoreOutput(request_id="inner", new_token_ids=[], finish_reason=FinishReason.ABORT)
        processor.process_outputs([ended])
    else:
        processor.abort_requests([by], internal=by == "inner")
    output: Any = outputs.get_nowait()
    assert output.outputs[0].finish_reason == "abort"
    assert len(output.prompt_logprobs) == len(PROMPT)
    assert not any(output.prompt_logprobs[index] for index in range(len(PROMPT)))


def test_an_aborted_request_without_prompt_logprobs_gets_none() -> None:
    processor, outputs = waiting_request(RequestOutputKind.FINAL_ONLY)
    processor.abort_requests(["outer"], internal=False)
    output: Any = outputs.get_nowait()
    assert output.prompt_logprobs is None
