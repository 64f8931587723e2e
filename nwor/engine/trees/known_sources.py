"""vLLM's code that trees stand for, and whether the installed one is known.

A fast path steps aside where vLLM's code is another. Trees cannot: without what takes the place of this code
there are none. So the engine does not start.
"""

from __future__ import annotations

from nwor.engine.fastpath.stock import Sources, changed
from nwor.errors import ConfigError

_SPEC = "vllm.v1.worker.gpu.spec_decode"
_SAMPLER = f"{_SPEC}.rejection_sampler"
_PASSES = f"{_SPEC}.target_dependent_ar.speculator"

#: What the sampler and the drafter of trees take the place of, repeat, or have to find as it is.
SOURCES: Sources = {
    (_SAMPLER, "RejectionSampler._verify"): ("94c9ec2b06f73ad5", "10bb2c9b9812d2a3"),
    (_SAMPLER, "RejectionSampler._verify_in_chunks"): ("52ea56902342bab9",),
    (_SAMPLER, "RejectionSampler._get_logprobs_tensors"): ("fda36e48c992706d",),
    (_SAMPLER, "_gather_draft_sampled_kernel"): ("dd3af44592a1f5cf",),
    (f"{_SPEC}.speculator", "DraftModelSpeculator.sample_draft"): ("f729e99b44320e54", "f8c982c90ba2c1f7"),
    (_PASSES, "TargetDependentARSpeculator._run_model"): ("e50d6a230099694b", "8a7a506a9deaf39a"),
    (_PASSES, "TargetDependentARSpeculator._generate_draft"): ("c7df2171dac86ad7",),
    (_PASSES, "TargetDependentARSpeculator._generate_fused_drafts"): ("85d15187b8c6a2f4",),
    (_PASSES, "TargetDependentARSpeculator._multi_step_decode"): ("46f53dc36c6a238c",),
    (_PASSES, "TargetDependentARSpeculator._fused_multi_step_decode"): ("d4567aafebdd44f0",),
    (_PASSES, "_prepare_decode_inputs_kernel"): ("3d1d578a2ad99a42",),
}


def check() -> None:
    """Refuse a vLLM whose code is another.

    Raises:
        ConfigError: with what is another, and what to do.

    """
    reason = changed(SOURCES)
    if reason is not None:
        raise ConfigError(
            f"trees of draft tokens are not possible here: of vLLM's code that they stand for, {reason}; "
            "install a known version of vLLM, or draft chains"
        )
