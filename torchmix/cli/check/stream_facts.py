"""What is known of a stream before a run: its rows, its place in the recipe, its figures.

In: a part with its open catalog, and a forecast. Out: numbers for tables and programs. Must hold: a stream that is a
source has the facts of that source. Cost: none.
"""

from __future__ import annotations

from typing import Any

from torchmix.catalog.store import Catalog
from torchmix.cli.selections import rows_and_tokens
from torchmix.planner.forecast.figures import SourceForecast
from torchmix.recipe.mixture.shares_of_part import tree_of_part
from torchmix.recipe.mixture.tree import walk
from torchmix.recipe.parts import Part


def values_of_stream(part: Part, catalog: Catalog, forecast: SourceForecast) -> dict[str, Any]:
    """Facts and figures of a stream, for a program; what only a source has is None for others."""
    num_documents, num_tokens = rows_and_tokens(part, catalog, forecast.name)
    values: dict[str, Any] = {
        "name": forecast.name,
        "share": forecast.share,
        "asked_share": forecast.asked_share,
        "members": list(part.streams[forecast.name].members),
        "num_documents": num_documents,
        "num_tokens": num_tokens,
        "epoch_tokens": forecast.epoch_tokens,
        "first_step": forecast.first_step,
        "delivered_tokens": forecast.delivered_tokens,
        "epochs": forecast.epochs,
        "runs_out_step": forecast.runs_out_step,
        "most_repeats": forecast.most_repeats,
        "step_deviation": forecast.deviation,
    }
    own = catalog.sources[forecast.name] if part.streams[forecast.name].is_source else None
    ids = None if own is None else own.ids
    return values | {
        "num_empty": None if own is None else own.num_without_content(),
        "num_bad_rows": None if own is None else own.num_bad_rows,
        "bad_rows": [
            {"path": file.path, "row": bad.row, "reason": bad.reason}
            for file in (() if own is None else own.files)
            for bad in file.bad_rows
        ],
        "max_document_tokens": None if own is None else own.max_document_tokens,
        "smallest_id": None if ids is None else ids.smallest,
        "largest_id": None if ids is None else ids.largest,
        "tokenizer_vocab_size": None if own is None else own.vocab_size,
    }


def where_of_stream(part: Part, name: str) -> str:
    """Where a recipe says what a stream is."""
    if not part.streams[name].is_flat and not part.streams[name].is_cell:
        return f"sources.{name}"
    paths = (path for path, node in walk(tree_of_part(part)) if node.name == name and not node.children)
    return f"mixture.{next(paths, name)}"
