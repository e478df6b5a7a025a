"""Spoken sentences, by eSpeak NG's library."""

from __future__ import annotations

import ctypes
from functools import cache

import espeakng_loader
import numpy as np
from scipy.signal import resample_poly

RATE = 16_000  # samples per second that Whisper takes
_SYNCHRONOUS = 2  # AUDIO_OUTPUT_SYNCHRONOUS
_UTF8 = 1  # espeakCHARS_UTF8
_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


def speak(sentence: str) -> np.ndarray:
    """A sentence as samples between -1 and 1, float32, at `RATE`."""
    library, rate = _library()
    heard: list[np.ndarray] = []

    @_Callback
    def hear(samples: ctypes._Pointer[ctypes.c_short], count: int, events: int) -> int:
        if samples and count:
            heard.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    library.espeak_SetSynthCallback(hear)
    text = sentence.encode()
    library.espeak_Synth(text, len(text) + 1, 0, 1, 0, _UTF8, None, None)
    samples: np.ndarray = resample_poly(np.concatenate(heard) / 2**15, RATE, rate).astype(np.float32)
    return samples


@cache
def _library() -> tuple[ctypes.CDLL, int]:
    library = ctypes.CDLL(espeakng_loader.get_library_path())
    rate = library.espeak_Initialize(_SYNCHRONOUS, 0, str(espeakng_loader.get_data_path()).encode(), 0)
    if rate <= 0:
        raise RuntimeError(f"espeak_Initialize returned {rate}")
    library.espeak_SetVoiceByName(b"en-us")
    return library, int(rate)
