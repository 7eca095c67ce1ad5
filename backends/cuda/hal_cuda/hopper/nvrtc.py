"""Compile CUDA C++ on demand with the NVRTC that torch brings along, and keep what came out."""

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

OLDEST: Final = (12, 0)
"""The first NVRTC that knows sm_90a."""

OPTIONS: Final = ("--gpu-architecture=sm_90a", "--std=c++17")

_LIBRARY: Final = "libnvrtc.so.[0-9]*"
_BUILTINS: Final = "libnvrtc-builtins.so.[0-9]*"
_TOOLKITS: Final = ("CUDA_HOME", "CUDA_PATH")
_DIGEST: Final = hashlib.sha256().digest_size


class CompileError(RuntimeError):
    """NVRTC is missing or refused a source; the text holds its log."""


@dataclass(frozen=True, slots=True)
class Program:
    """A source by name, and the headers that it includes by theirs."""

    name: str
    text: str
    headers: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> "Program":
        """A source with every header that lies beside it."""
        headers = {each.name: each.read_text() for each in sorted(path.parent.glob("*.cuh"))}
        return cls(path.name, path.read_text(), headers)


def found() -> Path | None:
    """The NVRTC that `compiled` uses: of torch's CUDA if there is one, from a wheel if there is.

    What by its name is too old for sm_90a is passed over: selection refuses then, and no first
    call has to. A driver that runs torch loads what that CUDA compiles; what a newer one compiles,
    perhaps not.
    """
    from torch import version

    own, installed = (version.cuda or "").split(".")[0], list(_installed())
    like_torch = (path for path in installed if str(_release(path)[0]) == own)
    return next(like_torch, next(iter(installed), None))


def _installed() -> Iterator[Path]:
    """Libraries that know sm_90a, those of wheels first, newest first within a folder."""
    for folder in _folders():
        found = sorted(folder.glob(_LIBRARY), key=_release, reverse=True)
        yield from (path for path in found if _release(path)[0] >= OLDEST[0])


def _folders() -> Iterator[Path]:
    """Where the wheels that torch depends on put libraries, then where toolkits do."""
    spec = find_spec("nvidia")
    for root in sorted(spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(root).glob("*/lib"), reverse=True)
    homes = [Path(os.environ[name]) for name in _TOOLKITS if os.environ.get(name)]
    for home in (*homes, Path("/usr/local/cuda")):
        yield from (home / "lib64", home / "lib")


def _release(path: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in path.name.split(".so.")[1].split(".") if part.isdigit())


@dataclass(frozen=True, slots=True)
class Compiler:
    """NVRTC, loaded."""

    library: Any
    version: tuple[int, int]

    def __call__(self, program: Program, options: Sequence[str]) -> tuple[bytes, str]:
        """The cubin of a program, and what the compiler said about it."""
        handle = ctypes.c_void_p()
        names = _texts(program.headers)
        self._must(
            self.library.nvrtcCreateProgram(
                ctypes.byref(handle), program.text.encode(), program.name.encode(), len(names),
                _texts(program.headers.values()), names,
            ),
            "nvrtcCreateProgram",
        )  # fmt: skip
        try:
            code = self.library.nvrtcCompileProgram(handle, len(options), _texts(options))
            log = self._bytes("ProgramLog", handle).rstrip(b"\0").decode(errors="replace")
            if code:
                raise CompileError(f"{program.name}: {self._text(code)} ({self._shown()})\n{log}")
            return self._bytes("CUBIN", handle), log
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(handle))

    def _bytes(self, what: str, handle: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._must(getattr(self.library, f"nvrtcGet{what}Size")(handle, ctypes.byref(size)), what)
        buffer = ctypes.create_string_buffer(size.value)
        self._must(getattr(self.library, f"nvrtcGet{what}")(handle, buffer), what)
        return buffer.raw

    def _must(self, code: int, what: str) -> None:
        if code:
            raise CompileError(f"{what}: {self._text(code)} ({self._shown()})")

    def _text(self, code: int) -> str:
        return bytes(self.library.nvrtcGetErrorString(code)).decode()

    def _shown(self) -> str:
        return f"NVRTC {self.version[0]}.{self.version[1]}"


def _texts(values: Any) -> Any:
    """Texts as C takes them."""
    held = [value.encode() for value in values]
    return (ctypes.c_char_p * len(held))(*held)


@cache
def compiler() -> Compiler:
    """The compiler of this machine; raises where there is none that knows sm_90a."""
    path = found()
    if path is None:
        raise CompileError(
            "libnvrtc was not found beside torch, under CUDA_HOME or in /usr/local/cuda: "
            "pip install nvidia-cuda-nvrtc, of the CUDA that torch was built for"
        )
    return opened(path)


def opened(path: Path) -> Compiler:
    """A library as a compiler; its builtins are loaded first, from the same folder."""
    for each in sorted(path.parent.glob(_BUILTINS)):
        ctypes.CDLL(str(each), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    version = (major.value, minor.value)
    if version < OLDEST:
        raise CompileError(f"{path} is NVRTC {version}, expected {OLDEST} or newer")
    return Compiler(library, version)


def compiled(program: Program, defines: Mapping[str, int]) -> bytes:
    """The cubin of a program under some definitions, from the cache of the user if it is there."""
    compile_with = compiler()
    options = (*OPTIONS, *(f"--define-macro={name}={value}" for name, value in defines.items()))
    home, name = folder(), f"{key_of(program, options, compile_with.version)}.cubin"
    if home is not None and (kept := _kept(home / name)):
        return kept
    cubin, _ = compile_with(program, options)
    if home is not None:
        keep(home / name, hashlib.sha256(cubin).digest() + cubin)
    return cubin


def _kept(place: Path) -> bytes:
    """What a file holds behind its digest; nothing where it is not there or not what was kept.

    A machine that went down leaves files that are too short, and a driver says little of those.
    """
    try:
        kept = place.read_bytes()
    except OSError:
        return b""
    cubin = kept[_DIGEST:]
    return cubin if hashlib.sha256(cubin).digest() == kept[:_DIGEST] else b""


def key_of(program: Program, options: Sequence[str], version: tuple[int, int]) -> str:
    """What a cubin is known by: everything that it depends on."""
    parts = [program.name, program.text, repr(sorted(program.headers.items()))]
    return hashlib.sha256("\0".join([*parts, *options, repr(version)]).encode()).hexdigest()


def folder() -> Path | None:
    """Where cubins are kept: under XDG_CACHE_HOME, else the `.cache` of a user who has a home."""
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(given) if given else Path.home() / ".cache") / "hal" / "cuda.hopper"
    except RuntimeError:  # a user that the system does not know, as containers have
        return None


def keep(place: Path, content: bytes) -> None:
    """Put a file where others find it whole or not at all; a place that takes none is no fault."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        half = tempfile.NamedTemporaryFile(dir=place.parent, delete=False)
    except OSError:
        return
    try:
        with half:
            half.write(content)
        Path(half.name).replace(place)
    except OSError:  # a disk that is full, say: no half of a file stays on it
        with suppress(OSError):
            Path(half.name).unlink()
