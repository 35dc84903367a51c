"""The flags that torchmix adds to Megatron's command line, and the fields that a script expects."""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

from torchmix.errors import RecipeError
from torchmix.parallel.place_tree import LeaderChoice

# --- The flags that torchmix adds to Megatron's command line.
#
# Without `--data-recipe` nothing of Megatron changes, not even a default; with it, Megatron takes its iterators from
# outside (`--dataloader-type external`) and makes no dense attention masks.
#
# Megatron parses its arguments long after a script has chosen its functions, so `enabled()` looks at the command line
# itself. Megatron's parser takes no abbreviations, hence there is nothing to guess.
#
# The signature that Megatron expects of an `extra_args_provider`, parser in and parser out, has been the same from
# core 0.16 (argument of `pretrain`) to core 0.20 (argument of `parse_and_validate_args`).

ExtraArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]

RECIPE_FLAG = "--data-recipe"


def enabled(arguments: Sequence[str] | None = None) -> bool:
    """Whether the command line names a recipe.

    Args:
        arguments: Stands in for `sys.argv[1:]`.
    """
    given = sys.argv[1:] if arguments is None else arguments
    return any(argument == RECIPE_FLAG or argument.startswith(f"{RECIPE_FLAG}=") for argument in given)


def extra_args(previous: ExtraArguments | None = None) -> ExtraArguments:
    """A provider of extra arguments for Megatron: those of `previous`, and those of torchmix.

    Args:
        previous: The provider that the script had; None if it had none.

    Returns:
        What to give Megatron as `extra_args_provider`.
    """

    def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        if previous is not None:
            parser = previous(parser)
        return _with_flags(parser)

    return provide


def _with_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group(title="torchmix")
    group.add_argument(
        RECIPE_FLAG,
        default=None,
        metavar="YAML",
        help="Recipe of the data. It takes the place of --data-path and of Megatron's data loader.",
    )
    group.add_argument(
        "--data-loaders",
        default=None,
        metavar="WHERE",
        help="Where data are planned and read, in the place of the recipe's `loaders`: `node`, in a process of the "
        "node, or `in_process`, in threads of each leader. Other keys of `loaders` follow as `node,memory=8GiB`.",
    )
    group.add_argument(
        "--data-accept-edit",
        default=None,
        metavar="CODE",
        help="Continue with a recipe that was edited since the checkpoint: the code that the refusal, or torchmix "
        "diff, names.",
    )
    group.add_argument(
        "--data-leaders",
        choices=get_args(LeaderChoice),
        default="replica",
        help="Which ranks read: one of each replica, one of each replica in each node, or one of each pipeline stage.",
    )
    group.add_argument(
        "--data-look-ahead",
        type=int,
        default=2,
        metavar="STEPS",
        help="Finished global batches that may wait on each rank.",
    )
    group.add_argument(
        "--data-patience",
        type=float,
        default=None,
        metavar="SECONDS",
        help="How long a rank of another host, or the job's store, may be silent before it counts as lost; 3 or more, "
        "11 if not given.",
    )
    group.add_argument(
        "--data-start-fresh",
        action="store_true",
        help="Load a checkpoint that has no state of torchmix: the data begin at the step that Megatron's consumed "
        "samples say. To move a run to torchmix, or to another recipe, on purpose.",
    )
    group.add_argument(
        "--no-data-source-loss",
        action="store_false",
        dest="data_source_loss",
        help="Do not report the loss of each source at every --log-interval.",
    )
    if enabled():
        parser.set_defaults(dataloader_type="external", create_attention_mask_in_dataloader=False)
    return parser


# --- The fields that a `pretrain_gpt.py` expects of its `get_batch`, read off the script.
#
# The order is the script's own word, never a guess from a version: a field in another place would train on labels as
# tokens.
#
#     script                    says its fields by
#     core 0.19, 0.20, main     BATCH_KEYS, a list at the top of the script
#     core 0.16, 0.17           the names that forward_step unpacks: six, the last one PackedSeqParams
#     core 0.18                 likewise: ten, with boundaries; its BATCH_KEYS lies inside get_batch
#     dev                       likewise: seven, PackedSeqParams and then padding_mask
#     of images, all versions   likewise: seven or eight, with images
#     examples/mimo/train.py    nowhere: forward_step hands one dict to MimoModel, whose names are those of `OF_MIMO`
#
# Cost: parsing one function, once.

NEEDED = ("tokens", "labels", "loss_mask", "position_ids")
"""Fields that every script must take."""
PARAMS = "packed_seq_params"
BOUNDARIES = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
"""Where documents end: as one object, or as three tensors."""

MODALITIES = "modality_inputs"
OF_MIMO = ("input_ids", "position_ids", "labels", "loss_mask", MODALITIES)
"""What MimoModel takes."""


def fields_of_script(script: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of what the script's `get_batch` returns, in order.

    Args:
        script: `globals()` of the script.

    Raises:
        RecipeError: The script does not say them, or says others than torchmix has.
    """
    keys = script.get("BATCH_KEYS")
    names = tuple(keys) if keys is not None else _names_unpacked(script.get("forward_step"))
    if not names and "get_batch" in script and image_token_of(script) is not None:
        return OF_MIMO
    has_boundaries = PARAMS in names or set(BOUNDARIES) <= set(names)
    if set(NEEDED) <= set(names) and has_boundaries:
        return names
    if "get_batch" not in script:
        what = "has no get_batch"
    elif names:
        what = f"takes the fields {', '.join(names)} from its get_batch"
    else:
        what = "has no BATCH_KEYS, and no forward_step that unpacks what its get_batch returns into names"
    raise RecipeError(
        f"the script {what}. torchmix gives {', '.join(NEEDED)}, and either {PARAMS} or {', '.join(BOUNDARIES)}, as "
        f"the pretrain_gpt.py and pretrain_vlm.py of Megatron-LM core 0.16 to 0.20 take them; pass globals() of such a "
        f"script, or of examples/mimo/train.py, whose forward_step hands one dict to its model"
    )


def image_token_of(script: Mapping[str, Any]) -> int | None:
    """The id of the image token of a script that hands one dict to its model, by name.

    Args:
        script: `globals()` of the script.

    Returns:
        The default of its `model_provider`; None: it is a script of another kind.
    """
    nodes = list(_nodes_of(script.get("forward_step")))
    batches = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and _is_call_of_get_batch(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    words = [word for node in nodes if isinstance(node, ast.Call) for word in node.keywords if word.arg is None]
    if not any(isinstance(word.value, ast.Name) and word.value.id in batches for word in words):
        return None
    provider = script.get("model_provider")
    token = inspect.signature(provider).parameters.get("image_special_token_id") if callable(provider) else None
    return None if token is None else int(token.default)


def _nodes_of(function: Any) -> Iterator[ast.AST]:
    """The syntax of a function; nothing where it has no source."""
    if function is None:
        return
    try:
        text = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    except (OSError, TypeError):
        return
    yield from ast.walk(ast.parse(text))


def _names_unpacked(function: Any) -> tuple[str, ...]:
    """The names to which a function assigns what `get_batch` returns; none if it does not, or has no source."""
    for node in _nodes_of(function):
        if not (isinstance(node, ast.Assign) and _is_call_of_get_batch(node.value)):
            continue
        target = node.targets[0]
        if isinstance(target, (ast.Tuple, ast.List)) and all(isinstance(each, ast.Name) for each in target.elts):
            return tuple(each.id for each in target.elts if isinstance(each, ast.Name))
    return ()


def _is_call_of_get_batch(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "get_batch"
