"""Compares the planner's speed and memory with figures that others have published for their own trainers.

    python -m bench.published [--only TEXT]

Plans each row of the tables below, and prints the page for RESULTS.md: published and foretold tokens per second and
device, and memory.  Needs no GPU.  `--only` selects tables by title.

A row belongs here if its source states the device, model, sequences, mesh, precision and recomputation.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from trainer.recipes.llama.model import Llama

from bench.results import describe_environment
from trainer.model import shard
from trainer.model.recompute import save_only
from trainer.plan import kernels, machine
from trainer.plan.__main__ import command_line

ALLOWED_SPEED = 0.10
"""The difference allowed in speed, relative to the published figure; a row that differs more states the cause."""


@dataclass(frozen=True)
class Row:
    """Published figures of one run."""

    settings: str
    """Settings of `trainer.plan`, in addition to those of the table."""
    tokens_per_s: float
    """Tokens per second and device."""
    memory_gib: float | None = None
    """Peak memory that the allocator reserved on one device, in GiB."""
    cause: str = ""
    """Why the speed differs by more than `ALLOWED_SPEED`."""


@dataclass(frozen=True)
class Table:
    """Rows from one source."""

    title: str
    source: str
    """Where and when the figures were published."""
    settings: str
    """Settings of `trainer.plan` that all rows share."""
    rows: dict[str, Row]
    allowed_memory: float = 0.05
    """The difference allowed in memory, relative to the published figure."""
    has_old_attention: bool = False
    """Whether attention ran in FlashAttention-2 on a GPU newer than an A100, as in torch before 2.11."""
    has_whole_logits: bool = False
    """Whether the loss was computed from all logits at once, in float32, instead of in chunks."""
    has_plain_norm: bool = False
    """Whether RMSNorm was written as operators on float32 tensors, which are fused only in compiled blocks."""


LLAMA2_7B = "recipe=llama3_8b model.num_kv_heads=32 model.ffn_dim=11008 model.vocab_size=32000"
LLAMA2_13B = (
    "recipe=llama3_8b model.dim=5120 model.num_layers=40 model.num_heads=40 model.num_kv_heads=40 model.ffn_dim=13824 "
    "model.vocab_size=32000"
)
LLAMA2_34B = "recipe=llama3_70b model.num_layers=48 model.ffn_dim=22016 model.vocab_size=32000"
LLAMA2_70B = "recipe=llama3_70b model.vocab_size=32000"
LLAMA3_8B = "recipe=llama3_8b"
LLAMA3_15B = "recipe=llama3_8b model.dim=5120 model.num_layers=40 model.num_heads=40 model.ffn_dim=17920"
LLAMA3_70B = "recipe=llama3_70b"

H100_AT_500_W = 'device="{like: h100, power_w: 500, memory_gib: 96, memory_tb_s: 2.4}"'
BLOCKS_AND_ROOT = "fsdp.wrap=bench.published:blocks"
NONE = "train.activation_checkpoint=none"
FULL = "train.activation_checkpoint=full"
EVERY_2ND = "train.activation_checkpoint=2"
SELECTIVE = "train.activation_checkpoint=selective"
"""In torchtitan's tables, torchtitan's own selective recomputation: see `kernels_of`."""
FLOAT8 = "train.compile=true train.float8=tensorwise"
EXCHANGE = "mesh.expert_method=exchange train.compile=false"
ALL_BFLOAT16 = "train.weights_dtype=bfloat16 optim.state_dtype=bfloat16 fsdp.reduce_dtype=bfloat16"


def blocks(model: nn.Module) -> list[str]:
    """Return FSDP units without the embedding and the head, as most trainers have them: the root gathers these."""
    return ["layers.*"]


def _batch(seq_len: int, micro_batch: int, num_groups: int, num_micro_batches: int = 1) -> str:
    """Return the settings of a batch.  num_groups: the number of ranks, or of groups that share a sequence."""
    longest = f"model.max_seq_len={seq_len} " if seq_len > 8192 else ""
    return (
        f"{longest}data.seq_len={seq_len} train.micro_batch_size={micro_batch} "
        f"train.global_batch_size={micro_batch * num_groups * num_micro_batches}"
    )


TABLES = (
    Table(
        "torchtitan on 64 A100",
        "pytorch/torchtitan, docs/performance.md, June 2024. It ran on AWS (pytorch/torchtitan#394, #676), whose nodes "
        "of 8 A100 with 80 GB have 400 Gbit/s (p4de.24xlarge).",
        f"device=a100 network_gbps=50 ranks=64 {BLOCKS_AND_ROOT} train.compile=false",
        {
            "Llama 3 8B, every 2nd block": Row(f"{LLAMA3_8B} {_batch(8192, 1, 64)} {EVERY_2ND}", 2904),
            "Llama 3 8B, selective": Row(f"{LLAMA3_8B} {_batch(8192, 1, 64)} {SELECTIVE}", 2973),
            "Llama 3 70B, full": Row(f"{LLAMA3_70B} {_batch(8192, 1, 64)} {FULL}", 331),
            "Llama 2 13B, none": Row(f"{LLAMA2_13B} {_batch(4096, 2, 64)} {NONE}", 2162),
            "Llama 2 13B, every 2nd block": Row(f"{LLAMA2_13B} {_batch(4096, 2, 64)} {EVERY_2ND}", 1914),
            "Llama 2 13B, selective": Row(f"{LLAMA2_13B} {_batch(4096, 2, 64)} {SELECTIVE}", 1904),
            "Llama 2 70B, selective": Row(f"{LLAMA2_70B} {_batch(4096, 1, 64)} {SELECTIVE}", 355),
            "Llama 2 70B, full": Row(f"{LLAMA2_70B} {_batch(4096, 2, 64)} {FULL}", 353),
        },
    ),
    Table(
        "torchtitan on H100 at 500 W",
        "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3, December 2024: Llama 3.1 8B, "
        "selective.",
        f"{LLAMA3_8B} {H100_AT_500_W} {BLOCKS_AND_ROOT} {SELECTIVE}",
        {
            "8": Row(f"ranks=8 {_batch(8192, 2, 8)} train.compile=false", 5762, 82.4),
            "8, compiled": Row(f"ranks=8 {_batch(8192, 2, 8)} train.compile=true", 6667, 77.0),
            "8, float8": Row(f"ranks=8 {_batch(8192, 2, 8)} {FLOAT8}", 8532, 76.8),
            "128": Row(f"ranks=128 {_batch(8192, 2, 128)} train.compile=false", 5605, 67.0),
            "128, compiled": Row(f"ranks=128 {_batch(8192, 2, 128)} train.compile=true", 6514, 62.0),
            "128, float8": Row(f"ranks=128 {_batch(8192, 2, 128)} {FLOAT8}", 8380, 61.8),
        },
        has_old_attention=True,
        has_whole_logits=True,
    ),
    Table(
        "torchtitan's long sequences on 8 H100 at 500 W",
        "The same page, table 2: Llama 3.1 8B, float8, full.",
        f"{LLAMA3_8B} {H100_AT_500_W} ranks=8 {BLOCKS_AND_ROOT} {FULL} {FLOAT8}",
        {
            "32,768": Row(_batch(32768, 1, 8), 3890, 83.9),
            "65,536, context 2": Row(f"{_batch(65536, 1, 4)} mesh.context=2", 2540, 84.2),
            "131,072, context 4": Row(
                f"{_batch(131072, 1, 2)} mesh.context=4",
                1071,
                84.0,
                "Their context parallelism is a ring of 4 smaller attention kernels; ours exchanges heads and runs "
                "one. The rows with rings of 1 and 2 are met.",
            ),
            "262,144, context 8": Row(
                f"{_batch(262144, 1, 1)} mesh.context=8", 548, 84.5, "The same, with a ring of 8."
            ),
        },
        allowed_memory=0.06,
        has_old_attention=True,
        has_whole_logits=True,
    ),
    Table(
        "torchtitan with tensor parallelism on 256 H100 at 500 W",
        "pytorch/torchtitan#1299, June 2025: Llama 3.1 70B, full, compiled, without asynchronous tensor parallelism.",
        f"{LLAMA3_70B} {H100_AT_500_W} ranks=256 {BLOCKS_AND_ROOT} {FULL} train.compile=true",
        {"70B, tensor 8": Row(f"{_batch(8192, 16, 32)} mesh.tensor=8", 597.3)},
        has_old_attention=True,
        has_whole_logits=True,
    ),
    Table(
        "torchtitan on H200",
        "pytorch/torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md, June 2025: Llama 3.1 8B, "
        "selective, float8. Memory is left out: its compiled loss keeps other tensors than ours.",
        f"{LLAMA3_8B} device=h200 {SELECTIVE} {FLOAT8}",
        {
            "32": Row(
                f"ranks=32 {_batch(8192, 2, 32)}",
                10938,
                cause="This is 1.28 times the row with 8 at 500 W, with 1.4 times the power, twice the memory "
                "bandwidth and a faster attention kernel. Something else, not named there, limits that cluster.",
            ),
            "64": Row(f"ranks=64 {_batch(8192, 2, 64)}", 10753, cause="The same."),
        },
    ),
    Table(
        "torchao on 8 H100",
        "pytorch/ao, docs/source/workflows/training.md, torch 2.7: torchtitan's Llama 3 8B, selective. The power is "
        "not stated; it is taken to be the 500 W of torchtitan's own tables.",
        f"{LLAMA3_8B} ranks=8 {_batch(8192, 1, 8)} {H100_AT_500_W} {SELECTIVE} train.compile=true",
        {
            "bfloat16": Row("train.float8=none", 6150),
            "float8, tensorwise": Row("train.float8=tensorwise", 7689.5),
            "float8, rowwise": Row(
                "train.float8=rowwise",
                6768,
                cause="Scales by rows need a matmul kernel of another library (CUTLASS instead of cuBLAS) and casts "
                "along both dimensions. The planner has one rate for float8, fitted to tensorwise scales.",
            ),
        },
        has_old_attention=True,
    ),
    Table(
        "torchao on 8 MI300X",
        "The same page, torch 2.9 with ROCm 6.4.",
        f"{LLAMA3_8B} ranks=8 {_batch(8192, 1, 8)} device=mi300x {SELECTIVE} train.compile=true",
        {
            "bfloat16": Row(
                "train.float8=none",
                5376.5,
                cause="The fractions of the peak are those of NVIDIA's libraries; ROCm's kernels reach less than half "
                "of them. Use --calibrate.",
            )
        },
    ),
    Table(
        "Foundation Model Stack on 128 A100",
        "foundation-model-stack/fms-fsdp, README.md, 2024: Llama 2, 4,096 tokens, FSDP1. The 400 Gbit/s are taken to "
        "be those of a node. Its 13B is left out: which blocks it recomputes is not stated.",
        "device=a100 network_gbps=50 train.compile=false fsdp.reduce_dtype=bfloat16",
        {
            "7B, none, 16 x 8": Row(f"{LLAMA2_7B} mesh.replicate=16 mesh.shard=8 {_batch(4096, 2, 128)} {NONE}", 3700),
            "34B, full": Row(f"{LLAMA2_34B} ranks=128 {_batch(4096, 2, 128)} {FULL}", 700),
            "70B, full": Row(f"{LLAMA2_70B} ranks=128 {_batch(4096, 2, 128)} {FULL}", 370),
        },
        has_plain_norm=True,
    ),
    Table(
        "Foundation Model Stack on 96 H100",
        "The same page. The 800 Gbit/s are taken to be those of a node.",
        "device=h100 network_gbps=100 train.compile=false fsdp.reduce_dtype=bfloat16",
        {
            "7B, none, 12 x 8": Row(
                f"{LLAMA2_7B} mesh.replicate=12 mesh.shard=8 {_batch(4096, 2, 96)} {NONE}",
                7500,
                cause="29 % of its planned kernel time is memory-bound, 19 and 17 % in the two rows below: its rotary "
                "embedding and feed-forward layer are plain operators too, which the plan knows only of RMSNorm.",
            ),
            "34B, full": Row(f"{LLAMA2_34B} ranks=96 {_batch(4096, 2, 96)} {FULL}", 1550),
            "70B, full": Row(f"{LLAMA2_70B} ranks=96 {_batch(4096, 2, 96)} {FULL}", 800),
        },
        has_old_attention=True,
        has_plain_norm=True,
    ),
    Table(
        "KempnerForge on H200",
        "KempnerInstitute/KempnerForge, benchmarks/mfu_scaling, 2026-04-05, and benchmarks/config_validation, "
        "2026-04-06 (8 sequences, 32 GPUs): Llama 3, 4,096 tokens, full, 4 GPUs to a node with 400 Gbit/s each.",
        f"device=h200 ranks_per_node=4 {FULL} {BLOCKS_AND_ROOT} fsdp.accumulate=unsharded train.weights_dtype=bfloat16 "
        "optim.state_dtype=bfloat16",
        {
            "8B, 1": Row(f"{LLAMA3_8B} ranks=1 {_batch(4096, 2, 1, 4)} train.compile=true", 10471),
            "8B, 2": Row(f"{LLAMA3_8B} ranks=2 {_batch(4096, 2, 2, 4)} train.compile=true", 18728 / 2),
            "8B, 4": Row(f"{LLAMA3_8B} ranks=4 {_batch(4096, 4, 4, 2)} train.compile=true", 38983 / 4),
            "8B, 4, 8 sequences": Row(f"{LLAMA3_8B} ranks=4 {_batch(4096, 8, 4, 4)} train.compile=true", 38858 / 4),
            "8B, 32": Row(f"{LLAMA3_8B} ranks=32 {_batch(4096, 4, 32, 4)} train.compile=true", 297384 / 32),
            "15B, 8": Row(f"{LLAMA3_15B} ranks=8 {_batch(4096, 4, 8, 4)} train.compile=false", 35405 / 8),
        },
        has_plain_norm=True,
    ),
    Table(
        "NeMo AutoModel on H100",
        "NVIDIA-NeMo/Automodel, docs/performance-summary.mdx, 2026-06-12; recomputation and precision from the files "
        "that it links to. Rows with pipeline parallelism and models without a recipe are left out. Those with tensor "
        "parallelism overlap its communication with matmuls.",
        f"device=h100 {ALL_BFLOAT16}",
        {
            "Llama 3 70B, 64, context 2": Row(
                f"recipe=llama3_70b {_batch(8192, 1, 32, 4)} ranks=64 mesh.context=2 {FULL} train.compile=true", 866.77
            ),
            "Llama 3 8B, LoRA, 1": Row(
                f"recipe=llama3_8b {_batch(4096, 2, 1, 16)} ranks=1 lora.rank=16 {NONE} train.compile=false", 12472.87
            ),
            "Llama 3 70B, LoRA, 8, tensor 2": Row(
                f"recipe=llama3_70b {_batch(4096, 2, 4, 4)} ranks=8 mesh.tensor=2 lora.rank=16 {FULL} "
                "train.compile=true",
                1091.85,
            ),
            "Llama 3 70B, LoRA, 16, tensor 2": Row(
                f"recipe=llama3_70b {_batch(4096, 2, 8, 2)} ranks=16 mesh.tensor=2 lora.rank=16 {FULL} "
                "train.compile=true",
                984.85,
                cause="On two nodes, their step takes 10 % longer than on one with as many tokens per GPU; the plan "
                "hides the network behind kernels. Their Qwen2.5 32B, which has no recipe here, takes 8 % longer.",
            ),
            "gpt-oss 20B, 8, expert 8": Row(
                f"recipe=gpt_oss_20b {_batch(4096, 2, 8, 16)} ranks=8 mesh.expert=8 {EXCHANGE} {NONE}", 13058
            ),
            "Qwen3 MoE 30B, 8, expert 8": Row(
                f"recipe=qwen3_30b_a3b {_batch(4096, 4, 8, 16)} ranks=8 mesh.expert=8 {EXCHANGE} {FULL}",
                12040,
                cause="60 % of the planned time is memory-bound kernels and the exchange of tokens. Theirs are fused "
                "by Transformer Engine and DeepEP; ours are plain operators, as blocks that exchange are not compiled.",
            ),
            "gpt-oss 120B, 64, expert 64": Row(
                f"recipe=gpt_oss_120b {_batch(4096, 2, 64, 4)} ranks=64 mesh.expert=64 {EXCHANGE} {NONE}",
                7626,
                cause="The same, 68 %. 42 % is the exchange, which sends a token over the network to each of its 4 "
                "experts; DeepEP sends it once to each node and forwards it by NVLink.",
            ),
        },
    ),
    Table(
        "TRL on 8 H100",
        "huggingface/trl, release 1.13.0 and docs/source/long_context_training.md: Qwen3 8B, one sequence in 380 s. "
        "Its table of expert parallelism is left out: there, the ranks of a group share a batch.",
        f"recipe=qwen3_8b device=h100 ranks=8 {FULL} train.offload_activations=1 {ALL_BFLOAT16}",
        {"1,048,576, context 8": Row(f"{_batch(1048576, 1, 1)} mesh.context=8", 1048576 / 380 / 8)},
    ),
)


@contextlib.contextmanager
def kernels_of(table: Table) -> Iterator[None]:
    """Plan with kernels that a source ran and the trainer does not.

    torchtitan's selective recomputation keeps the attention and every second matmul of a block, beginning with the
    first: the queries, the values, and the first and last one of the feed-forward layer.  The trainer's keeps all.

    FlashAttention-2 reaches 35 % of the peak on an H100 (Shah et al. 2024, arXiv:2407.08608).
    """
    every_second = save_only(frozenset({*(("matmul", number) for number in (0, 2, 4, 6)), ("attention", 0)}))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(shard, "save_expensive_operators", every_second))
        if table.has_old_attention:
            stack.enter_context(mock.patch.object(machine, "_ATTENTION_EFFICIENCY", 0.35))
        if table.has_whole_logits:
            forward = Llama.forward
            stack.enter_context(mock.patch.object(Llama, "forward", lambda self, tokens: forward(self, tokens)))
        if table.has_plain_norm:
            stack.enter_context(mock.patch.object(kernels, "rms_norm", _plain_norm))
        yield


def _plain_norm(x: torch.Tensor, shape: object, weight: torch.Tensor, eps: float | None = None) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + (eps or 1e-5))).type_as(x) * weight


def plan(table: Table, row: Row) -> dict[str, Any]:
    """Return the plan of a row, as `trainer.plan --json` prints it."""
    output = io.StringIO()
    with kernels_of(table), contextlib.redirect_stdout(output):
        command_line([*shlex.split(f"{table.settings} {row.settings}"), "--json"])
    return dict(json.loads(output.getvalue().splitlines()[-1]))


@dataclass(frozen=True)
class Comparison:
    """The foretold figures of a row, and their differences from the published ones, relative to these."""

    tokens_per_s: float
    speed: float
    memory_gib: float
    memory: float | None
    """None if no memory was published."""


def compare(table: Table, row: Row) -> Comparison:
    planned = plan(table, row)
    tokens_per_s = planned["time"]["tokens_per_s"] / planned["num_ranks"]
    reserved_gib = planned["memory"]["needed_gib"] - planned["memory"]["gib"]["driver and communicators"]
    memory = None if row.memory_gib is None else reserved_gib / row.memory_gib - 1
    return Comparison(tokens_per_s, tokens_per_s / row.tokens_per_s - 1, reserved_gib, memory)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.published", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="tables whose title contains this")
    options = parser.parse_args()
    print(f"## The planner and published figures\n\n{describe_environment()}")
    for table in TABLES:
        if options.only.lower() in table.title.lower():
            show_table(table)
    return 0


def show_table(table: Table) -> None:
    """Print a table of the page in Markdown, with the causes of the rows that are not met."""
    has_memory = any(row.memory_gib is not None for row in table.rows.values())
    columns = [
        "row",
        "tokens/s",
        "foretold",
        "difference",
        *(["GiB", "foretold", "difference"] if has_memory else []),
        "...",
    ]
    print(f"\n### {table.title}\n\n{table.source}\n\n    python -m trainer.plan {table.settings} ...\n")
    print(_line(columns))
    print(_line(["---"] * len(columns)))
    for name, row in table.rows.items():
        found = compare(table, row)
        cells = [name, f"{row.tokens_per_s:,.0f}", f"{found.tokens_per_s:,.0f}", f"{100 * found.speed:+.1f} %"]
        if row.memory_gib is not None and found.memory is not None:
            cells += [f"{row.memory_gib:.1f}", f"{found.memory_gib:.1f}", f"{100 * found.memory:+.1f} %"]
        print(_line([*cells, f"`{row.settings}`"]), flush=True)
    for name, row in table.rows.items():
        if row.cause:
            print(f"\n{name}: {row.cause}")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
