"""Every argument of stage_window and argmax_rows: what is wrong is said before anything runs, by name.

Each change of one argument of a valid call must raise TypeError or ValueError whose message begins with the
argument's name, and the outputs must be as before.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from nwor import ops
from tests.ops.wrong_arguments import Change, alter, constant, dtype_of, elsewhere, expanded, strided, wider

LISTS = ("keys", "values", "staged_keys", "staged_values")
STAGE: list[tuple[Change, str]] = [
    (constant([]), "is empty"),
    (lambda some: [*some, some[0]], "has 3 tensors, wanted 2"),
    (lambda some: [some[0], some[1][0]], "wanted 3 dimensions"),
    (lambda some: [some[0], some[1][:, :1]], "shape is"),
    (lambda some: [some[0], some[1].half()], "dtype is torch.float16"),
    (lambda some: [some[0], elsewhere(some[1])], "device is meta"),
    (lambda some: [some[0], strided(some[1])], "wanted 1 in the last dimension"),
    (lambda some: [some[0], 3], "is int, wanted a tensor"),
]


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize(("change", "message"), STAGE, ids=[message for _, message in STAGE])
def test_stage_window(name: str, change: Change, message: str, device: torch.device) -> None:
    arguments: dict[str, Any] = {
        one: [torch.zeros(6, 2, 16, device=device) for _ in range(2)] for one in LISTS
    }
    arguments["num_tokens"] = torch.tensor([3], dtype=torch.int32, device=device)
    arguments[name] = change(arguments[name])
    if name == "keys" and "has 3" in message:
        name, message = "values", "has 2 tensors, wanted 3"
    with pytest.raises((TypeError, ValueError), match=rf"^{name}[^:]*: .*{re.escape(message)}"):
        ops.stage_window(**arguments)


@pytest.mark.parametrize("name", ["staged_keys", "staged_values"])
def test_staged_rows_in_one_place(name: str, device: torch.device) -> None:
    arguments: dict[str, Any] = {one: [torch.ones(6, 2, 16, device=device)] for one in LISTS}
    arguments["num_tokens"] = torch.tensor([3], dtype=torch.int32, device=device)
    arguments[name] = [expanded(torch.zeros(6, 2, 16, device=device))]
    with pytest.raises(ValueError, match=rf"^{name}\[0\]: strides are \[0, 16, 1\].*a place of its own"):
        ops.stage_window(**arguments)
    assert not arguments[name][0].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_more_layers_than_one_launch_takes() -> None:
    lists = [[torch.zeros(6, 2, 16, device="cuda")] * 257 for _ in LISTS]
    with pytest.raises(ValueError, match=r"^keys: has 257 tensors, wanted at most 256 on CUDA"):
        ops.stage_window(*lists, torch.tensor([3], dtype=torch.int32, device="cuda"))


@pytest.mark.parametrize("count", [torch.tensor([3]), torch.zeros(2, dtype=torch.int32), 3], ids=str)
def test_stage_window_count(count: Any, device: torch.device) -> None:
    lists = [[torch.zeros(6, 2, 16, device=device)] for _ in LISTS]
    with pytest.raises((TypeError, ValueError), match=r"^num_tokens: "):
        ops.stage_window(*lists, count.to(device) if isinstance(count, torch.Tensor) else count)


ARGMAX: list[tuple[str, Change, str]] = [
    ("logits", constant([1.0]), "is list, wanted a tensor"),
    ("logits", lambda t: t[0], "wanted 2 dimensions"),
    ("logits", lambda t: t[:, :0], r"shape is \[3, 0\], wanted 1 to 2147483647 columns"),
    ("logits", dtype_of(torch.float64), "dtype is torch.float64"),
    ("logits", strided, "wanted 1 in the last dimension"),
    ("output", constant(None), "is NoneType, wanted a tensor"),
    ("output", lambda t: t[:2], r"shape is \[2\], wanted \[3\]"),
    ("output", wider, r"shape is \[6\], wanted \[3\]"),
    ("output", dtype_of(torch.int32), "dtype is torch.int32, wanted torch.int64"),
    ("output", strided, "strides are"),
    ("output", elsewhere, "device is meta"),
    ("workspace", lambda t: t[:5], r"shape is \[5\], wanted at least 6 elements"),
    ("workspace", dtype_of(torch.uint8), "dtype is torch.uint8, wanted torch.int64"),
    ("workspace", strided, "strides are"),
    ("workspace", elsewhere, "device is meta"),
]


@pytest.mark.parametrize(("name", "change", "message"), ARGMAX, ids=lambda x: x if isinstance(x, str) else "")
def test_argmax_rows(name: str, change: Change, message: str, device: torch.device) -> None:
    output = torch.full((3,), -7, device=device)
    arguments = {
        "logits": torch.rand(3, 40, device=device),
        "output": output,
        "workspace": ops.make_argmax_workspace(3, device),
    }
    alter(arguments, name, change, device)
    with pytest.raises((TypeError, ValueError), match=f"^{name}: .*{message}"):
        ops.argmax_rows(**arguments)
    # The op itself refuses it too, where the checks in Python are left out. (Meta tensors go to its fake.)
    if message != "device is meta":
        with pytest.raises(RuntimeError):
            torch.ops.nwor.argmax_rows(*arguments.values())
    assert (output == -7).all()


def test_argmax_workspace_of_no_size() -> None:
    with pytest.raises(ValueError, match=r"^rows: is -1"):
        ops.make_argmax_workspace(-1, "cpu")
