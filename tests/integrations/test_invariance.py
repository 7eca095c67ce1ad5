"""A sequence gets the same logits however it is cut, ordered, padded, placed and accompanied."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch

from hal.integrations.transformers import Runner, load, load_weights, open_folder
from hal.runtime.batch import Batch
from support.models import DRIVEN, folder_of, make_model, save_model, solo, whole
from support.serving import ROWS, TOKENS, Sample, feed, prompts_of

TOLERANCE = 1e-4
"""Of the largest logit of the reference row."""

SEQUENCES = prompts_of((19, 12, 23), seed=4)
"""Random tokens; a seed may hit an output near zero, whose norm makes rounding large everywhere."""

CHECKPOINTS = 4
"""Random models that a family's rounding is judged over."""

VARIANTS: tuple[tuple[str, dict[str, object]], ...] = (
    ("bailing_hybrid", {"kda_safe_gate": False}),
    ("bamba", {"time_step_limit": [0.05, 0.3]}),
    ("falcon_h1", {"mamba_rms_norm": True}),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    ("jamba", {"mamba_conv_bias": False, "attn_layer_offset": 1}),
    ("lfm3", {"conv_bias": True}),
    ("mamba2", {"n_groups": 1}),
    ("minimax", {"layer_types": ["full_attention", "linear_attention"] * 2}),
    ("nemotron_h", {"hybrid_override_pattern": "M-M*E", "time_step_min": 0.3}),
    ("zamba", {"n_mamba_heads": 4}),
    ("zamba2", {"num_mem_blocks": 2, "time_step_min": 0.3}),
    ("zaya", {"attention_bias": True, "cca_time0": 3, "cca_time1": 4}),
    ("zaya", {"layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 5}),
)
"""What a family's own entries change: gates, limits, norms, biases, heads, widths, windows."""


@cache
def runner(name: str, root: Path, dtype: str | None = None) -> Runner:
    """A family's runner with room for pads; every test begins its sequences anew."""
    folder = open_folder(folder_of(name, root), "cpu", dtype)
    return load(folder, slots=ROWS, max_batch=ROWS, max_tokens=TOKENS, max_len=32)


@cache
def wanted(name: str) -> list[torch.Tensor]:
    """What transformers gives for each whole sequence by itself."""
    model = make_model(name)
    return [whole(model, tokens) for tokens in SEQUENCES]


def errors(got: dict[Sample, torch.Tensor], want: list[torch.Tensor]) -> list[float]:
    """The error of each sample by the largest logit of its reference."""
    rows = [(logits, want[i][position]) for (i, position), logits in got.items()]
    return [((row - want).abs().max() / want.abs().max()).item() for row, want in rows]


@pytest.mark.parametrize("piece", [1, 2, 3, None])
@pytest.mark.parametrize("name", DRIVEN)
def test_any_pieces_order_slots_and_pads_give_the_logits_of_the_whole_sequence(
    root: Path, name: str, piece: int | None
) -> None:
    got = feed(runner(name, root), SEQUENCES, piece, Random(f"{name} {piece}"))
    assert len(got) >= sum(len(s) for s in SEQUENCES) // 4
    assert max(errors(got, wanted(name))) <= TOLERANCE


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_so_do_models_with_other_entries(
    tmp_path: Path, name: str, changes: dict[str, object]
) -> None:
    """A dt limit binds in every piece, though transformers drops it where it decodes."""
    model = make_model(name, **changes)
    want = [whole(model, tokens) for tokens in SEQUENCES]
    folder = open_folder(save_model(model, tmp_path), "cpu")
    bound = load(folder, slots=ROWS, max_batch=ROWS, max_tokens=TOKENS, max_len=32)
    got = feed(bound, SEQUENCES, None, Random(name))
    assert max(errors(got, want)) <= TOLERANCE


@pytest.mark.parametrize("name", DRIVEN)
def test_each_state_that_is_lost_on_resume_changes_tokens(
    root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation that shows these tests see the states: one is zeroed before each resume."""
    bound = runner(name, root)
    begin, states = bound.backend.begin, bound.backend.selection.states
    for lost in {spec.name for spec in states}:

        def forgetful(batch: Batch, lost: str = lost) -> None:
            for spec in states:
                if spec.name == lost:
                    tensor = bound.backend.pool.tensors(spec.layer)[lost]
                    tensor[[slot for slot in batch.src if slot >= 0]] = 0
            begin(batch)

        monkeypatch.setattr(bound.backend, "begin", forgetful)
        got = feed(bound, SEQUENCES, 1, Random(name))
        resumed = {(i, at): logits for (i, at), logits in got.items() if at}
        changed = [got[i, at].argmax() != wanted(name)[i][at].argmax() for i, at in resumed]
        assert sum(changed) >= len(changed) / 10
        assert min(errors(resumed, wanted(name))) > 100 * TOLERANCE


@pytest.mark.parametrize("name", DRIVEN)
def test_bfloat16_is_as_near_to_float32_as_transformers_alone(root: Path, name: str) -> None:
    """Both run the same tokens: theirs by generate, prompt first, with the tokens forced.

    The errors of several checkpoints count together: a rounding may pick another expert in one
    run and not in the other, and such a position is wholly other, in theirs as often as in ours.
    """
    pairs = [pair for seed in range(CHECKPOINTS) for pair in bfloat16_errors(root, name, seed)]
    mine, theirs = torch.tensor(pairs).T
    assert 0 < mine.square().mean().sqrt() <= 2 * theirs.square().mean().sqrt()
    assert mine.max() <= 2 * theirs.max()


def bfloat16_errors(root: Path, name: str, seed: int) -> Iterator[tuple[float, float]]:
    """Of every position, the relative error of ours and of theirs against theirs in float32."""
    folder = folder_of(name, root, seed)
    opened = open_folder(folder, "cpu", "bfloat16")
    bound = load(opened, slots=ROWS, max_batch=ROWS, max_tokens=TOKENS, max_len=32)
    alone, exact = load_weights(open_folder(folder, "cpu", "bfloat16")), make_model(name, seed)
    begin, ours = 4, feed(bound, SEQUENCES, 1, Random(name))
    for i, tokens in enumerate(SEQUENCES):
        want = whole(exact, tokens)
        count, forced = len(tokens) - begin + 1, [*tokens[begin:], 5]
        _, logits = solo(alone, tokens[:begin], count, forced)
        for position, theirs in enumerate(logits, begin - 1):
            right, norm = want[position], want[position].norm()
            mine = (ours[i, position] - right).norm() / norm
            yield mine.item(), ((theirs - right).norm() / norm).item()
