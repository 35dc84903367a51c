"""A program: real ranks that run Megatron's schedules on torchmix's iterators, at many layouts one after another.

    python -m tests.support.megatron_world RECIPE OUT DEADLINE_S LAYOUT...

A layout is text: `tp=2,pp=2,vp=2,dp=2,steps=2,script=0.20` (see `layouts.py`). The program imports torch
and Megatron once and then forks ranks, as many as the next layouts have: those with N ranks run in the same processes,
one after another. Each rank writes a JSON line for each layout to OUT/N/rank-R.jsonl:

    name      of the layout
    digests   SHA-256 of what `get_batch` returned, by "part/chunk/step/index"; behind "run N/" what an earlier run or
              pass of the same was given
    losses    on last stages: "step/index" -> sums of losses and of tokens, by row of the microbatch
    log       on the last rank: the lines with the loss of each source

Ranks that are not done DEADLINE_S after they were forked print the stacks of their threads and are ended.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support import fake_megatron
from tests.support.example import example_module
from tests.support.forked_ranks import ForkedRanks
from tests.support.layouts import Layout, digest_of, layout_of
from tests.support.ports import free_port

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.rerun_state_machine import RerunDataIterator

    from tests.support.megatron_model import build_chunks

import torchmix.megatron_adapter as tmx
from torchmix.megatron_adapter.bins import items_of_step
from torchmix.recipe.load import load_recipe

MICRO_BATCH_SIZE = 1


class Record:
    """What a rank has seen of one layout."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.digests: dict[str, str] = {}
        self.losses: dict[str, list[list[float]]] = {}
        self.log: list[str] = []

    def keep_as_run(self, number: int, *, part: str = "") -> None:
        """Keep what was seen of a part, all if not given, as that of an earlier run."""
        for key in [key for key in self.digests if key.startswith(part) and not key.startswith("run ")]:
            self.digests[f"run {number}/{key}"] = self.digests.pop(key)

    def line(self) -> str:
        facts = {"name": self.layout.name, "digests": self.digests, "losses": self.losses, "log": self.log}
        return json.dumps(facts)


def loss_func(loss_mask: Tensor, output: Tensor, *, record: Record, key: str) -> tuple[Tensor, Tensor, dict[str, Any]]:
    losses, mask = output.float(), loss_mask.float()
    sums = [(losses * mask).sum(-1).detach(), mask.sum(-1)]
    record.losses[key] = torch.stack(sums, -1).tolist()
    return (losses * mask).sum(), mask.sum().to(torch.int), {"lm loss": sums[0]}


def forward_step(data_iterator: Any, chunk: Any, *, script: dict[str, Any], record: Record) -> Any:
    """Like `forward_step` of pretrain_gpt.py, either version of it."""
    stage = chunk.vp_stage
    seen: list[dict[str, Any]] = []
    if data_iterator is None:  # as Megatron's schedule of several context-parallel sizes has it on other TP ranks
        seen.append(items_of_step[0])
        batch = script["get_batch"](None, stage)
    else:
        batch = script["get_batch"](_Spy(data_iterator, seen), stage)
    key = f"{seen[0]['step']}/{seen[0]['index']}"
    fields = _fields(batch, script)
    params = fields.pop("packed_seq_params")
    record.digests[f"{seen[0]['part']}/{stage or 0}/{key}"] = digest_of(fields)
    output = chunk(
        fields["tokens"],
        fields["position_ids"],
        None,
        labels=fields["labels"],
        loss_mask=fields["loss_mask"],
        packed_seq_params=params,
    )
    return output, partial(script["loss_func"], fields["loss_mask"], record=record, key=key)


class _Spy:
    """Shows which microbatch `get_batch` has taken."""

    def __init__(self, inner: Any, seen: list[dict[str, Any]]) -> None:
        self.inner, self.seen = inner, seen

    def __next__(self) -> dict[str, Any]:
        item: dict[str, Any] = next(self.inner)
        self.seen.append(item)
        return item


def _fields(batch: Any, script: dict[str, Any]) -> dict[str, Any]:
    """What `get_batch` returned, by name; with the PackedSeqParams that the script would make of it."""
    from megatron.core.packed_seq_params import PackedSeqParams

    names = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens_padded", "max_seqlen")
    if "BATCH_KEYS" not in script:
        tokens, labels, loss_mask, mask, position_ids, params = batch[:6]  # dev has padding_mask behind them
        assert mask is None
        values = (tokens, labels, loss_mask, position_ids, None, None)
        fields = dict(zip(names, values, strict=True))
        if params is not None:
            fields |= {"cu_seqlens_padded": params.cu_seqlens_q_padded, "max_seqlen": params.max_seqlen_q}
            fields["local_cp_size"] = params.local_cp_size
        return {**fields, "packed_seq_params": params}
    by_key = dict(zip(script["BATCH_KEYS"], batch, strict=True))
    assert by_key["attention_mask"] is None
    fields = {name: by_key[name] for name in names}
    params = None
    if by_key["cu_seqlens"] is not None:
        padded = by_key["cu_seqlens_padded"].squeeze(0)
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=padded,
            cu_seqlens_kv=padded,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=int(by_key["max_seqlen"].item()),
            max_seqlen_kv=int(by_key["max_seqlen"].item()),
        )
        fields |= {"cu_seqlens_padded": padded, "max_seqlen": int(by_key["max_seqlen"].item())}
        if by_key["local_cp_size"] is not None:
            fields["local_cp_size"] = params.local_cp_size = int(by_key["local_cp_size"].item())
            params.cp_group = by_key["hybrid_cp_group"]
    return {**fields, "packed_seq_params": params}


def run_layout(
    recipe_path: Path,
    layout: Layout,
    *,
    on_step: Callable[[int, SimpleNamespace], None] | None = None,
    checkpoint: SimpleNamespace | None = None,
    accept_edit: str | None = None,
) -> tuple[Record, SimpleNamespace]:
    """Train one layout for its steps, as Megatron's training loop does; all ranks call it.

    Args:
        recipe_path: The recipe.
        layout: Sizes, and how many steps.
        on_step: Called after each step, with Megatron's arguments.
        checkpoint: Arguments of Megatron in the checkpoint to go on from.
        accept_edit: The word of `--data-accept-edit`.

    Returns:
        What was seen, and Megatron's arguments at the end.
    """
    recipe = load_recipe(recipe_path)
    samples, length = int(recipe.batch.samples), recipe.batch.length  # type: ignore[arg-type]
    packed = recipe.packing.boundaries == "document"
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vp or None,
        hybrid_context_parallel=bool(layout.runs),
    )
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(
        0 if dist.get_rank() else 1, None, samples, MICRO_BATCH_SIZE, layout.dp
    )
    rerun_state_machine.destroy_rerun_state_machine()
    rerun_state_machine.initialize_rerun_state_machine(mode=rerun_state_machine.RerunMode.VALIDATE_RESULTS)
    args = fake_megatron.default_args(
        data_recipe=str(recipe_path),
        data_accept_edit=accept_edit,
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        pipeline_model_parallel_size=layout.pp,
        data_parallel_size=layout.dp,
        micro_batch_size=MICRO_BATCH_SIZE,
        global_batch_size=samples,
        seq_length=length,
        log_interval=1,
        full_validation=bool(layout.passes),
    )
    if layout.runs:
        args.max_seqlen_per_dp_cp_rank = recipe.balance.context.rank_tokens  # type: ignore[union-attr]
        args.dataloader_type = "single"
        args.virtual_pipeline_model_parallel_size = layout.vp or None
        args.hybrid_context_parallel = layout.runs == 1
        args.sequence_packing_scheduler = "default_dynamic_cp" if layout.runs == 2 else None
        args.dynamic_context_parallel = layout.runs == 2
    record, lines = Record(layout), fake_megatron.Lines()
    script = fake_megatron.script_of(layout.script, loss_func)
    with fake_megatron.installed(args, lines=lines) as modules:
        script["get_batch"] = tmx.get_batch(script)
        if checkpoint is not None:
            modules["megatron.training.checkpointing"].check_checkpoint_args(checkpoint)
            args.consumed_train_samples = checkpoint.consumed_train_samples
        chunks = build_chunks(layers=layout.num_layers, length=length, packed=packed, vp=layout.vp or None)
        for chunk in chunks:
            chunk.config.hybrid_context_parallel = layout.runs == 1  # type: ignore[union-attr, assignment]
            chunk.config.variable_seq_lengths = layout.runs == 2  # type: ignore[union-attr, assignment]
        stages = range(layout.vp) if layout.vp else [None]
        parts = [tmx.provider([0, 0, 0], vp_stage=stage) for stage in stages]
        iterators, validation = ([RerunDataIterator(each[part]) for each in parts] for part in (0, 1))
        rows = 1 if packed else MICRO_BATCH_SIZE
        training = modules["megatron.training.training"]
        if layout.runs == 1:  # in training alone
            iterators = [iter(training.HybridCPDataLoaderWrapper(each, chunks[0].config)) for each in iterators]
        scheduled: dict[int, Any] = {}

        def run_step(iterators: list[Any], *, forward_only: bool = False) -> None:
            data, count = (
                iterators if layout.vp else iterators[0],
                num_microbatches_calculator.get_num_microbatches(),
            )
            if layout.runs == 2:
                if args.curr_iteration not in scheduled or forward_only:  # a step that is run again is not asked again
                    found = training.wrap_data_iterator(data, chunks[0].config, count)
                    scheduled[args.curr_iteration] = found
                    record.log.append(f"tokens {found[2]}, squares {found[3]}")
                data, count = scheduled[args.curr_iteration][:2]
            get_forward_backward_func()(
                forward_step_func=partial(forward_step, script=script, record=record),
                data_iterator=data,
                model=chunks if layout.vp else chunks[0],
                num_microbatches=count,
                seq_length=MICRO_BATCH_SIZE * length // rows,
                micro_batch_size=rows,
                forward_only=forward_only,
            )

        machine = rerun_state_machine.get_rerun_state_machine()
        for step in range(layout.steps):
            num_runs, args.curr_iteration = 0, step
            while machine.should_run_forward_backward(iterators):
                if layout.rerun and step == 0:
                    record.keep_as_run(num_runs)
                    machine.rerun_requested, machine.continue_requested = num_runs == 0, True
                    num_runs += 1
                run_step(iterators, forward_only=bool(layout.forward_only))
            args.consumed_train_samples += samples
            if on_step is not None:
                on_step(step, args)
        machine.set_mode(rerun_state_machine.RerunMode.DISABLED)  # as Megatron does for evaluations
        for number in range(layout.passes):
            record.keep_as_run(number, part="validation")
            args.eval_iters = len(parts[0][1])
            for _step in range(args.eval_iters):
                run_step(validation, forward_only=True)
        tmx.close()
    record.log += [line for line in lines if "by source" in line]
    parallel_state.destroy_model_parallel()
    return record, args


def start_rank(rank: int, port: int, world_size: int) -> dist.TCPStore:
    """What every rank does first: a CPU for Megatron, and the job's store."""
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.(jit|distributed)")
    example_module("cpu").enable()
    torch.set_num_threads(1)
    # A state of its own is asked of CUDA at each step, which this machine does not have.
    torch.cuda.get_rng_state = lambda device=None: torch.empty(0)  # type: ignore[assignment]
    torch.cuda.set_rng_state = lambda state, device=None: None  # type: ignore[assignment]
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    return dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0, timeout=timedelta(seconds=60))


def run_layouts(rank: int, *, port: int, recipe: Path, out: Path, layouts: list[Layout]) -> None:
    """All layouts, one after another, in one process."""
    world_size = layouts[0].world_size
    store = start_rank(rank, port, world_size)
    saved: SimpleNamespace | None = None
    with (out / f"rank-{rank}.jsonl").open("w") as lines:
        for number, layout in enumerate(layouts):
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"layout-{number}", store),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(minutes=30),
            )
            record, saved = run_layout(recipe, layout, checkpoint=saved if layout.resume else None)
            lines.write(record.line() + "\n")
            lines.flush()
            dist.barrier()
            dist.destroy_process_group()
    os._exit(0)  # nothing is left to end; to take all modules apart costs half a second of a core


def main(recipe: Path, out: Path, deadline_s: float, layouts: list[Layout]) -> int:
    """Fork the ranks of each number and wait for them; how many failed."""
    for world_size, group in groupby(layouts, lambda layout: layout.world_size):
        folder = out / str(world_size)
        program = partial(run_layouts, port=free_port(), recipe=recipe, out=folder, layouts=list(group))
        with ForkedRanks(program, world_size=world_size, folder=folder) as ranks:
            ranks.await_ends(deadline_s=deadline_s)
            failed = len(ranks.running) + sum(code != 0 for code in ranks.code_of_rank.values())
            if failed:
                print(ranks.report(), file=sys.stderr, flush=True)
                return failed
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), [layout_of(name) for name in sys.argv[4:]]))
