"""Sources are compiled once, kept whole or not at all, and refused with the compiler's words."""

import errno
import hashlib
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hal_cuda.hopper import nvrtc
from hal_cuda.hopper.nvrtc import CompileError, Compiler, Program

PROGRAM = Program("one.cu", "text", {"a.cuh": "header"})
OPTIONS = ("--one", "--two")


class Library:
    """NVRTC that makes a cubin of what it is given."""

    def __init__(self, fails: int = 0, log: bytes = b"a warning\0") -> None:
        self.fails, self.log, self.destroyed, self.compiled = fails, log, 0, list[list[bytes]]()
        self.sources: list[tuple[bytes, bytes, list[tuple[bytes, bytes]]]] = []

    def nvrtcCreateProgram(
        self, handle: Any, text: bytes, name: bytes, count: int, headers: Any, names: Any
    ) -> int:
        given = [(names[i], headers[i]) for i in range(count)]
        self.sources.append((text, name, given))
        return 0

    def nvrtcCompileProgram(self, handle: Any, count: int, options: Any) -> int:
        self.compiled.append([options[i] for i in range(count)])
        return self.fails

    def nvrtcGetProgramLogSize(self, handle: Any, size: Any) -> int:
        size._obj.value = len(self.log)
        return 0

    def nvrtcGetProgramLog(self, handle: Any, buffer: Any) -> int:
        buffer.raw = self.log
        return 0

    def nvrtcGetCUBINSize(self, handle: Any, size: Any) -> int:
        size._obj.value = 5
        return 0

    def nvrtcGetCUBIN(self, handle: Any, buffer: Any) -> int:
        buffer.raw = b"cubin"
        return 0

    def nvrtcDestroyProgram(self, handle: Any) -> int:
        self.destroyed += 1
        return 0

    def nvrtcGetErrorString(self, code: int) -> bytes:
        return f"ERROR_{code}".encode()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Library:
    made = Library()
    monkeypatch.setattr(nvrtc, "compiler", lambda: Compiler(made, (13, 0)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return made


def cubins(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_program_is_compiled_once(library: Library, tmp_path: Path) -> None:
    assert [nvrtc.compiled(PROGRAM, {"N": 2}) for _ in range(3)] == [b"cubin"] * 3
    assert len(library.compiled) == 1
    assert [path.parent.name for path in cubins(tmp_path)] == ["cuda.hopper"]


def test_the_compiler_gets_source_headers_and_definitions(library: Library) -> None:
    nvrtc.compiled(PROGRAM, {"N": 2, "TRACK": 0})
    assert library.sources == [(b"text", b"one.cu", [(b"a.cuh", b"header")])]
    (options,) = library.compiled
    assert options[:2] == [b"--gpu-architecture=sm_90a", b"--std=c++17"]
    assert options[2:] == [b"--define-macro=N=2", b"--define-macro=TRACK=0"]
    assert library.destroyed == 1


CHANGES: dict[str, Callable[[], tuple[Program, tuple[str, ...], tuple[int, int]]]] = {
    "name": lambda: (replace(PROGRAM, name="two.cu"), OPTIONS, (13, 0)),
    "text": lambda: (replace(PROGRAM, text="other"), OPTIONS, (13, 0)),
    "header": lambda: (replace(PROGRAM, headers={"a.cuh": "x"}), OPTIONS, (13, 0)),
    "header's name": lambda: (replace(PROGRAM, headers={"b.cuh": "header"}), OPTIONS, (13, 0)),
    "options": lambda: (PROGRAM, (*OPTIONS, "--three"), (13, 0)),
    "order": lambda: (PROGRAM, OPTIONS[::-1], (13, 0)),
    "version": lambda: (PROGRAM, OPTIONS, (13, 1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_changes_is_compiled_anew(name: str) -> None:
    assert nvrtc.key_of(*CHANGES[name]()) != nvrtc.key_of(PROGRAM, OPTIONS, (13, 0))


@given(st.dictionaries(st.text(), st.text(), max_size=4))
def test_headers_in_any_order_are_the_same_program(headers: dict[str, str]) -> None:
    left = replace(PROGRAM, headers=headers)
    right = replace(PROGRAM, headers=dict(reversed(headers.items())))
    keys = {nvrtc.key_of(program, OPTIONS, (13, 0)) for program in (left, right)}
    assert len(keys) == 1


def test_a_place_that_takes_nothing_is_no_fault(
    library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert nvrtc.compiled(PROGRAM, {}) == b"cubin"
    assert nvrtc.compiled(PROGRAM, {}) == b"cubin"
    assert len(library.compiled) == 2


def test_a_cubin_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, seen = tmp_path / "deep" / "one.cubin", list[bool]()
    replaced = Path.replace

    def note(self: Path, target: Path) -> Path:
        seen.append(target.exists() or self.read_bytes() != b"whole")
        return replaced(self, target)

    monkeypatch.setattr(Path, "replace", note)
    nvrtc.keep(place, b"whole")
    assert seen == [False] and place.read_bytes() == b"whole"
    assert cubins(tmp_path) == [place]


@pytest.mark.parametrize("left", [b"", b"cub", b"cubin", b"\0" * 32, b"\0" * 37])
def test_a_file_that_is_not_what_was_kept_is_compiled_anew(
    left: bytes, library: Library, tmp_path: Path
) -> None:
    nvrtc.compiled(PROGRAM, {})
    (place,) = cubins(tmp_path)
    place.write_bytes(left)
    assert [nvrtc.compiled(PROGRAM, {}) for _ in range(2)] == [b"cubin"] * 2
    assert len(library.compiled) == 2


@given(st.binary(min_size=1, max_size=80), st.data())
def test_a_kept_file_that_was_cut_or_changed_is_never_given(cubin: bytes, data: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place, whole = Path(folder) / "one.cubin", hashlib.sha256(cubin).digest() + cubin
        place.write_bytes(whole)
        assert nvrtc._kept(place) == cubin
        at = data.draw(st.integers(0, len(whole) - 1))
        for wrong in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
            place.write_bytes(wrong)
            assert nvrtc._kept(place) == b""


def test_a_full_disk_is_no_fault_and_leaves_nothing(
    library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(Path, "replace", full)
    assert nvrtc.compiled(PROGRAM, {}) == b"cubin"
    assert cubins(tmp_path) == []


def test_a_user_without_a_home_compiles_each_time(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nobody)
    assert [nvrtc.compiled(PROGRAM, {}) for _ in range(2)] == [b"cubin"] * 2
    assert len(library.compiled) == 2


def test_without_a_cache_folder_the_home_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/somewhere")
    assert nvrtc.folder() == Path("/somewhere/.cache/hal/cuda.hopper")


def test_a_refused_source_says_why_and_is_not_kept(library: Library, tmp_path: Path) -> None:
    library.fails, library.log = 6, b"one.cu(3): error: no\0"
    with pytest.raises(CompileError, match=r"one\.cu: ERROR_6 \(NVRTC 13\.0\)\n.*error: no"):
        nvrtc.compiled(PROGRAM, {})
    assert library.destroyed == 1 and cubins(tmp_path) == []


def test_the_compiler_that_torch_brings_goes_before_a_toolkit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel, toolkit = tmp_path / "nvidia" / "cu13" / "lib", tmp_path / "toolkit" / "lib64"
    for folder, version in ((wheel, "13"), (toolkit, "12")):
        folder.mkdir(parents=True)
        (folder / f"libnvrtc.so.{version}").touch()
        (folder / f"libnvrtc.alt.so.{version}").touch()
        (folder / f"libnvrtc-builtins.so.{version}.0").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(nvrtc, "find_spec", spec_at(tmp_path / "nvidia"))
    assert nvrtc.found() == wheel / "libnvrtc.so.13"
    monkeypatch.setattr(nvrtc, "find_spec", lambda name: None)
    assert nvrtc.found() == toolkit / "libnvrtc.so.12"


def spec_at(*roots: Path) -> Callable[[str], Any]:
    spec = SimpleNamespace(submodule_search_locations=[str(root) for root in roots])
    return lambda name: spec


def test_the_newest_of_a_folder_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "cu" / "lib"
    folder.mkdir(parents=True)
    for version in ("9", "13", "12.4.127", "12.10"):
        (folder / f"libnvrtc.so.{version}").touch()
    monkeypatch.setattr(nvrtc, "find_spec", spec_at(tmp_path))
    assert nvrtc.found() == folder / "libnvrtc.so.13"
    (folder / "libnvrtc.so.13").unlink()
    assert nvrtc.found() == folder / "libnvrtc.so.12.10"


def test_a_compiler_that_is_too_old_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    toolkit = tmp_path / "lib64"
    toolkit.mkdir()
    (toolkit / "libnvrtc.so.11.2").touch()
    monkeypatch.setattr(nvrtc, "_folders", lambda: iter([toolkit]))
    assert nvrtc.found() is None
    (toolkit / "libnvrtc.so.12").touch()
    assert nvrtc.found() == toolkit / "libnvrtc.so.12"


@pytest.mark.parametrize(("own", "taken"), [("12.8", "12"), ("13.0", "13"), (None, "12")])
def test_the_compiler_of_torchs_own_cuda_is_taken(
    own: str | None, taken: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, version in (("cu13", "13"), ("cuda_nvrtc", "12")):
        (tmp_path / name / "lib").mkdir(parents=True)
        (tmp_path / name / "lib" / f"libnvrtc.so.{version}").touch()
    monkeypatch.setattr(nvrtc, "find_spec", spec_at(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", own)
    path = nvrtc.found()
    assert path is not None and path.name == f"libnvrtc.so.{taken}"


def test_where_nothing_is_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "found", lambda: None)
    nvrtc.compiler.cache_clear()
    with pytest.raises(CompileError, match="pip install nvidia-cuda-nvrtc"):
        nvrtc.compiler()


def test_a_source_is_read_with_the_headers_beside_it(tmp_path: Path) -> None:
    for name, text in (("k.cu", "k"), ("p.cuh", "p"), ("a.cuh", "a"), ("other.cu", "o")):
        (tmp_path / name).write_text(text)
    program = Program.read(tmp_path / "k.cu")
    assert program == Program("k.cu", "k", {"a.cuh": "a", "p.cuh": "p"})
