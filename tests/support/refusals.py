"""One refusal of every kind, from synthetic manifests: title -> refusal."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import hal
from hal.refusal import Refusal, Unsupported
from hal_registry import Code, Fault, Manifest, Reason, Registry
from support.model_configs import real, tiny
from support.providers import MODULE
from support.registry import EVERYTHING, manifest

Asked = Callable[[], Refusal]


def explained(device: str, config: Any, *manifests: Manifest, **options: Any) -> Asked:
    """The refusal that manifests alone give."""

    def ask() -> Refusal:
        answer = hal.explain(device, config, registry=Registry.of(*manifests), **options)
        assert answer.refusal is not None, str(answer)
        return answer.refusal

    return ask


def selected(device: str, config: Any, *manifests: Manifest, **options: Any) -> Asked:
    """The refusal that comes after probing and binding."""

    def ask() -> Refusal:
        try:
            hal.select(device, config, registry=Registry.of(*manifests), **options)
        except Unsupported as error:
            return error.refusal
        raise AssertionError("was accepted")

    return ask


def faulty(code: Code, error: str) -> Asked:
    """The refusal where a device's only plugin is a fault."""
    fault = Fault("cuda.vendor", "vendor-hal", "0.3", code, error)
    registry = Registry.of(manifest("cpu.any", "all"), faults=[fault])

    def ask() -> Refusal:
        answer = hal.explain("cuda", GDN, registry=registry)
        assert answer.refusal is not None
        return answer.refusal

    return ask


GDN, KDA, LFM, ZAYA = tiny("qwen3_next"), tiny("kimi_linear"), tiny("lfm2"), tiny("zaya")
PHASES = ("delta_rule.prefill", "delta_rule.decode")


def gdn(name: str, **changes: Any) -> Manifest:
    """A provider of everything a Gated DeltaNet needs, with its delta rule narrowed."""
    full = manifest(name, "conv", *PHASES)
    narrow = replace(EVERYTHING, **changes)
    return replace(full, offers={**full.offers, **dict.fromkeys(PHASES, narrow)})


def loading(name: str, load: str, **fields: Any) -> Manifest:
    """A provider of conv and conv_state with code of `support.providers`."""
    return manifest(name, "conv", "conv_state", load=f"{MODULE}:{load}", **fields)


SCENARIOS: Mapping[str, Asked] = {
    "an interface is missing, another device has it": explained(
        "npu", LFM, manifest("npu.vendor", "conv", "delta_rule"), manifest("cuda.any", "all")
    ),
    "two interfaces are missing, the provider says why": explained(
        "npu", LFM, manifest("npu.vendor", note="this version offers no operation")
    ),
    "nobody knows the kind": explained(
        "cuda", tiny("recurrent_gemma"), manifest("cuda.any", "all")
    ),
    "one operation is missing": explained(
        "cuda",
        GDN,
        manifest("cuda.vendor", "conv", *PHASES),
        speculative=hal.Speculative(4),
    ),
    "the dtype is not offered": explained(
        "cuda", GDN, gdn("cuda.vendor", dtypes={"bfloat16"}), dtype="float16"
    ),
    "the state dtype is not offered": explained(
        "cuda", GDN, gdn("cuda.vendor", state_dtypes={"bfloat16"})
    ),
    "two providers share no layout": explained(
        "cuda",
        GDN,
        manifest("cuda.a", "conv", PHASES[0], offer=replace(EVERYTHING, layouts=("CW", "VK"))),
        manifest("cuda.b", PHASES[1], offer=replace(EVERYTHING, layouts=("KV",))),
    ),
    "an offer knows no layout of the state": explained(
        "cuda", GDN, gdn("cuda.vendor", layouts=("CW",))
    ),
    "prefixes cannot be tracked": explained(
        "cuda", GDN, gdn("cuda.vendor", track=()), prefix_cache=True
    ),
    "prefixes are tracked on a coarser grid": explained(
        "cuda", GDN, gdn("cuda.vendor", track=(64,)), prefix_cache=16
    ),
    "the tree is not verified, the width is too large": explained(
        "cuda",
        GDN,
        replace(
            manifest("cuda.vendor", "conv", "delta_rule"),
            offers={
                **manifest("cuda.vendor", "conv", "delta_rule").offers,
                "delta_rule.verify": replace(
                    EVERYTHING, verify=("chain",), verify_widths=range(1, 5)
                ),
            },
        ),
        speculative=hal.Speculative(8, tree=True),
    ),
    "graphs and negative slots are not offered": explained(
        "cuda", GDN, gdn("cuda.vendor", features=("strided",)), graphs=True
    ),
    "the gate is another one": explained("cuda", KDA, gdn("cuda.vendor", gates=("scalar",))),
    "nearest first: head dims, then a whole interface": explained(
        "cuda", GDN, gdn("cuda.b", head_dims=((128, 128),)), manifest("cuda.a", "conv")
    ),
    "the conv is too wide": explained(
        "cuda",
        tiny("lfm3"),
        manifest(
            "cuda.vendor", "conv", "conv_state", offer=replace(EVERYTHING, widths=range(2, 5))
        ),
    ),
    "a vendor's own constraint": explained(
        "cuda",
        GDN,
        manifest(
            "cuda.vendor",
            "conv",
            *PHASES,
            check=lambda need: (
                [
                    Reason(
                        Code.SHAPE_UNSUPPORTED,
                        need.operation,
                        "value heads in blocks of 8",
                        "4 value heads",
                        detail="vendor erratum 17",
                        fix="use a larger model",
                    )
                ]
                if need.operation == PHASES[0]
                else []
            ),
        ),
    ),
    "heads do not divide": explained(
        "cuda",
        real("qwen3-next-80b-a3b.json"),
        manifest("cuda.any", "all"),
        tp=hal.Shard(0, 32),
    ),
    "groups do not divide": explained(
        "cuda",
        tiny("mamba2", num_heads=12, hidden_size=96, head_dim=16, n_groups=6),
        manifest("cuda.any", "all"),
        tp=hal.Shard(1, 4),
    ),
    "the arch is given and nobody has it": explained(
        "cuda:sm_121", GDN, manifest("cuda.hopper", "conv", *PHASES, arches=("sm_90", "sm_100"))
    ),
    "the arch is probed and nobody has it": selected(
        "cuda:0", ZAYA, loading("cuda.hopper", "Good", arches=("sm_90",), probe=f"{MODULE}:sm_121")
    ),
    "a library is missing": selected(
        "npu",
        ZAYA,
        loading(
            "npu.vendor",
            "Good",
            needs=("no-such-lib>=2.1",),
            hints={"no-such-lib": "build it from its repository; it is not on PyPI"},
        ),
    ),
    "a library is too old": selected(
        "npu", ZAYA, loading("npu.vendor", "Good", needs=("known-lib>=2.1",))
    ),
    "the device is not there": selected(
        "npu:1", ZAYA, loading("npu.vendor", "Good", probe=f"{MODULE}:absent")
    ),
    "there is one device and no probe": explained("npu:1", ZAYA, loading("npu.vendor", "Good")),
    "no plugin for the device": explained("gpu", GDN, manifest("cuda.any", "all")),
    "no plugin at all": explained("cuda", GDN),
    "the family is unknown": explained(
        "cuda", real("rwkv-6-1b6.json"), manifest("cuda.any", "all")
    ),
    "the model is no hybrid": explained(
        "cuda",
        {k: v for k, v in LFM.items() if k not in ("layer_types", "full_attn_idxs")},
        manifest("cuda.any", "all"),
    ),
    "the model_type is a book": explained(
        "cuda", {"model_type": "x" * 10**6}, manifest("cuda.any", "all")
    ),
    "the plugin is broken": faulty(
        Code.PLUGIN_BROKEN, "ImportError: libvendor.so.3: cannot open shared object file"
    ),
    "the plugin is blocked": faulty(Code.PLUGIN_BLOCKED, "left out by HAL_PLUGINS or HAL_BLOCK"),
    "the name is taken": faulty(Code.NAME_CONFLICT, "cuda.vendor is taken by another-hal 2.0"),
    "the plugin speaks another API": faulty(
        Code.API_MISMATCH, "cuda.vendor speaks API 2.0, hal speaks 1.0"
    ),
    "the provider fails when it is built": selected("npu", ZAYA, loading("npu.vendor", "Exits")),
    "the provider's module is gone": selected("npu", ZAYA, loading("npu.vendor", "Gone")),
    "a method is missing": selected("npu", ZAYA, loading("npu.vendor", "Lacking")),
    "the provider lacks methods of its own": selected("npu", ZAYA, loading("npu.vendor", "Bare")),
    "an interface is left out altogether": selected("npu", ZAYA, loading("npu.vendor", "Partial")),
    "the probe counts in words": selected(
        "npu", ZAYA, loading("npu.vendor", "Good", probe=f"{MODULE}:many")
    ),
    "arguments are in another order": selected("npu", ZAYA, loading("npu.vendor", "Swapping")),
    "an override names somebody who is not there": explained(
        "cuda", GDN, gdn("cuda.vendor"), providers={"delta_rule": "cuda.other"}
    ),
    "an override names what the model does not need": explained(
        "cuda", GDN, gdn("cuda.vendor"), providers={"scan": "cuda.vendor"}
    ),
    "an override names a provider that does not fit": explained(
        "cuda",
        GDN,
        gdn("cuda.vendor"),
        gdn("cuda.narrow", head_dims=((128, 128),)),
        providers={"delta_rule.decode": "cuda.narrow"},
    ),
}
