"""The library, loaded once; why it is not used; the one way to call it.

The variable TORCHMIX_NATIVE is read at the first use: 0 leaves the library alone, 1 requires it. Without the variable
it is used where it is built from the sources that lie beside it. Cost: 0.3 ms, once for each process.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.errors import NativeError, OptionError
from torchmix.native.build import FOLDER, LIBRARY, digest_of_sources

logger = logging.getLogger(__name__)

VARIABLE = "TORCHMIX_NATIVE"
BUILD = "python -m torchmix.native.build"
"""The command that builds it, where the package lies."""
REFUSED = -1


class NativeLibrary(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What this process has of it."""

    library: ctypes.CDLL | None = None
    """None: not used."""
    why_not: str = ""
    """Why it is not used, and what to do; empty if it is used."""


class Array(ctypes.Structure):
    """An array of the caller's, as the struct tm_array in native.h."""

    _fields_ = (("at", ctypes.c_void_p), ("n", ctypes.c_int64))


class Call(ctypes.Structure):
    """The first fields of each call, as the struct tm_head in native.h; FUNCTION is the name of the function."""

    _fields_: ClassVar[Sequence[tuple[str, type[Any]]]] = (
        ("size", ctypes.c_int64),
        ("fault", ctypes.c_char_p),
        ("fault_at", ctypes.c_int64),
    )
    FUNCTION = ""


_lock = threading.Lock()
_found: NativeLibrary | None = None
_num_calls: dict[str, int] = {}


def native() -> NativeLibrary:
    """The library of this process.

    Raises:
        NativeError: TORCHMIX_NATIVE=1 requires it, and it cannot be used.
        OptionError: TORCHMIX_NATIVE has another value than 0 and 1.
    """
    global _found
    if _found is None:
        with _lock:
            if _found is None:
                _found = _find(os.environ.get(VARIABLE, ""), FOLDER / LIBRARY)
    return _found


def is_native() -> bool:
    """Whether the library is used."""
    return native().library is not None


def num_calls() -> dict[str, int]:
    """Calls of this process so far, by function."""
    return dict(_num_calls)


def array_of(array: NDArray[Any], dtype: type[np.generic] | np.dtype[Any]) -> Array:
    """An array as C takes it; the caller keeps the array while the call lasts.

    Raises:
        NativeError: It is of another dtype, or not contiguous.
    """
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise NativeError(f"a native call takes a contiguous array of {np.dtype(dtype)}, this is {array.dtype}{REPORT}")
    return Array(address_of(array), array.size)


def contiguous(array: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
    """What a user has asked for, as `array_of` takes it; the array itself where it is so."""
    return np.ascontiguousarray(array, dtype)


def address_of(array: NDArray[Any]) -> int:
    """Where an array lies; it must be contiguous."""
    return int(array.__array_interface__["data"][0])


def run(call: Call) -> int:
    """Make a call, without the interpreter's lock.

    Returns:
        0, or what ended the call, from 1 on.

    Raises:
        NativeError: The call was refused, because an offset lies outside its array; what it has written is arbitrary.
    """
    library = native().library
    assert library is not None, "ask is_native() first"
    _num_calls[call.FUNCTION] = _num_calls.get(call.FUNCTION, 0) + 1
    call.size = ctypes.sizeof(call)
    ended: int = getattr(library, call.FUNCTION)(ctypes.byref(call))
    if ended == REFUSED:
        what = (call.fault or b"").decode()
        raise NativeError(f"{call.FUNCTION} refuses entry {call.fault_at}: {what}{REPORT}")
    return ended


REPORT = f"; this is a bug in torchmix, please report it. {VARIABLE}=0 in the environment continues without the library"


def _find(said: str, path: Path) -> NativeLibrary:
    """Load the library at a path, or say why not, once in the log."""
    if said not in ("", "0", "1"):
        raise OptionError(f"environment: {VARIABLE}={said!r}; it is 0 (leave the library alone) or 1 (require it)")
    if said == "0":
        return NativeLibrary(why_not=f"{VARIABLE}=0 is set")
    found = load(path)
    if found.library is None:
        if said == "1":
            raise NativeError(f"{VARIABLE}=1 requires the native library, and {found.why_not}")
        level = logging.WARNING if path.exists() else logging.INFO
        logger.log(level, "the native library is not used: %s", found.why_not)
    return found


def load(path: Path) -> NativeLibrary:
    """Load the library at a path, if it is of the sources beside this file."""
    if not path.exists():
        return NativeLibrary(why_not=f"{path} is not built; with a C compiler installed, run {BUILD}")
    try:
        library = ctypes.CDLL(str(path))
        library.tm_sources.restype = ctypes.c_char_p
        built_from = (library.tm_sources() or b"").decode()
    except (OSError, AttributeError) as error:
        return NativeLibrary(why_not=f"{path} cannot be loaded: {error}. Run {BUILD} --out {path}")
    if built_from != digest_of_sources():
        return NativeLibrary(why_not=f"{path} was built from other sources than those beside it; run {BUILD}")
    return NativeLibrary(library=library)
