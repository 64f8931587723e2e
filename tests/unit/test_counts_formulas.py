"""The arithmetic of writes, checked against the formulas written out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nwor.counts.formulas import LayerShape, WindowCounts, bytes_per_token, count_window
from nwor.modes import Mode


def test_bytes_per_token_adds_layers():
    layers = [LayerShape(8, 128, 2), LayerShape(2, 64, 1)]
    assert bytes_per_token(layers) == 2 * 8 * 128 * 2 + 2 * 2 * 64


@given(drafts=st.integers(0, 63), data=st.data(), b=st.integers(1, 1 << 20))
def test_each_mode_against_its_formula(drafts, data, b):
    accepted = data.draw(st.integers(0, drafts))
    rejected = drafts - accepted
    kw = {"draft_tokens": drafts, "accepted_tokens": accepted, "token_bytes": b}
    off = count_window(Mode.OFF, **kw)
    stage = count_window(Mode.STAGE, **kw)
    cow = count_window(Mode.COW, **kw)
    fallen = count_window(Mode.STAGE, direct_reason="mla", **kw)
    assert off.written_bytes == off.baseline_bytes == (1 + drafts) * b
    assert stage.written_bytes == (1 + accepted) * b
    assert stage.saved_bytes == rejected * b
    assert cow.saved_bytes == -(drafts + rejected) * b
    assert fallen.saved_bytes == 0
    assert fallen.direct_windows == {"mla": 1}
    for counts in (off, stage, cow, fallen):
        assert counts.rejected_tokens == rejected


def test_adding_keeps_every_field():
    total = WindowCounts()
    parts = [
        count_window(Mode.STAGE, draft_tokens=4, accepted_tokens=2, token_bytes=10),
        count_window(Mode.COW, draft_tokens=3, accepted_tokens=0, token_bytes=10),
        count_window(Mode.STAGE, draft_tokens=1, accepted_tokens=1, token_bytes=10, direct_reason="mla"),
        count_window(Mode.STAGE, draft_tokens=1, accepted_tokens=1, token_bytes=10, direct_reason="mla"),
    ]
    for part in parts:
        total.add(part)
    assert total.windows == 4
    assert total.direct_windows == {"mla": 2}
    assert total.saved_bytes == sum(part.saved_bytes for part in parts)
    assert total.accepted_tokens == 4


@pytest.mark.parametrize("accepted", [-1, 5])
def test_impossible_counts_are_refused(accepted):
    with pytest.raises(ValueError, match="accepted_tokens"):
        count_window(Mode.OFF, draft_tokens=4, accepted_tokens=accepted, token_bytes=1)
