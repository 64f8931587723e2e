"""vLLM's FlashInfer backend, extended: see :mod:`nwor.engine.attention.staged_attention`.

The cache has FlashAttention's shape. NHD and HND differ by strides alone, and on compute capability 10 vLLM
takes HND. Its metadata splits a step into decodes and prompts and cannot be cut:
:mod:`nwor.engine.attention.step_metadata` has it built for the rows behind the windows.
"""

from __future__ import annotations

from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flashinfer import (
    FlashInferBackend,
    FlashInferImpl,
    FlashInferMetadataBuilder,
)

from nwor.engine.attention.extended_backend import ExtendedBackend
from nwor.engine.attention.staged_attention import StagedAttention
from nwor.engine.attention.step_metadata import AttendsOnDemand, BuildsOnDemand
from nwor.engine.eligibility import check_flashinfer


class NworFlashInferImpl(StagedAttention, AttendsOnDemand, FlashInferImpl):
    """Stock attention of a layer, except for the rows of a window that is being staged."""


class NworFlashInferMetadataBuilder(BuildsOnDemand, FlashInferMetadataBuilder):
    """The stock builder, asked for the part of a step that is not staged."""

    def nwor_replayed(self, common: CommonAttentionMetadata) -> bool:
        """Return whether a full graph may replay the step's plan; TensorRT-LLM's kernels need none."""
        mode = self.vllm_config.compilation_config.cudagraph_mode
        if self.flashinfer_trtllm_api_decode_kernel is not None or mode is None:
            return False
        longest, rows = common.max_query_len, common.num_actual_tokens
        return (longest == 1 or rows == common.num_reqs * longest) and bool(mode.has_full_cudagraphs())


class NworFlashInferBackend(ExtendedBackend, FlashInferBackend):
    """The stock backend with the classes above."""

    nwor_impl = NworFlashInferImpl
    nwor_builder = NworFlashInferMetadataBuilder
    nwor_check = staticmethod(check_flashinfer)
    nwor_untested = "on a GPU other than an H200"
