"""A second interpreter plans a step again, to find strategies whose answer depends on the history of their process.

Ranks and resumed jobs plan in processes of different histories, so an answer that follows from a counter, a cache or
the order of a set would make them diverge in the middle of a run. Cost: the start of an interpreter, and opening the
catalog; nothing where the recipe names no function.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

from torchmix.catalog.store import Catalog, open_part
from torchmix.errors import TorchmixError
from torchmix.parallel.place_tree import Layout
from torchmix.planner.graph.dgraph import TokensOfStep
from torchmix.planner.graph.strategy import own_functions
from torchmix.planner.pack import Packed, Pieces
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import open_planner
from torchmix.recipe.parts import Part

_CODE = "import sys; sys.path[:] = sys.argv[1:]; from torchmix.cli.second_interpreter import main; main()"
_PLACES = ("sample", "slot", "sample_offset", "asked_tokens", "drawn_tokens", "pool_tokens")


class _DrawnStep(msgspec.Struct, frozen=True, kw_only=True):
    """What the other interpreter is given; arrays are the bytes of int64."""

    part: Part
    catalog: str
    layout: Layout
    step: int
    previous: bytes
    order_digest: bytes
    pieces: dict[str, bytes]
    places: dict[str, bytes]


_decode = msgspec.msgpack.Decoder(_DrawnStep).decode


def difference_elsewhere(
    part: Part, catalog: Catalog, layout: Layout, previous: bytes, plan: StepPlan
) -> tuple[str, str] | None:
    """Place a step again in a second interpreter, with another order of hashes.

    Args:
        part: That the step was planned of.
        catalog: The catalog of the part.
        layout: That it was placed on.
        previous: Order digest before the step.
        plan: The step, as it was placed here.

    Returns:
        Key of the recipe and what is wrong; None: both are the same, or the recipe names no function.
    """
    functions = own_functions(part)
    if not functions:
        return None
    drawn = _DrawnStep(
        part=part,
        catalog=str(catalog.directory.absolute()),
        layout=layout,
        step=plan.step,
        previous=previous,
        order_digest=plan.order_digest,
        pieces={name: getattr(plan.pieces, name).tobytes() for name in Pieces.__struct_fields__},
        places={name: getattr(plan, name).tobytes() for name in _PLACES},
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    answer = subprocess.run(
        [sys.executable, "-c", _CODE, *sys.path],
        input=msgspec.msgpack.encode(drawn),
        capture_output=True,
        env={**os.environ, "PYTHONHASHSEED": seed},
    )
    here, there = plan.plan_digest.hex(), answer.stdout.decode(errors="replace").strip()
    if there == here:
        return None
    names = ", ".join(f"{key} {name}" for key, name in functions.items())
    if answer.returncode:
        lines = answer.stderr.decode(errors="replace").strip().splitlines()
        why = f"fails in a second interpreter: {lines[-1] if lines else f'exit code {answer.returncode}'}"
    else:
        why = (
            f"has plan digest {here}, and {there} in a second interpreter, so ranks and resumed jobs would diverge: a "
            f"function must depend on its arguments alone, not on a counter, a cache, the order of a set, or random "
            f"numbers without a seed"
        )
    return next(iter(functions)), f"step {plan.step} of {names} {why}"


def main() -> None:
    """Place the step that stdin has, and print its plan digest."""
    drawn = _decode(sys.stdin.buffer.read())
    try:
        with redirect_stdout(sys.stderr):  # whatever the functions print
            digest = _placed(drawn).plan_digest.hex()
    except TorchmixError as error:
        sys.exit(" ".join(str(error).split("\n")))
    print(digest)


def _placed(drawn: _DrawnStep) -> StepPlan:
    planner = open_planner(drawn.part, open_part(Path(drawn.catalog), drawn.part), drawn.layout)
    of = {name: np.frombuffer(values, np.int64) for name, values in drawn.places.items()}
    packed = Packed(
        pieces=Pieces(**{name: np.frombuffer(values, np.int64) for name, values in drawn.pieces.items()}),
        sample=of["sample"],
        slot=of["slot"],
        sample_offset=of["sample_offset"],
        pool=Pieces.empty(),
    )
    tokens = TokensOfStep(asked=of["asked_tokens"], drawn=of["drawn_tokens"], pool=of["pool_tokens"])
    before = replace(planner.start(), step=drawn.step, order_digest=drawn.previous)
    return planner.placed(planner.drawn_step(before, packed, tokens, drawn.order_digest))
