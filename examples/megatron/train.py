"""Train a GPT of megatron-core on a torchmix recipe, at any tensor, context, pipeline and data parallel layout.

In: a recipe, a layout, and a checkpoint to continue from. Out: a line per step on standard output, the same as JSON
lines in `--log`, checkpoints in `--save`, and at the end the loss beside the unigram entropy of the corpus.

    torchrun --nproc-per-node 4 examples/megatron/train.py --data-recipe examples/megatron/recipe.yaml --tp 2

Must hold: losses do not depend on the layout (up to the order of float additions), the order of the data not at all,
and a run that is killed and continued with `--load` sees what an uninterrupted run sees. `--load` with the folder of
`--save` starts afresh while there is no checkpoint yet, so one command line starts a run and continues it.

The parts, in reading order: `cpu.py`, `attention.py`, `model.py`, `checkpoint.py`, `unigram.py`, and this loop.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import torchmix

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # megatron-core warns of every accelerator library that is not installed
    import checkpoint
    import cpu
    import model as gpt
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from unigram import unigram_entropy

from torchmix.megatron_adapter import packed_seq_params
from torchmix.recipe.load import load_recipe, recipe_directory

WARM_UP_STEPS = 10


def main() -> None:
    options = parse_arguments()
    recipe = load_recipe(options.data_recipe)
    topology = torchmix.Topology.from_torchrun(tp=options.tp, cp=options.cp, pp=options.pp)
    device = start_megatron(options)
    model = gpt.build_model(recipe, device)
    optimizer = gpt.build_optimizer(model, learning_rate=options.learning_rate)
    step, data_state = restore(options, model, optimizer)

    losses: list[float] = []
    with torchmix.build_loader(
        options.data_recipe,
        topology=topology,
        micro_batch_size=options.micro_batch_size,
        loaders=options.loaders,
        look_ahead=options.look_ahead,
        max_steps=options.steps,
    ) as loader:
        if data_state is not None:
            loader.load_state_dict({"torchmix_state": data_state})
        microbatches = iter(loader)
        while step < options.steps:
            started_s = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = options.learning_rate * min(1.0, (step + 1) / WARM_UP_STEPS)
            counts = forward_backward(
                microbatches,
                model,
                optimizer,
                num_microbatches=loader.num_microbatches,
                row_tokens=options.micro_batch_size * recipe.batch.length,
                device=device,
            )
            optimizer.step()
            step += 1
            losses.append(mean_loss(counts, device))
            facts = {"step": step, "loss": losses[-1], "step_s": time.perf_counter() - started_s, **facts_of(loader)}
            if dist.get_rank() == 0:
                report(options, facts)
            if options.save and step % options.save_interval == 0 and step < options.steps:
                save(options, step, model, optimizer, loader)
        if options.save and (losses or step == 0):
            save(options, step, model, optimizer, loader)

    if dist.get_rank() == 0 and losses:
        last = losses[-10:]
        print(f"mean loss of the last {len(last)} steps: {sum(last) / len(last):.4f} nats")
        entropy = unigram_entropy(recipe, recipe_directory(options.data_recipe))
        print(f"unigram entropy of the corpus:   {entropy:.4f} nats")
    dist.barrier()
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-recipe", type=Path, required=True, help="recipe of the data, YAML")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--steps", type=int, default=100, help="steps of the whole run, those of a checkpoint included")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="samples of one forward and backward")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--seed", type=int, default=1234, help="of the model's first weights; the recipe seeds the data"
    )
    parser.add_argument("--save", type=Path, help="folder for checkpoints; one is saved at the end")
    parser.add_argument("--save-interval", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--load", type=Path, help="folder of checkpoints; continue from the latest")
    # The second name is for torchrun, which takes `--log` for one of its own, unless `--` stands before the script.
    parser.add_argument("--log", "--log-file", type=Path, help="append a JSON line per step to this file")
    parser.add_argument("--loaders", help="in_process or node, in place of the recipe's `loaders`")
    parser.add_argument("--look-ahead", type=int, default=2, help="steps that are prepared ahead of training")
    return parser.parse_args()


def start_megatron(options: argparse.Namespace) -> torch.device:
    """Start the process groups and seed the weights; without CUDA on the CPU, over gloo."""
    # Megatron uses what torch deprecates; nobody who trains can do anything about it.
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.(jit|distributed\.checkpoint)")
    cpu.enable()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device = torch.device("cpu")
        backend = "gloo"
    os.environ.setdefault("RANK", "0")  # without torchrun: one process
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group(backend, timeout=timedelta(minutes=10))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tp,
        context_parallel_size=options.cp,
        pipeline_model_parallel_size=options.pp,
    )
    torch.manual_seed(options.seed)
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(options.seed)
    return device


def forward_backward(
    microbatches: Iterator[torchmix.Microbatch],
    model: list[Any],
    optimizer: Any,
    *,
    num_microbatches: int,
    row_tokens: int,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Gradients of one global batch, by Megatron's schedule; what `loss_sum` counted, on the last stage."""
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()  # else `grad` stays an alias of the buffer, and the first microbatch counts twice
    counts: list[dict[str, Any]] = get_forward_backward_func()(
        forward_step_func=partial(forward_step, device=device),
        data_iterator=microbatches,
        model=model,
        num_microbatches=num_microbatches,
        # Packed attention takes all tokens of a microbatch as one row.
        seq_length=row_tokens,
        micro_batch_size=1,
    )
    return counts


def forward_step(
    microbatches: Iterator[torchmix.Microbatch], chunk: torch.nn.Module, *, device: torch.device
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Any]]]]:
    """One microbatch through this rank's stage, for Megatron's schedules.

    A stage gets the tensors it needs: tokens and positions on the first, labels and mask on the last, None elsewhere.
    """
    microbatch = next(microbatches)

    def row(field: Tensor | None) -> Tensor | None:
        return None if field is None else field.to(device, non_blocking=True).view(1, -1)

    output = chunk(
        input_ids=row(microbatch.tokens),
        position_ids=row(microbatch.position_ids),
        attention_mask=None,
        labels=row(microbatch.labels),
        packed_seq_params=packed_seq_params(microbatch, device=device),
    )
    return output, partial(
        loss_sum, loss_mask=row(microbatch.loss_mask), num_tokens_global=microbatch.num_tokens_global
    )


def loss_sum(losses: Tensor, *, loss_mask: Tensor, num_tokens_global: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Sum of the losses of a microbatch, and its tokens; Megatron divides the gradients by the tokens of all ranks."""
    total = (losses.float() * loss_mask).sum()
    num_tokens = loss_mask.sum().to(torch.int)
    return total, num_tokens, {"loss": total.detach(), "tokens": num_tokens, "tokens_global": num_tokens_global}


def mean_loss(counts: list[dict[str, Any]], device: torch.device) -> float:
    """The loss per token of the global batch, on every rank.

    Raises:
        RuntimeError: The ranks counted other tokens than the plan did: data was lost or doubled on the way.
    """
    # Ranks of a TP group hold the same loss: one of them counts. Other stages than the last hold none.
    mine = counts if parallel_state.get_tensor_model_parallel_rank() == 0 else []
    sums = [float(sum(count[name] for count in mine)) for name in ("loss", "tokens")]
    total = torch.tensor(sums, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    planned = next((count["tokens_global"] for count in counts), None)
    if planned is not None and planned != int(total[1]):
        raise RuntimeError(f"the plan says {planned} tokens in this global batch, the ranks trained on {int(total[1])}")
    return float(total[0] / total[1])


def restore(options: argparse.Namespace, model: list[Any], optimizer: Any) -> tuple[int, bytes | None]:
    """Continue from the latest checkpoint: the steps it has trained, and the state of its loader."""
    if options.load is None:
        return 0, None
    path = checkpoint.latest(options.load)
    if path is None:
        if options.load != options.save:
            raise FileNotFoundError(
                f"--load {options.load}: no checkpoint there; check it, or --save there too, to start afresh"
            )
        announce(f"no checkpoint in {options.load} yet, starting afresh")
        return 0, None
    restored = checkpoint.load(path, model=model, optimizer=optimizer)
    announce(f"continuing from {path}, step {restored.step}")
    return restored.step, restored.data_state


def save(options: argparse.Namespace, step: int, model: list[Any], optimizer: Any, loader: Any) -> None:
    """Save a checkpoint; all ranks call it."""
    data_state = loader.state_dict()["torchmix_state"]
    checkpoint.save(options.save, step=step, model=model, optimizer=optimizer, data_state=data_state)
    announce(f"saved step {step} in {options.save}")


def facts_of(loader: Any) -> dict[str, Any]:
    """What the log says of the data of the last step."""
    stats = loader.stats()
    return {
        "tokens_of_source": stats["tokens_of_source"],
        "balance_ratio": stats["balance_ratio"],
        "hash_order_ratio": stats["hash_order_ratio"],
        "data_wait_s": stats["data_wait_s"],
        "order_digest": loader.order_digest,
    }


def report(options: argparse.Namespace, facts: dict[str, Any]) -> None:
    """Print a step's line, and append it to the log."""
    total = sum(facts["tokens_of_source"].values()) or 1
    mixture = " ".join(f"{name} {tokens / total:.1%}" for name, tokens in facts["tokens_of_source"].items())
    print(
        f"step {facts['step']:5d}/{options.steps}  loss {facts['loss']:.4f}  {total} tokens: {mixture}  "
        f"balance {facts['balance_ratio']:.3f} ({facts['hash_order_ratio']:.3f} in hash order)  "
        f"data wait {1000 * facts['data_wait_s']:.1f} ms  "
        f"step {facts['step_s']:.2f} s  order {facts['order_digest']}",
        flush=True,
    )
    if options.log:
        options.log.parent.mkdir(parents=True, exist_ok=True)
        with options.log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(facts) + "\n")


def announce(text: str) -> None:
    """Print a line, once for all ranks."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
