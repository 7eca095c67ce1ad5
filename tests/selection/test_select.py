"""`select` decides before anything runs: probe, bind, the next candidate, or a refusal."""

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest

import hal
from hal.refusal import Unsupported
from hal_registry import Code, Manifest, Proof, Registry
from support.model_configs import real, tiny
from support.providers import MODULE
from support.registry import EVERYTHING, Zoo, manifest, plugin_source, run_python

ZAYA, LFM, GDN = tiny("zaya"), tiny("lfm2"), tiny("qwen3_next")
PHASES = ("delta_rule.prefill", "delta_rule.decode")
pytestmark = pytest.mark.usefixtures("providers")


def sidecar(name: str, load: str, **fields: Any) -> Manifest:
    return manifest(name, "conv", "conv_state", load=f"{MODULE}:{load}", **fields)


def refused(device: str, config: Any, *manifests: Manifest, **options: Any) -> Unsupported:
    with pytest.raises(Unsupported) as caught:
        hal.select(device, config, registry=Registry.of(*manifests), **options)
    return caught.value


def codes(error: Unsupported) -> set[Code]:
    return {reason.code for reason in error.reasons}


def test_a_provider_that_holds_is_chosen() -> None:
    selection = hal.select("npu:0", ZAYA, registry=Registry.of(sidecar("npu.good", "Good")))
    assert {choice.provider for choice in selection.choices.values()} == {"npu.good"}
    assert str(selection.device) == "npu:0"


@pytest.mark.parametrize(
    ("load", "code"),
    [
        ("Gone", Code.PLUGIN_BROKEN),
        ("Exits", Code.PLUGIN_BROKEN),
        ("Lacking", Code.PROTOCOL_VIOLATION),
        ("Bare", Code.PROTOCOL_VIOLATION),
        ("Swapping", Code.PROTOCOL_VIOLATION),
        ("Partial", Code.PROTOCOL_VIOLATION),
    ],
)
def test_a_provider_that_fails_late_makes_room_for_the_next(load: str, code: Code) -> None:
    bad, good = sidecar("npu.bad", load, priority=9), sidecar("npu.good", "Good")
    selection = hal.select("npu", ZAYA, registry=Registry.of(bad, good))
    assert {choice.provider for choice in selection.choices.values()} == {"npu.good"}
    assert codes(refused("npu", ZAYA, bad)) == {code}


def test_a_missing_library_keeps_the_vendor_from_being_imported() -> None:
    needy = sidecar("npu.needy", "Exits", needs=("no-such-lib",), probe="nowhere:probe")
    assert codes(refused("npu", ZAYA, needy)) == {Code.LIBRARY_MISSING}


def test_an_absent_device_keeps_the_provider_from_being_built() -> None:
    away = sidecar("npu.away", "Exits", probe=f"{MODULE}:absent")
    assert codes(refused("npu", ZAYA, away)) == {Code.DEVICE_ABSENT}


def test_a_probe_that_fails_is_told_with_its_cause() -> None:
    error = refused("npu", ZAYA, sidecar("npu.bad", "Good", probe="no_such_module:probe"))
    assert codes(error) == {Code.PLUGIN_BROKEN}
    assert "No module named 'no_such_module'" in str(error).splitlines()[0]


def test_the_index_has_to_be_there() -> None:
    there = sidecar("cuda.x", "Good", probe=f"{MODULE}:sm_90", arches=("sm_90",))
    assert hal.select("cuda:1", ZAYA, registry=Registry.of(there)).device.index == 1
    assert codes(refused("cuda:2", ZAYA, there)) == {Code.DEVICE_ABSENT}


def test_an_arch_that_was_asked_for_and_is_not_here_is_refused() -> None:
    """The machine's arch is offered too, but it is not the one that was named."""
    both = sidecar("cuda.x", "Good", probe=f"{MODULE}:sm_90", arches=("sm_90", "sm_121"))
    assert hal.select("cuda:sm_90", ZAYA, registry=Registry.of(both)).device.arch == "sm_90"
    error = refused("cuda:sm_121", ZAYA, both)
    assert codes(error) == {Code.ARCH_UNSUPPORTED}
    assert (error.reasons[0].needed, error.reasons[0].offered) == ("arch sm_121", "arch sm_90")


def test_the_probed_arch_takes_away_only_what_it_rules_out() -> None:
    """P064: an operation for another arch is not offered, the rest of its provider is."""
    track = replace(EVERYTHING, arches=("sm_90",))
    wide = sidecar("cuda.wide", "Good", probe=f"{MODULE}:sm_121", arches=("sm_90", "sm_121"))
    narrow = replace(wide, offers={**wide.offers, "conv.prefill": track})
    error = refused("cuda", ZAYA, narrow)
    assert [(r.code, r.subject) for r in error.reasons] == [(Code.ARCH_UNSUPPORTED, "conv.prefill")]


def test_what_the_arch_leaves_over_stays_with_its_provider() -> None:
    fields: dict[str, Any] = {
        "load": "hal_cpu.provider:TorchProvider",
        "probe": f"{MODULE}:sm_121",
        "arches": ("sm_90", "sm_121"),
    }
    best = manifest("cpu.best", "conv", *PHASES, priority=9, **fields)
    narrow = replace(EVERYTHING, arches=("sm_90",))
    best = replace(best, offers={**best.offers, "delta_rule.decode": narrow})
    spare = manifest("cpu.spare", "conv", *PHASES, **fields)
    chosen = hal.select("cpu", GDN, registry=Registry.of(best, spare)).choices
    assert {op: choice.provider for op, choice in chosen.items()} == {
        "conv.prefill": "cpu.best",
        "conv.decode": "cpu.best",
        "delta_rule.prefill": "cpu.best",
        "delta_rule.decode": "cpu.spare",
    }


def test_what_the_probe_finds_missing_takes_away_only_what_needs_it() -> None:
    """An operation whose function is absent here goes to the next provider."""
    fields: dict[str, Any] = {"load": "hal_cpu.provider:TorchProvider"}
    best = manifest(
        "cpu.best", "conv", *PHASES, priority=9, probe=f"{MODULE}:without_decode", **fields
    )
    spare = manifest("cpu.spare", "conv", *PHASES, **fields)
    chosen = hal.select("cpu", GDN, registry=Registry.of(best, spare)).choices
    assert chosen["delta_rule.prefill"].provider == "cpu.best"
    assert chosen["delta_rule.decode"].provider == "cpu.spare"
    error = refused("cpu", GDN, best)
    assert [(r.code, r.subject) for r in error.reasons] == [
        (Code.OPERATION_MISSING, "vendor_decode")
    ]


def test_a_reason_of_the_probe_is_the_reason_of_the_refusal() -> None:
    error = refused("npu", ZAYA, sidecar("npu.x", "Exits", probe=f"{MODULE}:library_gone"))
    assert [(r.code, r.subject) for r in error.reasons] == [(Code.LIBRARY_MISSING, "libvendor.so")]


@pytest.mark.parametrize("probe", ["many", "nothing"])
def test_a_probe_that_does_not_count_is_broken(probe: str) -> None:
    error = refused("npu", ZAYA, sidecar("npu.bad", "Good", probe=f"{MODULE}:{probe}"))
    assert codes(error) == {Code.PLUGIN_BROKEN}
    assert "expected a count of devices" in str(error)


def test_a_provider_that_fails_when_it_is_built_again_is_a_provider_error() -> None:
    selection = hal.select("cpu", ZAYA, registry=Registry.of(sidecar("cpu.flaky", "Flaky")))
    with pytest.raises(hal.ProviderError, match=r"cpu\.flaky .*: SystemExit: the driver is open"):
        selection.backend(slots=1, max_batch=1, max_tokens=1)


@pytest.mark.parametrize("device", ["cpu:1", "cpu:9", "cpu:999999999"])
@pytest.mark.parametrize("call", [hal.select, hal.explain])
def test_without_a_probe_there_is_one_device(device: str, call: Any) -> None:
    """The embedded CPU counts no devices, and so has no second one."""
    try:
        refusal = call(device, LFM).refusal
    except Unsupported as error:
        refusal = error.refusal
    assert {reason.code for reason in refusal.all_reasons()} == {Code.DEVICE_ABSENT}
    assert hal.select("cpu:0", LFM).device.index == 0


ROUND_TRIPS = (lambda it: pickle.loads(pickle.dumps(it)), copy.deepcopy, copy.copy)


@pytest.mark.parametrize("again", ROUND_TRIPS)
def test_answers_cross_a_process_whole(again: Any) -> None:
    """Engines hand them to tensor-parallel workers."""
    selection = again(hal.select("cpu", GDN, tp=hal.Shard(0, 2), providers={"conv": "cpu.torch"}))
    assert selection == hal.select("cpu", GDN, tp=hal.Shard(0, 2), providers={"conv": "cpu.torch"})
    assert selection.backend(slots=1, max_batch=1, max_tokens=1)
    for device, config in (("cpu", GDN), ("npu", GDN), ("cpu", {"model_type": "rwkv6"})):
        answer = hal.explain(device, config)
        other = again(answer)
        assert other == answer
        assert str(other) == str(answer)
        assert other.to_dict() == answer.to_dict()
        if answer.refusal is not None:
            error = again(Unsupported(answer.refusal))
            assert error.refusal == answer.refusal


def test_a_selection_crosses_into_another_process() -> None:
    """The other process has imported nothing."""
    text = pickle.dumps(hal.select("cpu", GDN)).hex()
    ran = run_python(f"import pickle; print(pickle.loads(bytes.fromhex({text!r})))")
    assert ran.stdout == f"{hal.select('cpu', GDN)}\n", ran.stderr


def test_an_arch_in_the_device_name_is_judged_without_a_probe() -> None:
    hopper = manifest("cuda.hopper", "conv", *PHASES, arches=("sm_90",))
    other = manifest("cuda.other", "conv", *PHASES, arches=("sm_121",))
    registry = Registry.of(hopper, other)
    answer = hal.explain("cuda:sm_121", GDN, registry=registry)
    assert answer.selection is not None
    assert {c.provider for c in answer.selection.choices.values()} == {"cuda.other"}
    refusal = hal.explain("cuda:sm_75", GDN, registry=registry).refusal
    assert refusal is not None
    assert [c.name for c in refusal.candidates] == ["cuda.hopper", "cuda.other"]


@pytest.mark.parametrize("name", ["lfm2", "lfm2_moe", "lfm2_vl", "zaya"])
def test_conv_state_alone_turns_a_refusal_into_an_acceptance(name: str) -> None:
    """P072: nothing in hal knows the pair of model and device."""
    without = manifest("npu.vendor", "conv", "delta_rule")
    refusal = hal.explain("npu", tiny(name), registry=Registry.of(without)).refusal
    assert refusal is not None
    assert refusal.all_reasons()[0].code is Code.INTERFACE_MISSING
    assert refusal.all_reasons()[0].subject == "conv_state"
    assert hal.explain("npu", GDN, registry=Registry.of(without)).fits
    plugin = manifest("npu.plugin", "conv", "conv_state")
    assert hal.explain("npu", tiny(name), registry=Registry.of(without, plugin)).fits


def test_no_operation_stands_for_another() -> None:
    """P006: decode does not bring verify, and a provider for verify alone may be mixed in."""
    plain = manifest(
        "cuda.plain", "conv", *PHASES, offer=replace(EVERYTHING, features=("strided",))
    )
    speculative = {"speculative": hal.Speculative(4)}
    refusal = hal.explain("cuda", GDN, registry=Registry.of(plain), **speculative).refusal  # type: ignore[arg-type]
    assert refusal is not None
    subjects = {(r.code, r.subject) for r in refusal.all_reasons()}
    assert (Code.OPERATION_MISSING, "delta_rule.verify") in subjects
    assert (Code.MODE_UNSUPPORTED, "delta_rule.decode") in subjects
    half = manifest("cuda.half", "conv", *PHASES)
    other = manifest("cuda.verify", "delta_rule.verify", "delta_rule.commit")
    answer = hal.explain("cuda", GDN, registry=Registry.of(half, other), **speculative)  # type: ignore[arg-type]
    assert answer.selection is not None
    assert answer.selection.choices["delta_rule.verify"].provider == "cuda.verify"
    assert answer.selection.choices["delta_rule.decode"].provider == "cuda.half"


def test_tracking_has_to_be_offered() -> None:
    """P102: a provider that ignores track points is refused, not trusted."""
    blind = manifest("cuda.blind", "conv", *PHASES, offer=replace(EVERYTHING, track=()))
    registry = Registry.of(blind)
    assert hal.explain("cuda", GDN, registry=registry).fits
    refusal = hal.explain("cuda", GDN, registry=registry, prefix_cache=True).refusal
    assert refusal is not None
    assert {r.code for r in refusal.all_reasons()} == {Code.MODE_UNSUPPORTED}


def test_disjoint_state_dtypes_are_refused_with_both_named() -> None:
    """P037: prefill and decode of one state have to agree on its dtype."""
    first = manifest(
        "cuda.a", "conv", PHASES[0], offer=replace(EVERYTHING, state_dtypes={"float32"})
    )
    second = manifest("cuda.b", PHASES[1], offer=replace(EVERYTHING, state_dtypes={"bfloat16"}))
    refusal = hal.explain("cuda", GDN, registry=Registry.of(first, second)).refusal
    assert refusal is not None
    text = str(refusal)
    assert "state dtype float32" in text
    assert "state dtype bfloat16" in text
    third = manifest("cuda.c", PHASES[1])
    assert hal.explain("cuda", GDN, registry=Registry.of(first, second, third)).fits


def test_an_override_decides() -> None:
    registry = Registry.of(
        manifest("cuda.best", "conv", "delta_rule", priority=9),
        manifest("cuda.mine", "conv", "delta_rule"),
    )
    for overrides, expected in (
        ({}, {"cuda.best"}),
        ({"delta_rule": "cuda.mine"}, {"cuda.best", "cuda.mine"}),
        ({"delta_rule": "cuda.mine", "conv": "cuda.mine"}, {"cuda.mine"}),
    ):
        answer = hal.explain("cuda", GDN, registry=registry, providers=overrides)
        assert answer.selection is not None
        assert {c.provider for c in answer.selection.choices.values()} == expected


def test_an_override_of_an_optional_operation_is_not_ignored() -> None:
    registry = Registry.of(
        manifest("cuda.rich", "conv", "delta_rule"), manifest("cuda.plain", "conv", *PHASES)
    )
    override = {"delta_rule.decode_fused": "cuda.plain"}
    refusal = hal.explain("cuda", GDN, registry=registry, providers=override).refusal
    assert refusal is not None
    assert refusal.all_reasons()[0].subject == "delta_rule.decode_fused"
    assert refusal.candidates[0].name == "cuda.plain"


def test_an_override_of_an_unknown_word_is_bad_input() -> None:
    with pytest.raises(ValueError, match="providers: 'delta' is neither an interface nor"):
        hal.explain("cuda", GDN, providers={"delta": "cuda.x"})


def test_select_never_changes_the_device() -> None:
    registry = Registry.of(manifest("cpu.any", "all"), manifest("cuda.any"))
    for device in ("cuda", "cuda:0", "cuda:sm_90", "gpu", "npu"):
        refusal = hal.explain(device, GDN, registry=registry).refusal
        assert refusal is not None
        assert refusal.device == device
        assert refusal.alternatives == (("cpu", "cpu.any"),)


LACKS = {"library": {"needs": ("no-such-library>=1",)}, "device": {"probe": f"{MODULE}:absent"}}


@pytest.mark.parametrize("lack", LACKS)
def test_a_machine_is_told_of_devices_that_it_has_with_their_libraries(lack: str) -> None:
    away = manifest("abacus.any", "all", **LACKS[lack])
    asked = manifest("cuda.any", "all", probe=f"{MODULE}:absent")
    registry = Registry.of(away, manifest("cpu.any", "all"), asked)
    with pytest.raises(hal.Unsupported) as caught:
        hal.select("cuda", GDN, registry=registry)
    assert caught.value.refusal.alternatives == (("cpu", "cpu.any"),)


def test_what_manifests_refuse_is_refused_without_a_look_at_other_devices() -> None:
    unseen = manifest("abacus.any", "all", probe="no_such_module:probe")
    needy = manifest("npu.any", "all", needs=("no-such-library>=1",))
    registry = Registry.of(unseen, needy, manifest("cuda.any"))
    wanted = (("abacus", "abacus.any"), ("npu", "npu.any"))
    refusal = hal.explain("cuda", GDN, registry=registry).refusal
    assert refusal is not None
    assert refusal.alternatives == wanted
    with pytest.raises(hal.Unsupported) as caught:
        hal.select("cuda", GDN, registry=registry)
    assert caught.value.refusal.alternatives == wanted[:1]


@pytest.mark.parametrize("probe", ["", f"{MODULE}:sm_90"])
def test_an_index_that_is_absent_leaves_its_device_without_one(probe: str) -> None:
    loads = "hal_cpu.provider:TorchProvider"
    registry = Registry.of(manifest("cpu.any", "all", probe=probe, load=loads))
    with pytest.raises(hal.Unsupported) as caught:
        hal.select("cpu:7", GDN, registry=registry)
    assert caught.value.refusal.alternatives == (("cpu", "cpu.any"),)
    assert 'use device "cpu" (cpu.any fits)' in caught.value.refusal.fix()


@pytest.mark.parametrize("device", ["cpu", "cpu:0", "cpu:7"])
def test_a_device_that_is_absent_with_every_index_is_no_alternative(device: str) -> None:
    registry = Registry.of(manifest("cpu.any", "all", probe=f"{MODULE}:absent"))
    with pytest.raises(hal.Unsupported) as caught:
        hal.select(device, GDN, registry=registry)
    assert caught.value.refusal.alternatives == ()


def test_two_providers_of_a_device_go_by_name() -> None:
    """P090: the order is stable and reported."""
    twins = [manifest(name, "conv", "delta_rule") for name in ("cuda.b", "cuda.a")]
    for given in (twins, twins[::-1]):
        answer = hal.explain("cuda", GDN, registry=Registry.of(*given))
        assert answer.selection is not None
        assert {c.provider for c in answer.selection.choices.values()} == {"cuda.a"}


def test_ready_gates_serve_a_model_when_raw_ones_are_not_offered() -> None:
    kimi = tiny("kimi_linear")
    for gates, fits in ((("channel",), True), (("ready_channel",), True), (("scalar",), False)):
        offer = replace(EVERYTHING, gates=gates)
        registry = Registry.of(manifest("cuda.x", "conv", *PHASES, offer=offer))
        assert hal.explain("cuda", kimi, registry=registry).fits == fits


def test_the_proof_of_a_choice_is_for_the_dtype_and_arch_asked_for() -> None:
    levels = (("float32", "hardware", "sm_90"), ("float32", "compiled", ""))
    told = ("2026-11-29", "torch 2.13", "reports/x.json")
    proofs = tuple(Proof("conv.decode", d, level, arch, *told) for d, level, arch in levels)  # type: ignore[arg-type]
    registry = Registry.of(
        manifest("cuda.x", "conv", *PHASES, proofs=proofs, arches=("sm_90", "x"))
    )
    for device, dtype, level in (
        ("cuda", "float32", "hardware"),
        ("cuda:sm_90", "float32", "hardware"),
        ("cuda:x", "float32", "compiled"),
        ("cuda", "bfloat16", "unproved"),
    ):
        answer = hal.explain(device, GDN, registry=registry, dtype=dtype)
        assert answer.selection is not None
        assert answer.selection.choices["conv.decode"].proof == level


def test_the_selection_reads_as_text_and_data() -> None:
    answer = hal.explain("cuda", GDN, registry=Registry.of(manifest("cuda.x", "all")))
    assert answer.selection is not None
    assert str(answer) == answer.selection.explain()
    plain = answer.to_dict()
    assert plain["fits"] is True
    assert plain["slot_bytes"] == sum(state.bytes for state in answer.selection.states)
    assert plain["choices"]["delta_rule.decode_fused"]["provider"] == "cuda.x"  # type: ignore[index]


FAMILY = """
from hal_registry import hookimpl
from hal.model import DeltaDims, Kind, LayerSpec, ModelSpec

@hookimpl
def hal_requirements(model):
    {body}
"""
SPEC = """if model["model_type"] == "rwkv6":
        layer = LayerSpec(0, (Kind.GATED_DELTA_NET,), DeltaDims(2, 4, 16, 24, 4))
        return ModelSpec("rwkv6", (layer,), "float32", 100, 64)"""
ASK = """
import hal, json
answer = hal.explain("cpu", json.loads('{"model_type": "rwkv6"}'))
print(answer.fits)
print(answer)
"""


@pytest.mark.parametrize("also", ["", "raise KeyError('hook')", "return 'rubbish'"])
def test_a_family_from_outside_is_served(tmp_path: Any, also: str) -> None:
    zoo = Zoo(tmp_path)
    zoo.plugin("dist-a", "zoo.family", FAMILY.format(body=SPEC))
    if also:
        zoo.plugin("dist-b", "zoo.other", FAMILY.format(body=also))
    ran = zoo.python(ASK)
    assert ran.stdout.splitlines()[0] == "True", ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("raise KeyError('hook')", "KeyError: 'hook'"),
        ("return 'rubbish'", "'rubbish'"),
        ("return ModelSpec('rwkv6', ('layer',), 'float32', 1, 1)", "AttributeError"),
        ("return ModelSpec('rwkv6', None, 'float32', 1, 1)", "TypeError"),
        ("return ModelSpec(None, (), 'float32', 1, 1)", "model_type: expected text, got None"),
    ],
)
def test_a_family_hook_that_fails_is_a_reason(tmp_path: Any, body: str, text: str) -> None:
    zoo = Zoo(tmp_path)
    zoo.plugin("dist-a", "zoo.family", FAMILY.format(body=body))
    ran = zoo.python(ASK)
    assert "[family-unknown]" in ran.stdout
    assert "[plugin-broken]" in ran.stdout
    assert text in ran.stdout


VETO = """
from hal_registry import Code, Reason, hookimpl

@hookimpl
def hal_veto(selection):
    return [Reason(Code.MODE_UNSUPPORTED, "policy", "a reviewed model", selection.model.model_type,
                   fix="ask for a review")]
"""


def test_a_veto_refuses_what_fits(tmp_path: Any) -> None:
    zoo = Zoo(tmp_path)
    zoo.plugin("dist-a", "zoo.veto", VETO)
    code = f"import hal\nprint(hal.explain('cpu', {real('lfm2-350m.json')!r}))"
    ran = zoo.python(code)
    assert ran.stdout.splitlines()[0] == (
        "lfm2 cannot run on cpu: policy needs a reviewed model, offered: lfm2"
    )


def test_a_broken_device_plugin_never_becomes_cpu(tmp_path: Any) -> None:
    """P089: the refusal holds the original cause, and cpu is only a suggestion."""
    zoo = Zoo(tmp_path)
    zoo.plugin("dist-a", "tpu.vendor", "raise OSError('libtpu.so: no such file')")
    code = f"import hal\nhal.select('tpu', {GDN!r})"
    ran = zoo.python(code)
    last = [line for line in ran.stderr.splitlines() if line.startswith("hal.Unsupported")]
    assert last == [
        "hal.Unsupported: qwen3_next cannot run on tpu: "
        "tpu.vendor is broken: OSError: libtpu.so: no such file"
    ]
    assert "torch" not in run_python("import hal, sys; print(*sys.modules)").stdout.split()


def test_a_good_plugin_serves_beside_broken_ones(tmp_path: Any) -> None:
    """P088: three distributions, two of them broken."""
    zoo = Zoo(tmp_path)
    zoo.plugin("dist-a", "tpu.import", "import no_such_module_anywhere")
    zoo.plugin("dist-b", "tpu.hook", "from hal_registry import *\n@hookimpl\ndef hal_x(): pass")
    offers = "{op: EVERYTHING for op in OPERATIONS}"
    source = "from hal_registry import OPERATIONS\nfrom support.registry import EVERYTHING\n"
    zoo.plugin("dist-c", "tpu.good", source + plugin_source("tpu.good", offers=offers))
    tests = str(__import__("pathlib").Path(__file__).parents[1])
    code = (
        f"import sys; sys.path.append({tests!r})\nimport hal, hal_registry\n"
        f"print(hal.explain('tpu', {GDN!r}).fits)\n"
        "print(*[f.error for f in hal_registry.default_registry().faults], sep='|')"
    )
    ran = zoo.python(code)
    assert ran.stdout.splitlines()[0] == "True", ran.stderr
    assert ran.stdout.count("|") == 1
    strict = zoo.python(code, HAL_STRICT="1")
    assert strict.returncode != 0
    assert "unknown hook hal_x" in strict.stderr or "no_such_module" in strict.stderr
