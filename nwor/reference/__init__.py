"""The ops in plain torch: slow, exact, and independent of the compiled code. What the tests compare with."""

from nwor.reference.attention import verify_attention
from nwor.reference.fp8 import Rounding, dequantize, quantize
from nwor.reference.slots import commit_window, log_slots, restore_slots, stage_window

__all__ = [
    "Rounding",
    "commit_window",
    "dequantize",
    "log_slots",
    "quantize",
    "restore_slots",
    "stage_window",
    "verify_attention",
]
