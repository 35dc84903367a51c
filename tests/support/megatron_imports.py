"""What programs import that run Megatron, in one place: a process that is forked later imports it once, see `forks.py`.

In and out: nothing. Must hold: an import changes nothing but `sys.modules`. Costs 8 s of a core.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torchmix.megatron_adapter as tmx
from tests.support import megatron_world  # noqa: F401 - imported for those that follow
from tests.support.example import example_module

for _name in ("attention", "checkpoint", "cpu", "model", "train", "unigram"):
    example_module(_name)
for _name in tmx.__all__:
    getattr(tmx, _name)  # they are imported when they are first asked for
if find_spec("pandas"):
    import_module("pandas")  # as pyarrow does, where it is installed, when it first makes an array
