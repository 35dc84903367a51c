"""What programs import that run Megatron, in one place: a process that is forked later imports it once, see `forks.py`.

In and out: nothing. Must hold: an import changes nothing but `sys.modules`. What Megatron gives to `torch.compile` runs
as it is written, as in examples/megatron/pretrain_gpt: to import the compiler takes as long as all else, and ranks of
tests need none.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from tests.support.example import PRETRAIN_GPT, example_module

with pytest.MonkeyPatch.context() as _patch:
    _patch.setattr(torch, "compile", example_module("cpu_imports", PRETRAIN_GPT).as_written)
    import torchmix.megatron_adapter as tmx
    from tests.support import megatron_world  # noqa: F401 - imported for those that follow

    for _name in ("attention", "checkpoint", "cpu", "model", "train", "unigram"):
        example_module(_name)
    for _name in tmx.__all__:
        getattr(tmx, _name)  # they are imported when they are first asked for
if find_spec("pandas"):
    import_module("pandas")  # as pyarrow does, where it is installed, when it first makes an array
