"""The torch ops: attention over uncommitted windows, and moving tokens in and out of paged caches.

They know nothing of an engine. Importing this package loads the compiled library, or raises
:class:`~nwor.ops.library.LibraryError`, which says which file is missing and what to do.
"""

from nwor.ops.library import LibraryError
from nwor.ops.registry import LIBRARIES  # loads the libraries; the modules below need them

from nwor.ops.attention import MAX_WINDOW, verify_attention, verify_attention_workspace_size  # isort: skip
from nwor.ops.argmax import argmax_rows, make_argmax_workspace
from nwor.ops.attention_plan import make_verify_plan, plan_verify_attention
from nwor.ops.commit_call import PreparedCommit
from nwor.ops.layer_table import LayerTables, make_cache_table, make_layer_table
from nwor.ops.slots import commit_window, log_slots, make_slot_log, restore_slots
from nwor.ops.staging import stage_window

__all__ = [
    "LIBRARIES",
    "MAX_WINDOW",
    "LayerTables",
    "LibraryError",
    "PreparedCommit",
    "argmax_rows",
    "commit_window",
    "log_slots",
    "make_argmax_workspace",
    "make_cache_table",
    "make_layer_table",
    "make_slot_log",
    "make_verify_plan",
    "plan_verify_attention",
    "restore_slots",
    "stage_window",
    "verify_attention",
    "verify_attention_workspace_size",
]
