"""Binding touches one instance, all of its linear layers, and says so when it cannot."""

from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

import hal
from hal.errors import HalError, StepOrderError
from hal.integrations.transformers import Runner, load, open_folder
from hal.integrations.transformers import binding as binding_module
from hal.integrations.transformers.mixers import MIXERS, uses
from hal.integrations.transformers.seams import CONV, DELTA
from hal.integrations.transformers.witness import Witness
from hal.options import Options
from hal.runtime.backend import Backend
from hal.selection import choose
from support import models
from support.models import CONFIGS, folder_of, make_model, save_model
from support.serving import prompts_of, runner_of, serve

BOTH = ("lfm2", "qwen3_5_text")
EACH = ("falcon_h1", "jamba", "minimax", "zaya", *BOTH)
"""One of each kind of seam, and of mixers whose forward is replaced."""


def backend_of(name: str) -> Backend:
    selection = choose("cpu", CONFIGS / f"{name}.json", Options(ready_gates=True))
    return selection.backend(slots=3, max_batch=3, max_tokens=9)


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([[5, 6, 7, 8]]), use_cache=False).logits


def mixers_of(model: nn.Module) -> Iterator[nn.Module]:
    names = frozenset(name for how in MIXERS.values() for name in how.seams)
    return (module for module in model.modules() if uses(module, names))


@pytest.mark.parametrize("name", EACH)
def test_another_instance_of_the_same_config_object_stays_untouched(name: str) -> None:
    first = make_model(name)
    second = type(first)(first.config).eval()
    models.fan_in(second, seed=1)
    before = logits_of(second)
    Runner(first, backend_of(name), max_len=64)
    assert torch.equal(logits_of(second), before)
    assert not any("forward" in vars(module) for module in second.modules())


@pytest.mark.parametrize("name", EACH)
def test_no_name_of_transformers_is_changed(name: str) -> None:
    model = make_model(name)
    mixer = next(mixers_of(model))
    module_names = type(mixer).forward.__globals__
    before = dict(module_names), *map(_others, (AttentionInterface, AttentionMaskInterface))
    Runner(model, backend_of(name), max_len=64)
    assert module_names == before[0]
    assert before[1:] == tuple(map(_others, (AttentionInterface, AttentionMaskInterface)))


def _others(registry: type) -> dict[str, object]:
    """What a registry of transformers holds under names that are not ours."""
    entries = registry()
    return {name: entries[name] for name in entries if name != "hal_slots"}


def test_two_bound_models_take_turns_without_meeting(root: Path) -> None:
    """Steps of two runs are interleaved, one model each."""
    runners = [runner_of(folder_of(name, root, seed)) for name, seed in (("lfm2", 0), ("lfm2", 1))]
    runners.append(runner_of(folder_of("qwen3_5_text", root)))
    alone = [serve(runner, prompts_of(), 6).ids for runner in runners]
    assert alone[0] != alone[1]
    engines = [_Engine(runner) for runner in runners]
    while any([engine.step() for engine in engines]):
        pass
    assert [engine.ids for engine in engines] == alone


class _Engine:
    """An engine that is stepped by hand."""

    def __init__(self, runner: Runner) -> None:
        from hal.integrations.transformers import Engine

        self.engine = Engine(runner, max_batch=3, token_budget=9)
        self.ids: dict[int, list[int]] = {}
        for prompt in prompts_of():
            self.engine.submit(prompt, 6)

    def step(self) -> bool:
        events = self.engine.step()
        for event in events or ():
            self.ids.setdefault(event.request, []).append(event.token)
        return events is not None


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_missed_mixer_is_refused_by_its_layer(name: str, number: int) -> None:
    model = make_model(name)
    hidden = list(mixers_of(model))[number]
    layer = hidden.layer_idx

    class Renamed(type(hidden)):
        """A mixer whose forward names none of the kernels, as another version's might."""

        def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
            return hidden_states

    hidden.__class__ = Renamed
    with pytest.raises(
        HalError, match=rf"[23] of [34] stateful layers, missed are layers {layer} "
    ):
        Runner(model, backend_of(name), max_len=64)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_mixer_with_only_one_of_its_kernels_is_missed() -> None:
    model = make_model("qwen3_5_text")
    mixer = next(mixers_of(model))

    class ConvOnly(type(mixer)):
        def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
            return causal_conv1d_fn(hidden_states)  # noqa: F821 - a name is all that is looked at

    mixer.__class__ = ConvOnly
    with pytest.raises(HalError, match=r"missed are layers 0 \(gated_delta_net\)"):
        Runner(model, backend_of("qwen3_5_text"), max_len=64)


def test_a_mixer_of_a_layer_that_keeps_no_state_is_refused() -> None:
    model = make_model("lfm2", layer_types=["conv", "conv", "conv", "conv"])
    with pytest.raises(HalError, match=r"layers \[2\] have a mixer, but keep no state"):
        Runner(model, backend_of("lfm2"), max_len=64)


def test_two_mixers_of_one_layer_are_refused() -> None:
    model = make_model("lfm2")
    first, second, *_ = mixers_of(model)
    second.layer_idx = first.layer_idx
    with pytest.raises(HalError, match="layer 0 has two mixers"):
        Runner(model, backend_of("lfm2"), max_len=64)


@pytest.mark.parametrize(
    "places", [{"a": "cpu", "b": "disk"}, {"a": "disk"}, {"a": 0, "b": "cpu"}, {"a": 0, "b": 1}]
)
def test_offloaded_or_spread_weights_are_refused(places: dict[str, object]) -> None:
    model = make_model("lfm2")
    model.hf_device_map = places
    with pytest.raises(HalError, match="load it whole on one device"):
        Runner(model, backend_of("lfm2"), max_len=64)


def test_a_model_that_is_whole_on_one_device_is_bound() -> None:
    model = make_model("lfm2")
    model.hf_device_map = {"": "cpu"}
    assert serve(Runner(model, backend_of("lfm2"), max_len=64), [[5, 6]], 2).ids[0]


def _twice(mixer: nn.Module) -> None:
    forward = mixer.forward

    def again(hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        forward(hidden_states=hidden_states, **kwargs)
        return forward(hidden_states=hidden_states, **kwargs)

    mixer.forward = again


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (
            lambda mixer: setattr(mixer, "forward", lambda hidden_states, **_: hidden_states),
            rf"a step, but: layer 1 {CONV} 0 times instead of 1$",
        ),
        (_twice, "the conv of a layer ran twice in one step"),
    ],
)
def test_a_layer_that_does_not_run_exactly_once_stops_the_step(
    root: Path, spoil: Callable[[nn.Module], None], text: str
) -> None:
    runner = runner_of(folder_of("lfm2", root))
    spoil(list(mixers_of(runner.model))[1])
    with pytest.raises(HalError, match=text):
        serve(runner, [[5, 6, 7]], 2)


def test_the_witness_names_what_was_missed_and_forgets_the_last_step() -> None:
    witness = Witness(Counter({(0, "conv"): 1, (3, "scan"): 2}))
    assert [witness.note(*seam) for seam in ((0, "conv"), (3, "scan"), (3, "scan"))] == [0, 0, 1]
    witness.check()
    witness.begin()
    assert witness.note(3, "scan") == 0
    with pytest.raises(HalError, match=r"layer 0 conv 0 times instead of 1, .* 1 times .* of 2$"):
        witness.check()
    witness.note(5, "conv")
    with pytest.raises(HalError, match=r"layer 5 conv 1 times instead of 0$"):
        witness.check()


def test_attention_that_goes_around_the_slots_stops_the_step(root: Path) -> None:
    runner = runner_of(folder_of("lfm2", root))
    runner.model.get_decoder().config._attn_implementation = "eager"
    with pytest.raises(HalError, match="attention ran 0 times over the slots, expected 1"):
        serve(runner, [[5, 6, 7]], 2)


@pytest.mark.parametrize("name", BOTH)
def test_a_bound_model_runs_in_a_step_alone(root: Path, name: str) -> None:
    runner = runner_of(folder_of(name, root))
    with pytest.raises(StepOrderError):
        logits_of(runner.model)
    serve(runner, [[5, 6]], 2)
    runner.backend.begin(hal.Batch(hal.Mode.EXTEND, [4], [0], [-1], [1]))
    with pytest.raises(StepOrderError, match=r"inside Runner\.step alone"):
        logits_of(runner.model)


@pytest.mark.parametrize("mode", ["DECODE", "MIXED"])
def test_tokens_of_pads_change_nothing_and_too_few_are_refused(root: Path, mode: str) -> None:
    runner = runner_of(folder_of("lfm2", root))
    got = []
    for pad in (5, 150):
        runner.step(hal.Batch(hal.Mode.EXTEND, [2], [0], [-1], [1]), [7, 8], [0])
        if mode == "DECODE":
            rows = ([0, 1, 1], [0, 2, 0], [-1, 1, -1], [-1, 1, -1])
            got.append(runner.step(hal.Batch(hal.Mode.DECODE, *rows), [pad, 9, pad], [1]))
        else:
            rows = ([0, 1], [6, 2], [3, 1], [3, 1])
            got.append(runner.step(hal.Batch(hal.Mode.MIXED, *rows), [9, pad, pad], [1]))
    assert torch.equal(*got)
    with pytest.raises(ValueError, match="step: 1 tokens, the batch has 2"):
        runner.step(hal.Batch(hal.Mode.EXTEND, [2], [0], [-1], [1]), [7], [0])


@pytest.mark.parametrize(("src", "dst"), [(-1, -1), (1, -1)])
def test_a_row_that_only_scores_is_refused(root: Path, src: int, dst: int) -> None:
    runner = runner_of(folder_of("lfm2", root))
    batch = hal.Batch(hal.Mode.EXTEND, [1], [1 if src > 0 else 0], [src], [dst])
    with pytest.raises(ValueError, match=rf"row 0 goes from slot {src} to {dst}, expected one"):
        runner.step(batch, [5], [0])


@pytest.mark.parametrize("name", BOTH)
def test_a_conv_with_another_activation_is_refused(name: str) -> None:
    model = make_model(name)
    runner = Runner(model, backend_of(name), max_len=64)
    for mixer in mixers_of(model):
        seam = mixer.forward.__func__.__globals__[CONV]
        with pytest.raises(HalError, match="its conv has activation gelu, hal bound"):
            seam(torch.zeros(1, 4, 1), torch.zeros(4, 3), activation="gelu")
    assert serve(runner, [[5]], 1).ids


@pytest.mark.parametrize("name", ["cu_seqlens", "seq_idx"])
def test_rows_that_a_mixer_packs_by_itself_are_refused(name: str) -> None:
    model = make_model("qwen3_5_text")
    Runner(model, backend_of("qwen3_5_text"), max_len=64)
    names = next(mixers_of(model)).forward.__func__.__globals__
    zeros = torch.zeros(1, 1, 1, 1)
    with pytest.raises(HalError, match=f"layer 0: {name} was given"):
        names[CONV](torch.zeros(1, 4, 1), zeros, None, "silu", **{name: zeros})
    with pytest.raises(HalError, match=f"layer 0: {name} was given"):
        names[DELTA](
            *(zeros,) * 5, use_qk_l2norm_in_kernel=True, initial_state=None, **{name: zeros}
        )
    with pytest.raises(HalError, match="normed q and k"):
        names[DELTA](*(zeros,) * 5)


def test_seams_left_out_of_the_table_refuse_the_whole_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(binding_module, "MIXERS", {})
    with pytest.raises(HalError, match=r"0 of 3 stateful layers, missed are layers 0 .*1 .*3 "):
        Runner(make_model("lfm2"), backend_of("lfm2"), max_len=64)


def test_configs_nested_in_a_wrapper_stay_one_object_after_binding() -> None:
    model = make_model("lfm2_vl")
    before = deepcopy(model.config)
    Runner(model, backend_of("lfm2_vl"), max_len=64)
    decoder = model.get_decoder()
    assert model.config.text_config is decoder.config
    assert decoder.config._attn_implementation == "hal_slots"
    assert model.config.vision_config.to_dict() == before.vision_config.to_dict()


def test_weights_can_be_bound_in_another_slot_count_than_rows(tmp_path: Path) -> None:
    folder = save_model(make_model("lfm2"), tmp_path)
    runner = load(open_folder(folder, "cpu"), slots=6, max_batch=3, max_tokens=9, max_len=64)
    assert runner.free_slots == 6
    assert len(serve(runner, prompts_of(), 3).ids) == 6
