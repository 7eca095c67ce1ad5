"""Devices and options are checked when they are given, and requirements follow from them."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hal
from hal.device import Device
from hal.model import read
from hal.options import Options, Shard, Speculative
from hal.requirements import dtypes, requirements
from hal_registry import API, OPERATIONS, Manifest, ManifestError, Requirement
from support.model_configs import TINY, tiny


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cpu", Device("cpu")),
        ("cuda:3", Device("cuda", 3)),
        ("cuda:sm_90", Device("cuda", None, "sm_90")),
        ("rocm:gfx942", Device("rocm", None, "gfx942")),
        ("my_npu2", Device("my_npu2")),
    ],
)
def test_a_device_reads_and_writes_its_name(text: str, device: Device) -> None:
    assert Device.parse(text) == device
    assert str(device) == text


@pytest.mark.parametrize(
    "text",
    ["", "CUDA", "cuda:", "cuda:-1", "cuda 0", "0", "cuda:0:1", None, "cpu:\uff19", "cpu:\u0663",
     "\u00e9vil", "_x", "cpu:" + "9" * 5000, "x" * 10**6, "cuda:" + "a" * 10**6],
)  # fmt: skip
def test_a_device_of_no_form_says_what_forms_there_are(text: Any) -> None:
    with pytest.raises(ValueError, match='as "cpu", "cuda:0" or "cuda:sm_90"'):
        Device.parse(text)


@given(st.text(max_size=5), st.text(max_size=5))
def test_a_manifest_takes_the_devices_and_arches_that_can_be_asked_for(
    kind: str, arch: str
) -> None:
    try:
        place = Device.parse(f"{kind}:{arch}" if arch else kind)
        reachable = (place.type, place.arch) == (kind, arch)
    except ValueError:
        reachable = False
    try:
        Manifest(f"{kind}.x", kind, API, "a:b", {}, arches=(arch,) if arch else ())
    except ManifestError:
        assert not reachable
    else:
        assert reachable


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Shard(2, 2), "tp: rank 2 of 2"),
        (lambda: Shard(0, 0), "tp: rank 0 of 0"),
        (lambda: Shard(-1, 2), "tp: rank -1 of 2"),
        (lambda: Speculative(0), "speculative: width 0"),
        (lambda: Options(dtype="int8"), "dtype: got 'int8', expected one of float32"),
        (lambda: Options(state_dtype="float64"), "state_dtype: got 'float64'"),
        (lambda: Options(prefix_cache=0), "prefix_cache: granularity 0"),
        (lambda: Options(providers={"convs": "x"}), "providers: 'convs' is neither"),
        (lambda: Shard(0, 2.0), "tp: size 2.0: expected an integer"),
        (lambda: Shard(True, 2), "tp: rank True: expected an integer"),
        (lambda: Shard("0", 2), "tp: rank '0': expected an integer"),
        (lambda: Shard(0, None), "tp: size nothing: expected an integer"),
        (lambda: Speculative(2.5), "speculative: width 2.5: expected an integer"),
        (lambda: Speculative(True), "speculative: width True: expected an integer"),
        (lambda: Speculative(4, tree="yes"), "speculative: tree: got 'yes', expected a bool"),
    ],
)
def test_an_option_that_means_nothing_is_refused(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        make()


SHARD = r"tp: got .*, expected hal\.Shard\(rank, size\)"
SPECULATIVE = r"speculative: got .*, expected hal\.Speculative\(width\)"
WRONG = [
    *(("tp", value, SHARD) for value in (2, 0, False, (0, 2), "2", {})),
    *(("speculative", value, SPECULATIVE) for value in (4, 0, True, "4", ())),
    *(
        ("prefix_cache", value, "prefix_cache: granularity .*: expected an integer")
        for value in ("x", None, 64.0, (), "True")
    ),
    *(("graphs", value, "graphs: got .*, expected a bool") for value in ("no", 0, 1, None)),
    *(
        ("providers", value, "providers: got .*, expected provider names by interface")
        for value in ("x", 0, "", [], [("conv", "x")], False)
    ),
    *(
        ("providers", {"conv": value}, "providers: conv: got .*, expected a provider's name")
        for value in (None, 3, ["cpu.torch"])
    ),
    *(("dtype", value, "dtype: got .*, expected one of float32") for value in (3, "", False)),
]


@pytest.mark.parametrize(("name", "value", "text"), WRONG)
@pytest.mark.parametrize("call", [hal.explain, hal.select])
def test_an_option_of_another_type_says_what_is_expected(
    call: Any, name: str, value: Any, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        call("cpu", tiny("lfm2"), **{name: value})


def test_none_is_the_default_where_the_default_is_none() -> None:
    assert hal.explain(
        "cpu", tiny("lfm2"), dtype=None, state_dtype=None, tp=None, speculative=None, providers=None
    ).fits


def test_overrides_cannot_be_changed_from_outside() -> None:
    given = {"conv": "cpu.torch"}
    options = Options(providers=given)
    given["conv"] = "other"
    assert options.providers == {"conv": "cpu.torch"}


def test_a_torch_dtype_is_a_dtype() -> None:
    assert Options(dtype="torch.bfloat16").dtype == "bfloat16"


def needs(name: str, arch: str = "", **options: Any) -> dict[str, list[Requirement]]:
    found: dict[str, list[Requirement]] = {}
    for need in requirements(read(tiny(name)), Options(**options), arch):
        found.setdefault(need.operation, []).append(need)
    return found


@pytest.mark.parametrize("name", TINY)
def test_every_need_says_why_and_names_dtype_and_arch(name: str) -> None:
    for found in needs(name, arch="sm_90", dtype="bfloat16").values():
        for need in found:
            assert need.why.split()[0].isdigit()
            assert (need.dtype, need.arch) == ("bfloat16", "sm_90")


@pytest.mark.parametrize("name", TINY)
def test_needs_name_operations_of_the_vocabulary_or_a_kind_without_one(name: str) -> None:
    unserved = {"rg_lru.prefill", "multi_short_conv.prefill"}
    assert set(needs(name, prefix_cache=True, speculative=Speculative(3))) <= {
        *OPERATIONS,
        *unserved,
    }


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "lfm2"])
def test_speculation_needs_verify_and_commit_of_its_shape(name: str) -> None:
    plain = needs(name)
    chain = needs(name, speculative=Speculative(4))
    tree = needs(name, speculative=Speculative(4, tree=True))
    assert set(chain) - set(plain) == {op for op in chain if op.endswith((".verify", ".commit"))}
    for op, found in chain.items():
        if op.endswith(".verify"):
            assert {(n.verify, n.verify_width) for n in found} == {("chain", 4)}
            assert {n.verify for n in tree[op]} == {"tree"}


@pytest.mark.parametrize(("given", "grid"), [(True, 0), (64, 64), (1, 1)])
def test_a_prefix_cache_needs_tracking_in_prefill(given: bool | int, grid: int) -> None:
    assert {n.track for found in needs("qwen3_next").values() for n in found} == {None}
    tracked = needs("qwen3_next", prefix_cache=given)
    assert {n.track for n in tracked["conv.prefill"] + tracked["delta_rule.prefill"]} == {grid}
    assert {n.track for n in needs("lfm2", prefix_cache=given)["conv.prefill"]} == {grid}


def test_graphs_are_needed_where_steps_are_captured() -> None:
    found = needs("qwen3_next", graphs=True, speculative=Speculative(2))
    graph = {op for op, need in found.items() if any("graph" in n.features for n in need)}
    assert graph == {
        "conv.decode",
        "conv.verify",
        "delta_rule.decode",
        "delta_rule.decode_fused",
        "delta_rule.verify",
    }


def test_fused_operations_are_never_required() -> None:
    optional = {op for op, found in needs("qwen3_next").items() if all(n.optional for n in found)}
    assert optional == {"delta_rule.decode_fused", "delta_rule.prefill_fused"}


def test_dims_are_those_of_a_rank() -> None:
    whole, half = needs("qwen3_next"), needs("qwen3_next", tp=Shard(0, 2))
    key = "delta_rule.decode"
    assert whole[key][0].head_dims == half[key][0].head_dims
    assert whole[key][0].ratio == half[key][0].ratio


def test_the_state_dtype_is_the_option_then_the_models_then_float32() -> None:
    model = read(tiny("qwen3_next"))
    hinted = read(tiny("qwen3_next", mamba_ssm_dtype="bfloat16"))
    assert dtypes(model, Options())[1] == "float32"
    assert dtypes(hinted, Options())[1] == "bfloat16"
    assert dtypes(hinted, Options(state_dtype="float16"))[1] == "float16"
    assert dtypes(model, Options(dtype="float16"))[0] == "float16"


@given(size=st.integers(1, 6), rank=st.integers(0, 5))
def test_the_answer_is_the_same_on_every_rank(size: int, rank: int) -> None:
    if rank < size:
        config = tiny("qwen3_next")
        first = hal.explain("cpu", config, tp=Shard(0, size))
        other = hal.explain("cpu", config, tp=Shard(rank, size))
        assert first.fits == other.fits
        assert str(first) == str(other)


class Hostile(Mapping[str, object]):
    """A mapping that computes its entries, and fails."""

    def __getitem__(self, name: str) -> object:
        raise SystemExit(name)

    def __iter__(self) -> Iterator[str]:
        return iter(("model_type",))

    def __len__(self) -> int:
        return 1


def hostile(error: BaseException) -> Any:
    class Config:
        def to_dict(self) -> dict[str, object]:
            raise error

    return Config()


@pytest.mark.parametrize("error", [RuntimeError("x"), SystemExit(0), GeneratorExit(), OSError()])
@pytest.mark.parametrize("nested", [False, True])
def test_a_config_object_that_raises_is_bad_input(error: BaseException, nested: bool) -> None:
    config = {"text_config": hostile(error)} if nested else hostile(error)
    with pytest.raises(hal.ConfigError, match=f"a Config raised {type(error).__name__}") as caught:
        hal.explain("cpu", config)
    assert caught.value.__cause__ is error
    with pytest.raises(hal.ConfigError, match="a Hostile raised SystemExit"):
        hal.explain("cpu", Hostile())


def test_ctrl_c_in_a_config_object_passes() -> None:
    with pytest.raises(KeyboardInterrupt):
        hal.explain("cpu", hostile(KeyboardInterrupt()))


@pytest.mark.parametrize("text", ["x" * 10**6, "a\nb" * 10**5])
def test_a_model_type_of_any_length_is_told_in_a_line(text: str) -> None:
    refusal = hal.explain("cpu", {"model_type": text}).refusal
    assert refusal is not None
    assert len(str(refusal)) < 3000
    assert len(repr(refusal.to_dict())) < 5000
    assert "\n" not in refusal.headline()
    with pytest.raises(hal.ConfigError) as caught:
        hal.explain("cpu", {"model_type": "lfm2", "hidden_size": text})
    assert len(str(caught.value)) < 3000


def test_an_unreadable_config_is_bad_input_and_no_refusal() -> None:
    with pytest.raises(hal.ConfigError):
        hal.explain("cpu", {"model_type": 3})
