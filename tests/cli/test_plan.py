"""A plan is arithmetic: its bytes are what the pool allocates, its bounds follow from bytes."""

import json
import struct
import subprocess
import sysconfig
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hal
from hal.capacity import RESERVE, Load, capacity, decode_bound, kv_bytes
from hal.cards import CARDS
from hal.cli.output import read_bytes, read_tokens, show_bytes
from hal.interfaces import Scratch
from hal.model import AttentionSpec, Kind, LayerSpec, ModelSpec, read
from hal.runtime.building import providers_of
from hal.runtime.pool import Pool
from hal.states import StateFormat, plan_states
from hal.weights import WeightBytes, weight_bytes
from hal_npu.scratch import scratch_of as snapshots
from support.model_configs import CONFIGS, tiny

HAL = str(Path(sysconfig.get_path("scripts")) / "hal")
FORM = StateFormat({"conv": "CW", "recurrent": "VK", "scan": "PN"}, "bfloat16", "float32")


def planned(*arguments: str) -> dict[str, Any]:
    ran = subprocess.run(
        [HAL, "plan", *arguments, "--json"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr + ran.stdout
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize(
    "name", ["qwen3_next", "lfm2", "bamba", "zaya", "falcon_h1", "kimi_linear"]
)
@pytest.mark.parametrize("slots", [1, 5])
def test_planned_state_bytes_are_what_the_pool_allocates(name: str, slots: int) -> None:
    model = read(tiny(name))
    states = plan_states(model, 1, FORM)
    found = capacity(Load(model, states, "bfloat16", 1, 128), None)
    pool = Pool(states, slots, torch.device("cpu"))
    assert pool.bytes == found.state * (slots + 1)


INTERFACES = {"conv": "conv", "hidden": "conv", "recurrent": "delta_rule", "scan": "scan"}
"""Who keeps what of a state; ZAYA's hidden state goes through a convolution of its own."""


@pytest.mark.parametrize(
    "name", ["qwen3_next", "kimi_linear", "lfm2", "bamba", "falcon_mamba", "minimax", "zaya"]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_verify_keeps_more_than_the_planned_scratch(name: str, dtype: str) -> None:
    found = hal.explain("cpu", tiny(name), dtype=dtype, speculative=hal.Speculative(3)).selection
    assert found is not None
    load = Load(found.model, found.states, dtype, 1, 64, 3)
    kept = sum(map(size_of, kept_by(found, 5, 3)))
    assert 0 < kept <= 5 * capacity(load, None).scratch


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_snapshots_in_float32_of_states_of_two_bytes_are_within_the_plan(name: str) -> None:
    """As an NPU keeps them, whatever dtype the pool has."""
    states = plan_states(read(tiny(name)), 1, FORM)
    kept = [
        scratch
        for spec in states
        for scratch in snapshots(INTERFACES[spec.name], {spec.name: spec.shape}, FORM.layouts, 5, 3)
    ]
    size = sum(map(size_of, kept))
    load = Load(read(tiny(name)), states, "bfloat16", 1, 64, 3)
    assert 0 < size <= 5 * capacity(load, None).scratch


def size_of(scratch: Scratch) -> int:
    dtype: torch.dtype = getattr(torch, scratch.dtype)
    return prod(scratch.shape) * dtype.itemsize


def kept_by(selection: hal.Selection, rows: int, width: int) -> Iterator[Scratch]:
    """What the chosen providers ask for to verify, state by state."""
    providers = providers_of(selection, selection.device)
    held: dict[int, dict[str, tuple[int, ...]]] = {}
    for spec in selection.states:
        held.setdefault(spec.layer, {})[spec.name] = spec.shape
    for shapes in held.values():
        for name, shape in shapes.items():
            interface = INTERFACES[name]
            seen = {"conv": (*shape, 1)} if name == "hidden" else shapes
            provider = providers[selection.choices[f"{interface}.verify"].provider]
            yield from provider.scratch_spec(interface, seen, rows, width)


def attention(*specs: AttentionSpec) -> ModelSpec:
    layers = tuple(LayerSpec(i, (spec.kind,), None, spec) for i, spec in enumerate(specs))
    return ModelSpec("made", layers, "bfloat16", 10, 10)


FULL = AttentionSpec(Kind.FULL_ATTENTION, 8, 2, 16)
SLIDING = AttentionSpec(Kind.SLIDING_ATTENTION, 8, 2, 16, window=100)
LATENT = AttentionSpec(Kind.FULL_ATTENTION, 8, 8, 24, latent=72)


@pytest.mark.parametrize(
    ("spec", "tp", "context", "expected"),
    [
        (FULL, 1, 10, 10 * 2 * 2 * 16 * 2),
        (FULL, 2, 10, 10 * 2 * 1 * 16 * 2),
        (FULL, 8, 10, 10 * 2 * 1 * 16 * 2),
        (SLIDING, 1, 50, 50 * 2 * 2 * 16 * 2),
        (SLIDING, 1, 5000, 100 * 2 * 2 * 16 * 2),
        (LATENT, 1, 10, 10 * 72 * 2),
        (LATENT, 4, 10, 10 * 72 * 2),
    ],
)
def test_kv_bytes_of_full_sliding_and_latent_attention(
    spec: AttentionSpec, tp: int, context: int, expected: int
) -> None:
    assert kv_bytes(Load(attention(spec), (), "bfloat16", tp, context)) == expected
    two = Load(attention(spec, spec), (), "bfloat16", tp, context)
    assert kv_bytes(two) == 2 * expected


@given(position=st.integers(1, 300))
def test_the_next_tokens_bytes_are_the_difference(position: int) -> None:
    model = attention(FULL, SLIDING, LATENT)
    before = Load(model, (), "bfloat16", 1, position)
    after = Load(model, (), "bfloat16", 1, position + 1)
    grown = kv_bytes(after) - kv_bytes(before)
    assert grown == capacity(after, None).kv_per_token


@given(memory=st.integers(1, 10**12), weights=st.integers(0, 10**11), tp=st.sampled_from([1, 2]))
def test_the_requests_that_fit_fit_and_one_more_does_not(
    memory: int, weights: int, tp: int
) -> None:
    model = read(tiny("qwen3_next"))
    states = plan_states(model, tp, FORM)
    load = Load(model, states, "bfloat16", tp, 4096, 2, WeightBytes(weights))
    found = capacity(load, memory)
    assert found.requests is not None
    assert found.weights is not None
    usable = int(memory * (1 - RESERVE))
    fixed = found.weights + found.state
    assert found.requests == 0 or fixed + found.requests * found.request <= usable
    assert fixed + (found.requests + 1) * found.request > usable
    assert found.scratch == 2 * sum(4 * prod(state.shape) + 8 for state in states)
    assert found.request == found.kv + found.state + found.scratch


@given(batch=st.integers(1, 512), share=st.floats(0.01, 1))
def test_the_bound_counts_weights_once_and_requests_each(batch: int, share: float) -> None:
    model = read(tiny("qwen3_next"))
    states = plan_states(model, 1, FORM)
    weights = WeightBytes(total=1000_000, experts=600_000, embedding=100_000)
    load = Load(model, states, "bfloat16", 1, 64, 0, weights, share)
    bound = decode_bound(load, batch, 10**9)
    assert bound is not None
    read_once = 300_000 + 600_000 * share
    each = kv_bytes(load) + 2 * sum(state.bytes for state in states)
    assert bound == pytest.approx(batch * 10**9 / (read_once + batch * each))
    more = decode_bound(load, batch + 1, 10**9)
    assert more is not None
    assert more > bound


def test_without_weights_nothing_that_depends_on_them_is_claimed() -> None:
    facts = planned(str(CONFIGS / "real" / "lfm2-350m.json"), "-d", "cpu", "--card", "h200")
    assert facts["weights"] is None
    assert facts["requests"] is None
    assert set(facts["decode_tokens_per_second"].values()) == {None}


def save(folder: Path, name: str, **tensors: int) -> None:
    """Write a safetensors file by hand: names and their bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key, size in tensors.items():
        entry = {"dtype": "U8", "shape": [size], "data_offsets": [offset, offset + size]}
        header[key.replace("__", ".")] = entry
        offset += size
    text = json.dumps(header).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))


def index(folder: Path, *names: str) -> None:
    """Write an index that names these files."""
    found = {"weight_map": {str(number): name for number, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(found))


def test_weight_bytes_come_from_the_headers(tmp_path: Path) -> None:
    save(tmp_path, "a.safetensors", model__embed_tokens__weight=70, lm_head__weight=70)
    save(tmp_path, "b.safetensors", layer__mlp__experts__0__up=30, layer__norm=5)
    index(tmp_path, "a.safetensors", "b.safetensors")
    assert weight_bytes(tmp_path) == WeightBytes(175, 30, 70)


def test_a_tied_embedding_is_read_in_every_step(tmp_path: Path) -> None:
    save(tmp_path, "model.safetensors", model__embed_tokens__weight=70)
    assert weight_bytes(tmp_path) == WeightBytes(70, 0, 0)


def test_the_index_says_which_files_count(tmp_path: Path) -> None:
    save(tmp_path, "a.safetensors", x=10)
    save(tmp_path, "consolidated.safetensors", x=10)
    index(tmp_path, "a.safetensors")
    assert weight_bytes(tmp_path) == WeightBytes(10)


def test_a_folder_without_weights_has_none(tmp_path: Path) -> None:
    assert weight_bytes(tmp_path) is None
    save(tmp_path, "adapter_model.safetensors", x=10)
    assert weight_bytes(tmp_path) is None


@pytest.mark.parametrize("name", ["/etc/passwd", "../model.safetensors", "sub/x.safetensors"])
def test_a_plan_reads_nothing_outside_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny("lfm2")))
    index(tmp_path, name)
    ran = subprocess.run(
        [HAL, "plan", str(tmp_path), "-d", "cpu"], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "must name files of its own folder" in ran.stderr


def test_a_plan_of_a_folder_reads_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny("lfm2")))
    save(tmp_path, "model.safetensors", x=1000)
    facts = planned(str(tmp_path), "-d", "cpu", "--memory", "1MiB", "--bandwidth", "1MB/s")
    assert facts["weights"] == 1000
    assert facts["memory"] == 2**20
    assert str(facts["requests"]) in facts["decode_tokens_per_second"] or facts["requests"] == 0


def test_a_model_that_the_device_refuses_is_planned_and_noted() -> None:
    facts = planned(str(CONFIGS / "tiny" / "recurrent_gemma.json"), "-d", "cpu")
    assert facts["fits"] is False
    assert facts["notes"][0].startswith("not served as asked: recurrent_gemma cannot run on cpu")


def test_a_model_that_cannot_be_planned_is_refused() -> None:
    ran = subprocess.run(
        [HAL, "plan", str(CONFIGS / "real" / "rwkv-6-1b6.json"), "-d", "cpu"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 1
    assert ran.stdout.startswith("rwkv6 cannot run on cpu")


def test_experts_without_a_split_are_noted() -> None:
    config = str(CONFIGS / "tiny" / "qwen3_next.json")
    facts = planned(config, "-d", "cpu", "--weights", "1MiB")
    assert any("every expert" in note for note in facts["notes"])


@pytest.mark.parametrize(
    ("text", "size"),
    [("141GiB", 141 * 2**30), ("24GB", 24 * 10**9), ("4.8TB/s", 4_800_000_000_000), ("512 B", 512),
     ("1.5 kb", 1500), ("2MIB", 2**21)],
)  # fmt: skip
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert read_bytes(text, "--x") == size


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1", "1e9", "1 XB", "nan", "141", "4.8", "512/s", "\uff11GB", "9" * 400 + "GB"],
)
def test_a_size_of_no_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--x: got"):
        read_bytes(text, "--x")


@pytest.mark.parametrize(("text", "count"), [("4096", 4096), ("32k", 32768), ("1M", 2**20)])
def test_counts_are_in_steps_of_1024(text: str, count: int) -> None:
    assert read_tokens(text, "--x") == count


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "32kb", "\u0663", "9" * 5000])
def test_a_count_of_no_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--x: got") as caught:
        read_tokens(text, "--x")
    assert len(str(caught.value)) < 200


@given(st.integers(0, 2**50))
def test_shown_bytes_are_within_a_percent(size: int) -> None:
    shown = show_bytes(size)
    unit = shown.split()[1]
    assert read_bytes(shown, "--x") == pytest.approx(size, rel=0.01, abs=0)
    assert unit == "B" or float(shown.split()[0]) >= 1


def test_cards_name_devices_that_have_plugins() -> None:
    devices = {card.device for card in CARDS.values()}
    assert devices == {"cuda", "rocm", "npu"}
    assert all(card.bandwidth > card.memory for card in CARDS.values())
    assert hal.explain("cuda", tiny("lfm2")).decision.question.registry.on("cuda")
