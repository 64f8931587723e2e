"""Claim: random valid requests, several at once, get what a server without speculation gives; none ends it.

Coverage: :mod:`tests.random_requests` with a fixed seed, six requests at a time, whole and as streams.
Tolerance: none for greedy requests: texts, tokens, finish reasons, usage and the number of log-probabilities.
Seeded requests get the same twice, beside other requests each time. Others agree in their status and obey
their masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from server import demo
from tests.random_requests import Generator, RandomRequest, Seen, send
from tests.server_process import DEMO_MODEL, ServerProcess
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.long]

SEED = 20_261_126
AT_ONCE = 6
GROUPS = 16
#: Every field that the generator knows.
FIELDS = {
    "allowed_token_ids", "bad_words", "echo", "frequency_penalty", "ignore_eos",
    "include_stop_str_in_output", "input", "logit_bias", "logprob_token_ids", "logprobs",
    "max_output_tokens", "max_tokens", "messages", "min_p", "min_tokens", "model", "n",
    "presence_penalty", "prompt", "prompt_logprobs", "repetition_penalty", "response_format",
    "return_token_ids", "seed", "skip_special_tokens", "stop", "stop_token_ids", "structured_outputs",
    "temperature", "top_k", "top_logprobs", "top_p", "truncate_prompt_tokens",
}  # fmt: skip


@pytest.fixture(scope="module")
def servers(start_server: Callable[..., ServerProcess]) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    common = ("--dtype", "float32")
    tested = start_server("--demo", *common, wait=False)
    plain = (str(demo.model_path()), "--served-model-name", DEMO_MODEL, "--enforce-eager")
    reference = start_server(*plain, *common, "--kv-cache-memory-bytes", "500000000", wait=False)
    for server in (tested, reference):
        server.wait_until_ready()
    yield tested, reference
    for server in (tested, reference):
        server.kill()


def compare(request: RandomRequest, seen: Seen, again: Seen, expected: Seen) -> str | None:
    """Return what is wrong with the answers to a request; None where nothing is."""
    if seen.status >= 500 or again.status >= 500:
        return "an error of the server's"
    if request.is_refused and seen.status == 400:
        return None if "specul" in seen.message or "draft" in seen.message else "refused without its reason"
    if seen.status == 400 and expected.status == 500 and "Nothing was left" in seen.message:
        return None  # stock vLLM has no better word for it
    if seen.status != expected.status:
        return "another status"
    if seen.status != 200:
        return None
    if request.is_greedy:
        if seen.usage != expected.usage:
            return "another usage"
        return None if seen.choices == expected.choices else "another answer"
    if "seed" in request.body and seen != again:
        return "another answer to the same seed"
    allowed = set(request.body.get("allowed_token_ids", ()))
    for choice in seen.choices:
        if allowed and len(choice) > 2 and not set(choice[1]) <= allowed | {1, 6}:
            return "a token that is not allowed"
    return None


def test_random_requests(servers: tuple[ServerProcess, ServerProcess]) -> None:
    tested, reference = servers
    generator, wrong, statuses = Generator(SEED), [], {200: 0, 400: 0}
    fields: set[str] = set()
    with tested.client() as http, reference.client() as plain, ThreadPoolExecutor(3 * AT_ONCE) as pool:
        for _ in range(GROUPS):
            requests = [generator.make() for _ in range(AT_ONCE)]
            fields.update(*(request.body for request in requests))
            seen = [pool.submit(send, http, request, stream=request.stream) for request in requests]
            again = [pool.submit(send, http, request) for request in requests]
            expected = [pool.submit(send, plain, request) for request in requests]
            for request, *answers in zip(requests, seen, again, expected, strict=True):
                one, other, right = (answer.result() for answer in answers)
                statuses[one.status] = statuses.get(one.status, 0) + 1
                problem = compare(request, one, other, right)
                if problem is not None:
                    wrong.append((problem, request, one, other, right))
    assert not wrong, "\n\n".join(
        "\n  ".join(map(str, (f"{problem}: {request}", *answers))) for problem, request, *answers in wrong[:8]
    )
    assert statuses[200] > statuses[400]
    assert fields == FIELDS
    assert httpx.get(f"{tested.url}/health", timeout=10).status_code == 200
    for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
        wait_until(lambda gauge=gauge: tested.total(gauge) == 0, 30, gauge)
    assert tested.total("nwor_accounting_mismatches_total") == 0
    # Constraints that cancel out on the way are a client's; nothing else may fail.
    failed = tested.metric("nwor_failed_requests_total")
    assert {key: count for key, count in failed.items() if count and key != (("place", "constraints"),)} == {}
