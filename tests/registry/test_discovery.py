"""A zoo of broken plugins: none ends the scan, hides a good one or goes unrecorded."""

import copy
import pickle
import sys
from pathlib import Path

import pytest

from hal_registry import API, Code, Fault, PluginFault, Registry, discover
from support.registry import Zoo, plugin_source

HOOK = "from hal_registry import *\n@hookimpl\n"
MAJOR, MINOR = API

BROKEN = {
    "import-error": ("import no_such_module_anywhere", "ModuleNotFoundError: No module named"),
    "syntax-error": ("def (", "SyntaxError"),
    "system-exit": ("raise SystemExit(3)", "SystemExit: 3"),
    "base-exception": (
        "class Odd(BaseException): pass\nraise Odd('strange')",
        "Odd: strange",
    ),
    "error-without-text": (
        "class Mute(Exception):\n    def __str__(self): raise RuntimeError\nraise Mute",
        "Mute: <exception str() failed>",
    ),
    "hook-raises": (HOOK + "def hal_providers(): raise KeyError('no driver')", "'no driver'"),
    "hook-exits": (HOOK + "def hal_providers(): raise SystemExit('bye')", "SystemExit: bye"),
    "hook-misspelt": (
        HOOK + "def hal_provider(): return []",
        "unknown hook hal_provider, known are hal_providers, hal_requirements, hal_veto",
    ),
    "hook-argument": (HOOK + "def hal_providers(device): return []", "device"),
    "hook-argument-late": (
        HOOK + "def hal_providers(): return []\n@hookimpl\ndef hal_veto(choice): return []",
        "choice",
    ),
    "no-hook": ("x = 1", "no hook, known are hal_providers, hal_requirements, hal_veto"),
    "hook-gives-none": (HOOK + "def hal_providers(): return None", "gave None, expected a list"),
    "hook-gives-text": (HOOK + "def hal_providers(): return 'cuda'", "gave 'cuda', expected"),
    "hook-gives-dicts": (HOOK + "def hal_providers(): return [{}]", "gave {}, expected"),
    "hook-is-a-generator": (HOOK + "def hal_providers(): yield 1", "<generator object"),
    "manifest-malformed": (
        plugin_source("cuda.bad", load="no path"),
        "cuda.bad: load: expected 'module:name', got 'no path'",
    ),
    "manifest-misspelt": (
        plugin_source("cuda.bad", offers="{'conv.prefil': Offer()}"),
        "cuda.bad: offers: expected one of conv.prefill,",
    ),
    "need-unreadable": (
        HOOK + "def hal_providers(): return [Manifest('cuda.bad', 'cuda', API, 'a:b', {}, "
        "needs=('torch>=2.*',))]",
        "cuda.bad: needs: expected a tuple of version requirements",
    ),
    "device-unreachable": (
        HOOK + "def hal_providers(): return [Manifest('Cuda.bad', 'Cuda', API, 'a:b', {})]",
        "Cuda.bad: device: expected a device type such as 'cuda', got 'Cuda'",
    ),
    "other-device": (
        plugin_source("rocm.bad"),
        "entry point cuda.bad is for cuda, its manifest rocm.bad is not",
    ),
    "other-flavour": (
        plugin_source("cuda.other"),
        "entry point cuda.bad gives cuda.other and no manifest of its own name",
    ),
}


def only_fault(registry: Registry) -> Fault:
    (fault,) = registry.faults
    return fault


def names(registry: Registry) -> list[str]:
    return [candidate.name for candidate in registry.candidates]


@pytest.mark.parametrize("kind", sorted(BROKEN))
def test_a_broken_plugin_is_a_record_and_hides_no_good_one(zoo: Zoo, kind: str) -> None:
    source, cause = BROKEN[kind]
    zoo.plugin("dist-a", "cpu.first")
    zoo.plugin("dist-b", "cuda.bad", source)
    zoo.plugin("dist-c", "cuda.good")
    registry = discover()
    assert names(registry) == ["cpu.first", "cuda.good"]
    fault = only_fault(registry)
    assert (fault.name, fault.device, fault.distribution) == ("cuda.bad", "cuda", "dist-b")
    assert fault.code is Code.PLUGIN_BROKEN
    assert cause in fault.error
    assert "\n" not in fault.error
    assert "Traceback" in fault.traceback


@pytest.mark.parametrize("kind", sorted(BROKEN))
def test_strict_raises_what_broke_and_says_where(zoo: Zoo, kind: str) -> None:
    """What is no Exception would end the host in silence, so it is raised as one."""
    source, cause = BROKEN[kind]
    zoo.plugin("dist-b", "cuda.bad", source)
    with pytest.raises(Exception) as caught:
        discover(strict=True)
    error = caught.value
    assert isinstance(error, PluginFault) or not isinstance(error.__cause__, SystemExit)
    if kind in ("system-exit", "base-exception", "hook-exits"):
        assert isinstance(error, PluginFault)
        assert cause in str(error)
        assert error.__cause__ is not None
    assert caught.value.__notes__ == ["while loading the plugin cuda.bad of dist-b"]


def test_strict_comes_from_the_environment(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo.plugin("dist-b", "cuda.bad", "import no_such_module_anywhere")
    monkeypatch.setenv("HAL_STRICT", "1")
    with pytest.raises(ModuleNotFoundError):
        discover()


@pytest.mark.parametrize("where", ["raise KeyboardInterrupt", "hook"])
def test_ctrl_c_passes_through(zoo: Zoo, where: str) -> None:
    hook = HOOK + "def hal_providers(): raise KeyboardInterrupt"
    zoo.plugin("dist-b", "cuda.bad", hook if where == "hook" else where)
    with pytest.raises(KeyboardInterrupt):
        discover()


def test_a_missing_module_and_a_malformed_entry_point_are_records(zoo: Zoo) -> None:
    zoo.add("dist-a", {"cuda.gone": "zoo_gone", "cuda.worse": "not a module!"}, {})
    zoo.plugin("dist-b", "cuda.good")
    registry = discover()
    assert names(registry) == ["cuda.good"]
    assert [fault.name for fault in registry.faults] == ["cuda.gone", "cuda.worse"]


def test_unreadable_metadata_is_a_record_if_it_names_the_group(zoo: Zoo) -> None:
    zoo.plugin("dist-b", "cuda.good")
    for name, text in (("ours", "[hal.providers]\nno equals sign\n"), ("other", "[x]\nnothing\n")):
        info = zoo.root / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(text)
    registry = discover()
    assert names(registry) == ["cuda.good"]
    assert [fault.distribution for fault in registry.faults] == ["ours"]
    with pytest.raises(Exception, match="missing 1 required") as caught:
        discover(strict=True)
    assert caught.value.__notes__ == ["while loading the plugin ours of ours"]


@pytest.mark.parametrize("thing", ["None", "3", "'text'", "object()"])
def test_an_entry_point_that_is_no_plugin_is_a_record(zoo: Zoo, thing: str) -> None:
    zoo.add("dist-a", {"cuda.odd": "zoo_odd:thing"}, {"zoo_odd": f"thing = {thing}"})
    assert "no hook" in only_fault(discover()).error


def test_a_refused_plugin_leaves_no_hook_behind(zoo: Zoo) -> None:
    veto = HOOK + "def hal_veto(selection): return [1]\n@hookimpl\ndef hal_providers(): return 1"
    zoo.plugin("dist-a", "cuda.bad", veto)
    registry = discover()
    assert only_fault(registry).error == "hal_providers gave 1, expected a list of Manifest"
    assert registry.vetoes(None) == ()


def test_all_manifests_of_a_plugin_or_none(zoo: Zoo) -> None:
    source = HOOK + (
        "def hal_providers(): return [Manifest(name=n, device=n[:4], api=API, load='a:b',"
        " offers={}) for n in ('cuda.one', 'rocm.two')]"
    )
    zoo.plugin("dist-a", "cuda.two", source)
    registry = discover()
    assert not registry.candidates
    assert only_fault(registry).error.endswith("its manifest rocm.two is not")


def test_the_first_distribution_wins_a_name_and_the_other_is_a_record(zoo: Zoo) -> None:
    zoo.plugin("dist-b", "cuda.same")
    zoo.plugin("dist-a", "cuda.same")
    registry = discover()
    assert [c.distribution for c in registry.candidates] == ["dist-a"]
    fault = only_fault(registry)
    assert (fault.code, fault.distribution) == (Code.NAME_CONFLICT, "dist-b")
    assert fault.error == "cuda.same is taken by dist-a 1.0"


def test_a_broken_claimant_does_not_take_the_name(zoo: Zoo) -> None:
    zoo.plugin("dist-a", "cuda.same", "raise RuntimeError('half built')")
    zoo.plugin("dist-b", "cuda.same")
    registry = discover()
    assert [c.distribution for c in registry.candidates] == ["dist-b"]
    assert only_fault(registry).code is Code.PLUGIN_BROKEN


def test_one_plugin_may_not_give_a_name_twice(zoo: Zoo) -> None:
    manifest = "Manifest(name='cuda.a', device='cuda', api=API, load='a:b', offers={})"
    zoo.plugin("dist-a", "cuda.a", HOOK + f"def hal_providers(): return [{manifest}] * 2")
    registry = discover()
    assert not registry.candidates
    assert only_fault(registry).code is Code.NAME_CONFLICT


def test_a_module_under_two_names_is_loaded_once(zoo: Zoo) -> None:
    points = {"cuda.one": "zoo_shared", "cuda.two": "zoo_shared"}
    zoo.add("dist-a", points, {"zoo_shared": plugin_source("cuda.one")})
    registry = discover()
    assert names(registry) == ["cuda.one"]
    fault = only_fault(registry)
    assert (fault.name, fault.code) == ("cuda.two", Code.NAME_CONFLICT)
    assert fault.error == "zoo_shared is loaded already as cuda.one of dist-a (zoo_shared)"


def test_an_entry_point_listed_twice_keeps_the_first(zoo: Zoo) -> None:
    zoo.plugin("dist-a", "cuda.one")
    with (zoo.root / "dist_a-1.0.dist-info/entry_points.txt").open("a") as file:
        file.write("cuda.one = zoo_dist_a\n")
    registry = discover()
    assert names(registry) == ["cuda.one"]
    assert only_fault(registry).code is Code.NAME_CONFLICT


def test_a_distribution_found_twice_on_the_path_counts_once(zoo: Zoo) -> None:
    zoo.plugin("dist-a", "cuda.one")
    zoo.add("dist-a", {"cuda.one": "zoo_dist_a"}, {}, version="0.9")
    registry = discover()
    assert names(registry) == ["cuda.one"]
    assert not registry.faults


@pytest.mark.parametrize(
    ("api", "shown"),
    [
        (f"({MAJOR + 1}, 0)", f"{MAJOR + 1}.0"),
        (f"({MAJOR - 1}, 9)", f"{MAJOR - 1}.9"),
        (f"({MAJOR}, {MINOR + 1})", f"{MAJOR}.{MINOR + 1}"),
    ],
)
def test_another_api_is_refused_with_both_numbers(zoo: Zoo, api: str, shown: str) -> None:
    foreign = plugin_source("cuda.new", api=api, offers="{'word.of_that_api': Offer()}")
    zoo.plugin("dist-a", "cuda.new", foreign)
    fault = only_fault(discover())
    assert fault.code is Code.API_MISMATCH
    assert fault.error == f"cuda.new speaks API {shown}, hal speaks {MAJOR}.{MINOR}"


RECORDS = "import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\n"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("HAL_BLOCK", "cuda.noisy"),
        ("HAL_BLOCK", " other , dist-noisy "),
        ("HAL_BLOCK", "Dist_Noisy"),
        ("HAL_PLUGINS", "cpu.quiet"),
        ("HAL_PLUGINS", "dist-quiet"),
    ],
)
def test_a_blocked_plugin_is_not_even_imported(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    zoo.plugin("dist-quiet", "cpu.quiet")
    zoo.plugin("dist-noisy", "cuda.noisy", RECORDS + plugin_source("cuda.noisy"))
    monkeypatch.setenv(variable, value)
    registry = discover(strict=True)
    assert names(registry) == ["cpu.quiet"]
    fault = only_fault(registry)
    assert (fault.name, fault.code) == ("cuda.noisy", Code.PLUGIN_BLOCKED)
    assert not list(Path(zoo.root).glob("*.ran"))
    assert "zoo_dist_noisy" not in sys.modules


def test_an_empty_allow_list_allows_nothing(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo.plugin("dist-a", "cuda.one")
    monkeypatch.setenv("HAL_PLUGINS", "")
    assert only_fault(discover()).code is Code.PLUGIN_BLOCKED


def test_arguments_go_before_the_environment(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo.plugin("dist-a", "cuda.one")
    zoo.plugin("dist-b", "cuda.two")
    monkeypatch.setenv("HAL_BLOCK", "cuda.one")
    assert names(discover(allow=["cuda.one", "cuda.two"], block=["cuda.two"])) == ["cuda.one"]


def test_order_is_by_name_and_does_not_depend_on_the_path(zoo: Zoo) -> None:
    for distribution, name in (("dist-a", "npu.z"), ("dist-b", "cuda.b"), ("dist-c", "cuda.a")):
        zoo.plugin(distribution, name)
    registry = discover()
    assert names(registry) == ["cuda.a", "cuda.b", "npu.z"]
    assert [c.name for c in registry.on("cuda")] == ["cuda.a", "cuda.b"]
    assert registry.devices() == ("cuda", "npu")


def test_discovery_is_idempotent(zoo: Zoo) -> None:
    zoo.plugin("dist-a", "cuda.one")
    zoo.plugin("dist-b", "cuda.bad", "import no_such_module_anywhere")
    first, second = discover(), discover()
    assert names(first) == names(second) == ["cuda.one"]
    assert first.faults == second.faults


def test_threads_share_one_discovery(zoo: Zoo) -> None:
    counted = "import pathlib\nwith (pathlib.Path(__file__).parent / 'count').open('a') as f:\n"
    zoo.plugin("dist-a", "zoo.one", counted + "    f.write('x')\n" + plugin_source("zoo.one"))
    code = (
        "import threading, time\nfrom hal_registry import default_registry\nfound = []\n"
        "ts = [threading.Thread(target=lambda: found.append(default_registry())) for _ in range(8)]"
        "\n[t.start() for t in ts]; [t.join() for t in ts]\n"
        "assert len(found) == 8 and len(set(map(id, found))) == 1\n"
        "assert [c.name for c in found[0].on('zoo')] == ['zoo.one'], found[0].faults\n"
    )
    ran = zoo.python(code)
    assert ran.returncode == 0, ran.stderr
    assert (zoo.root / "count").read_text() == "x"


def test_a_plugin_that_asks_for_the_registry_while_it_loads_does_not_hang(zoo: Zoo) -> None:
    ask = "import hal_registry\nhal_registry.default_registry()\n"
    zoo.plugin("dist-a", "zoo.asks", ask + plugin_source("zoo.asks"))
    ran = zoo.python("import hal_registry; print(hal_registry.default_registry().devices())")
    assert "'cpu'" in ran.stdout, ran.stderr


def test_a_veto_plugin_needs_no_provider(zoo: Zoo) -> None:
    zoo.plugin("dist-a", "cuda.policy", HOOK + "def hal_veto(selection): return []")
    registry = discover()
    assert not registry.candidates
    assert not registry.faults


def test_plugin_fault_is_an_exception_with_its_code(zoo: Zoo) -> None:
    zoo.plugin("dist-a", "cuda.bad", "x = 1")
    with pytest.raises(PluginFault) as caught:
        discover(strict=True)
    assert caught.value.code is Code.PLUGIN_BROKEN
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.code, str(again)) == (caught.value.code, str(caught.value))


def test_a_registry_crosses_a_process_without_its_hooks(zoo: Zoo) -> None:
    zoo.plugin("dist-a", "cuda.one")
    zoo.plugin("dist-b", "cuda.bad", "x = 1")
    registry = discover()
    for again in (pickle.loads(pickle.dumps(registry)), copy.deepcopy(registry)):
        assert again == registry
        assert again.vetoes(None) == ()


def test_one_entry_point_may_bring_several_manifests_if_one_has_its_name(zoo: Zoo) -> None:
    both = ", ".join(
        f"Manifest({name!r}, 'cuda', API, 'nowhere:Provider', {{}})"
        for name in ("cuda.zero", "cuda.one")
    )
    source = HOOK + f"def hal_providers(): return [{both}]"
    zoo.plugin("dist-a", "cuda.one", source)
    registry = discover()
    assert names(registry) == ["cuda.one", "cuda.zero"]
    assert {candidate.module for candidate in registry.candidates} == {"zoo_dist_a"}


def test_a_plugin_of_hooks_alone_needs_no_manifest_of_its_name(zoo: Zoo) -> None:
    zoo.plugin("dist-a", "cuda.rules", HOOK + "def hal_veto(selection): return []")
    assert discover().faults == ()


def test_an_entry_point_that_points_into_another_distribution_takes_nothing_of_it(
    zoo: Zoo,
) -> None:
    zoo.plugin("dist-b", "cuda.theirs")
    zoo.add("dist-a", {"cuda.mine": "zoo_dist_b"}, {})
    registry = discover()
    assert [(c.name, c.distribution) for c in registry.candidates] == [("cuda.theirs", "dist-b")]
    assert (only_fault(registry).name, only_fault(registry).distribution) == ("cuda.mine", "dist-a")
