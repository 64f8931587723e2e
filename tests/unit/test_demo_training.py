"""The training code of the demo model, in miniature: it learns, and shortcuts equal plain computation."""

from __future__ import annotations

import random

import pytest
import torch

from server.demo.training import corpus, tokenizer
from server.demo.training.acceptance import greedy_acceptance
from server.demo.training.export import export_head, export_target, load_target
from server.demo.training.generate import continue_prompts, greedy_after, new_caches
from server.demo.training.heads import EagleHead, draft_losses
from server.demo.training.model import Target, TargetShape, rotate
from server.demo.training.optim import Optimizers, Schedule
from server.demo.training.train_target import loss_of, windows

SHAPE = TargetShape(
    vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=96,
)  # fmt: skip


def stream(length: int) -> torch.Tensor:
    """A text that can be learned: words of a small vocabulary in random order."""
    rng = random.Random(3)
    words = [[rng.randrange(48) for _ in range(rng.randrange(3, 8))] for _ in range(12)]
    out: list[int] = []
    while len(out) < length:
        out += rng.choice(words)
    return torch.tensor(out[:length], dtype=torch.int16)


@pytest.fixture(scope="module")
def trained() -> tuple[Target, list[float]]:
    torch.manual_seed(0)
    target = Target(SHAPE)
    target.initialize(torch.Generator().manual_seed(1))
    tokens = stream(4000)
    batches = windows(tokens, torch.tensor([0]), 8, 48, torch.Generator().manual_seed(2))
    schedule, optimizers, losses = Schedule(60, 0, 5, 0.5), Optimizers(target, 1e-2), []
    for step in range(60):
        loss = loss_of(target, next(batches))
        loss.backward()
        optimizers.step(schedule.factor(step))
        losses.append(loss.item())
    return target.requires_grad_(False), losses


@pytest.fixture(scope="module", params=[(), (1, 2, 3)], ids=["eagle", "eagle3"])
def head(
    request: pytest.FixtureRequest, trained: tuple[Target, list[float]]
) -> tuple[EagleHead, list[float]]:
    target = trained[0]
    head = EagleHead(SHAPE, request.param)
    head.initialize(torch.Generator().manual_seed(4))
    batches = windows(stream(4000), torch.tensor([0]), 8, 40, torch.Generator().manual_seed(5))
    schedule, optimizers, losses = Schedule(60, 0, 5, 0.5), Optimizers(head, 1e-2), []
    for step in range(60):
        ids = next(batches)
        loss, _ = draft_losses(head, target, ids, *target.hidden_states(ids), 3)
        loss.mean().backward()
        optimizers.step(schedule.factor(step))
        losses.append(loss.mean().item())
    return head.requires_grad_(False), losses


def test_target_loss_falls(trained: tuple[Target, list[float]]) -> None:
    losses = trained[1]
    assert losses[-1] < 0.6 * losses[0]


def test_head_loss_falls(head: tuple[EagleHead, list[float]]) -> None:
    losses = head[1]
    assert losses[-1] < 0.8 * losses[0]


def draft_one_by_one(target: Target, head: EagleHead, ids: list[int], sampled: int, steps: int) -> list[int]:
    """Draft as an engine does: one pass over the context, then token by token, keys and values appended.

    ``ids`` are the tokens that the target has processed, ``sampled`` is the one that it sampled after them.
    """
    final, hidden = target.hidden_states(torch.tensor([ids]))
    state = head.features(final, hidden)[0]
    tokens, keys, values, drafts = [*ids[1:], sampled], [], [], []
    layer = head.layers[0]
    attention = layer.self_attn
    position = 0
    for _ in range(steps):
        outputs = []
        for row in range(state.shape[0]):
            embed = target.model.embed_tokens.weight[tokens[row]]
            if head.eagle3:
                residual = state[row]
                x = torch.cat((layer.input_layernorm(embed), layer.hidden_norm(residual)))
            else:
                x = residual = head.fc(torch.cat((embed, state[row])))
            cos, sin = target.cos[position : position + 1], target.sin[position : position + 1]
            position += 1
            q = rotate(attention.q_proj(x).view(1, 4, 1, 8), cos, sin)[0, :, 0]
            keys.append(rotate(attention.k_proj(x).view(1, 2, 1, 8), cos, sin)[0, :, 0])
            values.append(attention.v_proj(x).view(2, 8))
            mixed = []
            for i in range(4):
                score = torch.stack([q[i] @ k[i // 2] for k in keys]) / 8**0.5
                mixed.append(score.softmax(0) @ torch.stack([v[i // 2] for v in values]))
            residual = residual + attention.o_proj(torch.cat(mixed))
            outputs.append(residual + layer.mlp(layer.post_attention_layernorm(residual)))
        last = outputs[-1]
        predicted = head.norm(last) if head.eagle3 else last
        drafts.append(int(target.logits(predicted).argmax()))
        state, tokens = last[None], [drafts[-1]]
    return drafts


def test_acceptance_equals_drafting_token_by_token(
    trained: tuple[Target, list[float]], head: tuple[EagleHead, list[float]]
) -> None:
    """Claim: one unrolled pass counts what a chain drafted and verified token by token counts."""
    target, tokens = trained[0], stream(4000)
    prompts = [tokens[i : i + n].tolist() for i, n in ((7, 12), (100, 9), (555, 15))]
    ids, lengths = greedy_after(target, prompts, 16 + 4)
    drafts = accepted = 0
    for row, given in enumerate(lengths.tolist()):
        text = ids[row].tolist()
        anchor = given - 1
        while anchor < given + 16 - 2:
            chain = draft_one_by_one(target, head[0], text[: anchor + 1], text[anchor + 1], 3)
            count = 0
            while count < 3 and chain[count] == text[anchor + 2 + count]:
                count += 1
            drafts, accepted, anchor = drafts + 1, accepted + count, anchor + count + 1
    found = greedy_acceptance(target, head[0], ids, lengths, 16, 3)
    assert (found.drafts, found.accepted) == (drafts, accepted)
    assert 0 < accepted < 3 * drafts


def test_cached_decoding_equals_plain_decoding(trained: tuple[Target, list[float]]) -> None:
    target, tokens = trained[0], stream(4000)
    prompts = [tokens[i : i + 37].tolist() for i in (3, 900)]
    plain, _ = greedy_after(target, prompts, 12)
    caches = new_caches(target, 2, 64, torch.device("cpu"), torch.float32)
    cached = continue_prompts(target, torch.tensor(prompts), 49, torch.zeros(2, 1), caches)
    assert torch.equal(plain, cached)


def test_head_never_looks_ahead(
    trained: tuple[Target, list[float]], head: tuple[EagleHead, list[float]]
) -> None:
    """Changing a token changes no draft state whose anchor and drafted tokens lie before it."""
    target = trained[0]
    ids = stream(40).long()[None]
    other = ids.clone()
    other[0, 20] = (other[0, 20] + 1) % 48
    outs = []
    for x in (ids, other):
        outs.append(head[0].unroll(target, x, head[0].features(*target.hidden_states(x)), 3))
    for j in range(3):
        same = (outs[0][j][0] - outs[1][j][0]).abs().amax(-1) < 1e-5
        assert bool(same[: 19 - j].all())
        assert not bool(same[19 - j])


def test_export_round_trips(tmp_path, trained: tuple[Target, list[float]], head) -> None:
    words = tokenizer.train(["def f(x):\n    return x\n"] * 50, 300)
    export_target(trained[0], words, tmp_path / "model")
    export_head(head[0], tmp_path / "draft")
    again = Target(SHAPE)
    load_target(again, tmp_path / "model")
    for name, weight in trained[0].named_parameters():
        assert torch.equal(again.get_parameter(name), weight.bfloat16().float())
    assert (tmp_path / "draft" / "config.json").is_file()


def test_schedule_warms_up_holds_and_decays() -> None:
    schedule = Schedule(100, 0, 10, 0.5)
    factors = [schedule.factor(i) for i in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[10:50] == [1.0] * 40
    assert factors[75] == pytest.approx(0.5)
    assert schedule.done(100)
    assert not schedule.done(99)
    with pytest.raises(ValueError, match="steps or of minutes"):
        Schedule(0, 0, 10, 0.5)


def test_held_out_modules_stay_out_of_the_corpus(tmp_path) -> None:
    for name in ("wave", "other"):
        (tmp_path / f"{name}.py").write_text(
            "".join(
                f"def {name}_{i}():\n    return 'a line that is long enough {name} {i}'\n" for i in range(20)
            )
        )
    (tmp_path / "copy_of_it.py").write_text((tmp_path / "wave.py").read_text() + "# changed\n")
    (tmp_path / "again.py").write_text((tmp_path / "other.py").read_text())
    found = corpus.Corpus(["wave"], tmp_path)
    package = corpus.Package("p", "1", "MIT")
    for path in sorted(tmp_path.glob("*.py")):
        found.add(package, path, path.name)
    assert [s.path for s in found.sources] == ["again.py"]
    assert found.kept_out == 2


@pytest.mark.parametrize(
    ("licence", "expected"),
    [
        ("MIT", True),
        ("BSD-3-Clause AND 0BSD AND MIT AND Zlib", True),
        ("Apache Software License", True),
        ("MPL-2.0 AND MIT", False),
        ("GNU Lesser General Public License v3 (LGPLv3)", False),
        ("LicenseRef-NVIDIA-Proprietary", False),
        ("", False),
    ],
)
def test_licences(licence: str, expected: bool) -> None:
    assert corpus.is_permissive(licence) is expected


def test_chat_pairs_come_from_documented_functions() -> None:
    code = (
        "class A:\n    def add(self, a, b=1):\n"
        '        """Add two numbers, the second being one by default."""\n'
        "        total = a + b\n        # the sum of both numbers\n        return total\n"
    )
    ((ask, answer),) = corpus.chat_pairs(code)
    assert (
        ask
        == "Write a Python function `add(self, a, b=1)`. Add two numbers, the second being one by default."
    )
    assert answer.startswith("```python\ndef add(self, a, b=1):\n    ")
    assert answer.endswith("    return total\n```")


def test_losses_are_cross_entropies(trained: tuple[Target, list[float]]) -> None:
    target, batch = trained[0], stream(4000)[:98].long().view(2, 49)
    logp = target(batch[:, :-1]).log_softmax(-1)
    rows = [-logp[i, t, batch[i, t + 1]] for i in range(2) for t in range(48)]
    assert torch.allclose(loss_of(target, batch), torch.stack(rows).mean(), atol=1e-5)
