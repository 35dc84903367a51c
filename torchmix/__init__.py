"""torchmix: the data plane of a large-model training run.

It mixes sources as they lie on disk, packs and balances every global batch before a byte of it is read, and hands each
rank exactly the tensors it needs. Rooms in reading order, which is data-flow order, which is import order:

    errors             one tree of errors
    native             loops in C, optional; the Python beside each is its reference
    lazy_names         names that are imported when they are first used
    array_types        names for types of arrays
    recipe             what the user writes
    storage            ranges of bytes, of files and objects
    catalog            what data exists
    transform          row -> sample
    modalities         kinds of items in rows
    formats            what lies in files
    indexing           files -> catalog
    mixture            which document comes next
    reader             pieces -> tokens
    pages              pages and rows, for other people's loaders
    parallel           who consumes
    planner            who gets what, when
    constructor        documents -> tensors
    steps              the making of steps
    stateful           what the user holds
    elastic            ranks that come and go
    megatron_adapter   Megatron's names and hooks
    cli                torchmix check | index | plan | show

All names but those of errors are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchmix.errors import (
    CatalogConflict,
    CatalogError,
    CatalogMissing,
    CatalogStale,
    CorruptPage,
    DenyListError,
    DocumentTooLong,
    ItemUnreadable,
    LengthUnknown,
    LoaderClosed,
    MemoryLimit,
    OpenFilesLimit,
    OptionError,
    PlanDiverged,
    PlanError,
    PlanFilesError,
    RankLost,
    RecipeError,
    SideTableError,
    SourceChanged,
    SourceExhausted,
    SourceUnreadable,
    StateError,
    StateMismatch,
    StateVersion,
    TooManyBadRows,
    TopologyError,
    TorchmixError,
    WireError,
    WorkerLost,
)
from torchmix.lazy_names import lazy_name

if TYPE_CHECKING:
    from torchmix.boards.board import flat_stats, prometheus_text
    from torchmix.constructor.fields import Microbatch
    from torchmix.indexing.scan import index
    from torchmix.pages import Pages, open_pages
    from torchmix.parallel.place_tree import ClientPlaceTree
    from torchmix.parallel.topology import Topology
    from torchmix.planner.plan import StepPlan
    from torchmix.planner.plans import plan
    from torchmix.recipe.load import check_recipe, load_recipe
    from torchmix.recipe.ramp import fixed_microbatches
    from torchmix.recipe.structs import (
        Balance,
        Batch,
        Change,
        EncoderModel,
        Evaluation,
        Group,
        Loaders,
        Model,
        Module,
        Packing,
        PathProperty,
        Quantiles,
        RampStage,
        Read,
        Recipe,
        Selection,
        Shuffle,
        Source,
    )
    from torchmix.stateful.loader import StatefulDataLoader
    from torchmix.stateful.open import build_loader
    from torchmix.stateful.tower import open_tower
    from torchmix.steps.worker.early import start_worker

__version__ = "0.1.0"
__all__ = [
    "Balance",
    "Batch",
    "CatalogConflict",
    "CatalogError",
    "CatalogMissing",
    "CatalogStale",
    "Change",
    "ClientPlaceTree",
    "CorruptPage",
    "DenyListError",
    "DocumentTooLong",
    "EncoderModel",
    "Evaluation",
    "Group",
    "ItemUnreadable",
    "LengthUnknown",
    "LoaderClosed",
    "Loaders",
    "MemoryLimit",
    "Microbatch",
    "Model",
    "Module",
    "OpenFilesLimit",
    "OptionError",
    "Packing",
    "Pages",
    "PathProperty",
    "PlanDiverged",
    "PlanError",
    "PlanFilesError",
    "Quantiles",
    "RampStage",
    "RankLost",
    "Read",
    "Recipe",
    "RecipeError",
    "Selection",
    "Shuffle",
    "SideTableError",
    "Source",
    "SourceChanged",
    "SourceExhausted",
    "SourceUnreadable",
    "StateError",
    "StateMismatch",
    "StateVersion",
    "StatefulDataLoader",
    "StepPlan",
    "TooManyBadRows",
    "Topology",
    "TopologyError",
    "TorchmixError",
    "WireError",
    "WorkerLost",
    "build_loader",
    "check_recipe",
    "fixed_microbatches",
    "flat_stats",
    "index",
    "load_recipe",
    "open_pages",
    "open_tower",
    "plan",
    "prometheus_text",
    "start_worker",
]

_HOME_OF_LAZY_NAME = {
    "Balance": "torchmix.recipe.structs",
    "Batch": "torchmix.recipe.structs",
    "Change": "torchmix.recipe.structs",
    "ClientPlaceTree": "torchmix.parallel.place_tree",
    "EncoderModel": "torchmix.recipe.structs",
    "Evaluation": "torchmix.recipe.structs",
    "Group": "torchmix.recipe.structs",
    "Loaders": "torchmix.recipe.structs",
    "Microbatch": "torchmix.constructor.fields",
    "Model": "torchmix.recipe.structs",
    "Module": "torchmix.recipe.structs",
    "Packing": "torchmix.recipe.structs",
    "Pages": "torchmix.pages",
    "PathProperty": "torchmix.recipe.structs",
    "Quantiles": "torchmix.recipe.structs",
    "RampStage": "torchmix.recipe.structs",
    "Read": "torchmix.recipe.structs",
    "Recipe": "torchmix.recipe.structs",
    "Selection": "torchmix.recipe.structs",
    "Shuffle": "torchmix.recipe.structs",
    "Source": "torchmix.recipe.structs",
    "StatefulDataLoader": "torchmix.stateful.loader",
    "StepPlan": "torchmix.planner.plan",
    "Topology": "torchmix.parallel.topology",
    "build_loader": "torchmix.stateful.open",
    "check_recipe": "torchmix.recipe.load",
    "fixed_microbatches": "torchmix.recipe.ramp",
    "flat_stats": "torchmix.boards.board",
    "index": "torchmix.indexing.scan",
    "load_recipe": "torchmix.recipe.load",
    "open_pages": "torchmix.pages",
    "open_tower": "torchmix.stateful.tower",
    "parallel": "torchmix.parallel",  # the room whose own names users call, as torchmix.parallel.route
    "plan": "torchmix.planner.plans",
    "prometheus_text": "torchmix.boards.board",
    "start_worker": "torchmix.steps.worker.early",
}


def __getattr__(name: str) -> Any:
    return lazy_name(__name__, _HOME_OF_LAZY_NAME, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
