"""The driver's calls carry their arguments, and every failure is told by name."""

import ctypes
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hal_cuda.hopper.driver import Driver, DriverError, Kernel, View

KERNEL = Kernel(7, 512, 1234)


class Function:
    """A function of the library: notes its arguments, writes what it makes, gives a code."""

    def __init__(self, name: str, library: "Library") -> None:
        self.name, self.library, self.argtypes = name, library, list[Any]()

    def __call__(self, *given: Any) -> int:
        assert len(given) == len(self.argtypes), self.name
        for value, kind in zip(given, self.argtypes, strict=True):
            kind.from_param(value)
        self.library.calls.append((self.name, given))
        if self.name in self.library.makes:
            given[0]._obj.value = self.library.makes[self.name]
        codes = self.library.codes.get(self.name, [])
        return codes.pop(0) if codes else 0


class Library:
    """libcuda without a device."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.codes: dict[str, list[int]] = {}
        self.makes: dict[str, Any] = {
            "cuModuleLoadData": 11, "cuModuleGetFunction": 12, "cuModuleGetGlobal_v2": 13,
            "cuMemcpyDtoH_v2": 5000, "cuFuncGetAttribute": 640, "cuDeviceGet": 3,
            "cuDevicePrimaryCtxRetain": 14,
        }  # fmt: skip

    def __getattr__(self, name: str) -> Function:
        made = Function(name, self)
        setattr(self, name, made)
        return made

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def given(self, name: str) -> tuple[Any, ...]:
        return next(given for called, given in self.calls if called == name)


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture(autouse=True)
def guards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The devices that were made current."""
    entered: list[int] = []

    class Guard:
        def __init__(self, index: int) -> None:
            entered.append(index)

        def __enter__(self) -> None: ...

        def __exit__(self, *fault: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "device", Guard)
    return entered


def test_a_kernel_is_loaded_with_the_shared_memory_that_its_source_names(
    library: Library, guards: list[int]
) -> None:
    kernel = Driver(library).load(b"cubin", "gdn", "gdn_shared", 3)
    assert kernel == Kernel(function=12, threads=640, shared=5000)
    assert guards == [3]
    assert library.given("cuModuleLoadData")[1] == b"cubin"
    assert library.given("cuModuleGetFunction")[1:] == (11, b"gdn")
    assert library.given("cuModuleGetGlobal_v2")[2:] == (11, b"gdn_shared")
    assert library.given("cuFuncSetAttribute") == (12, 8, 5000)


def test_a_context_is_entered_before_a_module_is_loaded(library: Library) -> None:
    Driver(library).load(b"", "f", "g", 0)
    names = library.names()
    assert names.index("cuCtxSetCurrent") < names.index("cuModuleLoadData")
    assert library.given("cuCtxSetCurrent") == (14,)


def test_a_launch_carries_grid_block_shared_memory_and_stream(library: Library) -> None:
    Driver(library).launch(KERNEL, 99, 4096, 0, 77)
    assert library.given("cuLaunchKernel") == (7, 99, 1, 1, 512, 1, 1, 1234, 77, 4096, None)


def test_a_chained_launch_may_start_before_the_last_one_ends(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[tuple[Any, ...]]()

    def launch(self: Function, config: int, function: int, arguments: int, extra: None) -> int:
        assert (function, arguments, extra) == (7, 4096, None)
        *sizes, stream, attributes, count = struct.unpack("7I4x2QI4x", ctypes.string_at(config, 56))
        attribute = struct.unpack("i4xi60x", ctypes.string_at(attributes, 72))
        told.append((sizes, stream, attribute, count))
        return 0

    driver = Driver(library)
    monkeypatch.setattr(Function, "__call__", launch)
    driver.chain(KERNEL, 99, 4096, 77)
    assert told == [([99, 1, 1, 512, 1, 1, 1234], 77, (6, 1), 1)]


def test_a_thread_without_a_context_gets_one_and_launches_again(library: Library) -> None:
    library.codes["cuLaunchKernel"] = [201]
    Driver(library).launch(KERNEL, 1, 0, 2, 0)
    assert library.names() == [
        "cuLaunchKernel", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent",
        "cuLaunchKernel",
    ]  # fmt: skip
    assert library.given("cuDeviceGet")[1] == 2


@pytest.mark.parametrize("codes", [[700], [201, 201], [201, 1]])
def test_a_failed_launch_is_an_error(library: Library, codes: list[int]) -> None:
    library.codes["cuLaunchKernel"] = list(codes)
    with pytest.raises(DriverError, match=f"cuLaunchKernel: {codes[-1]}: unknown"):
        Driver(library).launch(KERNEL, 1, 0, 0, 0)


LOADS = (
    "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuModuleLoadData",
    "cuModuleGetFunction", "cuModuleGetGlobal_v2", "cuMemcpyDtoH_v2", "cuFuncSetAttribute",
    "cuFuncGetAttribute",
)  # fmt: skip


@pytest.mark.parametrize("name", LOADS)
def test_a_failure_while_loading_names_its_function(library: Library, name: str) -> None:
    library.codes[name] = [209]
    with pytest.raises(DriverError, match=f"cuda.hopper: {name}: 209"):
        Driver(library).load(b"", "f", "g", 0)


def test_what_the_driver_says_is_told(library: Library) -> None:
    library.makes["cuGetErrorString"] = None

    def say(code: int, text: Any) -> int:
        text._obj.value = f"code {code} in words".encode()
        return 0

    driver = Driver(library)
    library.cuGetErrorString = say  # type: ignore[assignment, method-assign]
    library.codes["cuTensorMapReplaceAddress"] = [1]
    with pytest.raises(DriverError, match="cuTensorMapReplaceAddress: 1: code 1 in words"):
        driver.move(64, 16)


def numbers(array: Any) -> list[int]:
    return list(array)


def test_a_map_is_of_bfloat16_in_rows_of_128_bytes(library: Library) -> None:
    view = View(4096, (64, 300, 2, 4), (2048, 128, 512), (64, 64, 2, 1))
    Driver(library).map(640, view)
    at, kind, rank, base, sizes, strides, box, steps, *rest = library.given(
        "cuTensorMapEncodeTiled"
    )
    assert (at, kind, rank, base) == (640, 9, 4, 4096)
    assert [numbers(x) for x in (sizes, strides, box, steps)] == [
        [64, 300, 2, 4], [2048, 128, 512], [64, 64, 2, 1], [1, 1, 1, 1],
    ]  # fmt: skip
    assert rest == [0, 3, 2, 0]
    assert (sizes._type_, box._type_) == (ctypes.c_uint64, ctypes.c_uint32)


def test_a_map_moves_without_being_made_again(library: Library) -> None:
    Driver(library).move(640, 8192)
    assert library.calls == [("cuTensorMapReplaceAddress", (640, 8192))]


@pytest.fixture
def real() -> Iterator[Driver]:
    """The driver of a machine that has one; most of it can be asked without a device."""
    try:
        yield Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError:
        pytest.skip("no libcuda.so.1")


def test_a_real_driver_has_every_function(real: Driver) -> None:
    assert real is not None
