"""Profiles of chosen steps: how their time is divided, the trace for Perfetto, and that training does not change."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import pickle
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.profiler

import tests.helpers.tiny
import trainer.metrics.profile
from tests.helpers.ranks import merged, run_ranks, run_tiny
from tests.helpers.tiny import lines, tiny_config
from trainer import RunConfig, Trainer, load_config
from trainer.config import check_config
from trainer.errors import UserError
from trainer.metrics.goodput import compute_goodput
from trainer.metrics.record import Record
from trainer.metrics.step_metrics import StepTimer
from trainer.metrics.time_breakdown import (
    ATTENTION,
    COMMUNICATION,
    DATA,
    HOST,
    KINDS,
    MATMUL,
    OTHER,
    Span,
    Timeline,
    classify_kernel,
    classify_operator,
    compute_fractions,
    extend_to_device,
    find_events,
    flatten_to_self_time,
)
from trainer.metrics.writers import JsonLines
from trainer.report.history import read_run

# ---------------------------------------------------------------------------------------------------------------
# What the time went into, of spans made by hand


def span(kind: str, start: float, end: float, lane: Any = 0, launched: float | None = None) -> Span:
    return Span(f"{kind} at {start}", kind, start, end - start, lane, launched)


def update(start: float, end: float) -> Span:
    return span(HOST, start, end)


def fractions(**expected: float) -> Any:
    return pytest.approx(dict.fromkeys(KINDS, 0.0) | expected)


def test_each_moment_of_a_step_counts_once() -> None:
    """Streams: matrix product 10-40, collective 30-60, overlapping copy 45-50; the host loads data until 20."""
    spans = [
        span(MATMUL, 10, 40, 7),
        span(COMMUNICATION, 30, 60, 20),
        span(OTHER, 45, 50, 7),
        span(DATA, 0, 20, "host"),
    ]
    assert compute_fractions(spans, [update(0, 100)]) == fractions(
        matmul=0.3,  # though the host waits for data until 20
        exposed_communication=0.15,  # 40-45 and 50-60
        other_kernels=0.05,
        data=0.1,
        host=0.4,
    )


def test_first_kind_counts_among_simultaneous_kernels() -> None:
    spans = [span(OTHER, 0, 60, 1), span(ATTENTION, 20, 60, 2), span(MATMUL, 40, 60, 3), span(MATMUL, 40, 60, 4)]
    assert compute_fractions(spans, [update(0, 60)]) == fractions(other_kernels=1 / 3, attention=1 / 3, matmul=1 / 3)


def test_time_between_steps_does_not_count() -> None:
    """An evaluation from 50 to 150 with its kernels, and a collective that overlaps it."""
    spans = [span(MATMUL, 0, 25), span(COMMUNICATION, 40, 60), span(MATMUL, 60, 140), span(DATA, 150, 175)]
    found = compute_fractions(spans, [update(0, 50), update(150, 200)])
    assert found == fractions(matmul=0.25, exposed_communication=0.1, data=0.25, host=0.4)


def test_step_with_host_time_only() -> None:
    assert compute_fractions([], [update(5, 6)]) == fractions(host=1.0)
    assert compute_fractions([span(MATMUL, 0, 9)], []) == fractions()


def test_step_lasts_until_its_kernels_end() -> None:
    """The host is ahead: it has launched both steps by 20, and the device finishes them at 110."""
    kernels = [span(MATMUL, 2, 60, launched=1), span(OTHER, 60, 110, launched=15), span(MATMUL, 110, 900, launched=25)]
    updates = extend_to_device([update(0, 10), update(10, 20)], kernels)
    assert [(found.start_us, found.end_us) for found in updates] == [(0, 60), (60, 110)]
    assert compute_fractions(kernels, updates) == fractions(matmul=58 / 110, other_kernels=50 / 110, host=2 / 110)


def test_step_hidden_behind_the_device_takes_no_time() -> None:
    updates = extend_to_device([update(0, 10), update(10, 20)], [span(MATMUL, 0, 50, launched=1)])
    assert [(found.start_us, found.end_us) for found in updates] == [(0, 50), (50, 50)]


def test_self_time_of_an_operator_excludes_nested_ones() -> None:
    outer, middle, inner, after = span(OTHER, 0, 100), span(HOST, 10, 90), span(MATMUL, 20, 50), span(MATMUL, 60, 95)
    found = [
        (piece.name, piece.start_us, piece.end_us) for piece in flatten_to_self_time([inner, after, outer, middle])
    ]
    assert found == [
        (outer.name, 0, 10),
        (middle.name, 10, 20),
        (inner.name, 20, 50),
        (middle.name, 50, 60),
        (after.name, 60, 90),  # what reaches out of the one around it is cut off with it
        (outer.name, 90, 100),
    ]


@pytest.mark.parametrize("kind", [ATTENTION, COMMUNICATION, DATA])
def test_nested_events_count_for_the_enclosing_one(kind: str) -> None:
    pieces = flatten_to_self_time([span(kind, 0, 10), span(HOST, 2, 8), span(MATMUL, 3, 5)])
    assert {piece.kind for piece in pieces} == {kind}
    assert math.fsum(piece.duration_us for piece in pieces) == 10


KERNELS = {
    MATMUL: [
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>(Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16>(cublasLt::cublasSplitKParams<float>)",
        "ampere_sgemm_128x64_tn",
        "triton_tem_fused_mm_3",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16>",
    ],
    ATTENTION: [
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128>>",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x64",
        "triton_tem_fused_flex_attention_0",
    ],
    COMMUNICATION: [
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
    ],
    OTHER: [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>",
        "triton_red_fused__to_copy_add_mean_mm_mul_pow_rsqrt_2",
        "triton_poi_fused__scaled_dot_product_flash_attention_clone_0",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float>",
        "Memcpy HtoD (Pinned -> Device)",
        "Memset (Device)",
    ],
}
OPERATORS = {
    MATMUL: ["aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_mm", "mkldnn::_linear_pointwise"],
    ATTENTION: ["aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention_for_cpu_backward"],
    COMMUNICATION: ["c10d::allreduce_", "c10d::_allgather_base_", "_c10d_functional::wait_tensor", "gloo:all_gather"],
    OTHER: ["aten::add_", "aten::matmul", "aten::_fused_adamw_", "fsdp::chunk_cat", "## Call CompiledFxGraph f1 ##"],
    HOST: ["autograd::engine::evaluate_function: MmBackward0", "MmBackward0", "FSDP::all_gather (layers.1)",
           "Optimizer.step#AdamW.step"],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in KERNELS.items() for name in names])
def test_kinds_of_kernels(kind: str, name: str) -> None:
    assert classify_kernel(name) == kind


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in OPERATORS.items() for name in names])
def test_kinds_of_operators(kind: str, name: str) -> None:
    assert classify_operator(name) == kind


# ---------------------------------------------------------------------------------------------------------------
# Traces made by hand

MAIN, AUTOGRAD, GLOO, DEVICE = 100, 101, 102, 0


def event(category: str, name: str, start: float, end: float, tid: int = MAIN, **arguments: Any) -> dict[str, Any]:
    own = {"ph": "X", "cat": category, "name": name, "pid": 0 if tid < MAIN else 1, "tid": tid}
    return own | {"ts": start, "dur": end - start, "args": {key.replace("_", " "): v for key, v in arguments.items()}}


def cuda_trace() -> list[dict[str, Any]]:
    """A step of 100 us on the host, whose kernels run until 140, then 20 us of evaluation and another step."""
    return [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0.0, "args": {"name": "python"}},
        event("user_annotation", "ProfilerStep#4", 0, 100),
        event("gpu_user_annotation", "ProfilerStep#4", 10, 140, 7),
        event("phase", "data", 0, 5),
        event("phase", "forward", 5, 100),
        event("cpu_op", "aten::mm", 5, 9, External_id=1),
        event("cuda_runtime", "cudaLaunchKernel", 6, 8, correlation=1),
        event("kernel", "nvjet_tst_128x64", 10, 50, 7, correlation=1),
        event("cuda_driver", "cuLaunchKernelEx", 20, 21, correlation=2),
        event("kernel", "ncclDevKernel_AllGather_RING_LL", 40, 70, 20, correlation=2),
        event("cuda_runtime", "cudaLaunchKernel", 30, 31, tid=AUTOGRAD, correlation=3),
        event("kernel", "void pytorch_flash::flash_bwd_kernel", 70, 140, 7, correlation=3),
        event("cuda_runtime", "cudaLaunchKernel", 110, 111, correlation=4),
        event("kernel", "nvjet_tst_64x8", 140, 160, 7, correlation=4),
        event("user_annotation", "ProfilerStep#5", 160, 200),
        event("phase", "data", 160, 170),
        event("user_annotation", "gloo:all_reduce", 165, 180, GLOO),
        event("cuda_runtime", "cudaMemcpyAsync", 170, 171, correlation=5),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 172, 176, 7, correlation=5),
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "pid": 1, "tid": MAIN, "ts": 6.0, "id": 1},
    ]


def test_a_trace_of_a_gpu() -> None:
    """Step 4 is 0 to 140, step 5 is 160 to 200: 180 us. The evaluation between them counts for neither."""
    timeline = Timeline.from_events(cuda_trace())
    assert [found.name for found in timeline.steps] == ["4", "5"]
    assert timeline.fractions() == fractions(
        matmul=40 / 180,
        attention=70 / 180,
        other_kernels=4 / 180,
        exposed_communication=(20 + 7 + 4) / 180,
        data=(5 + 5) / 180,
        host=(5 + 20) / 180,
    )


def test_a_trace_of_a_cpu() -> None:
    """The thread waits outside operators while gloo works; operators of other threads do not belong to the step."""
    timeline = Timeline.from_events(
        [
            event("user_annotation", "ProfilerStep#1", 0, 100),
            event("phase", "data", 0, 10, 2**31 - 1),
            event("cpu_op", "aten::stack", 2, 8),
            event("cpu_op", "aten::matmul", 10, 40),
            event("cpu_op", "aten::mm", 12, 38),
            event("user_annotation", "FSDP::all_gather (layers.0)", 40, 70),
            event("cpu_op", "c10d::_allgather_base_", 40, 45),
            event("user_annotation", "gloo:all_gather", 44, 65, GLOO),
            event("cpu_op", "aten::copy_", 60, 70),
            event("cpu_op", "aten::mm", 70, 90, AUTOGRAD),
        ]
    )
    assert timeline.fractions() == fractions(
        matmul=0.26,
        other_kernels=0.04 + 0.10,  # but in a copy it does not wait
        exposed_communication=0.20,
        data=0.10,
        host=0.30,
    )


def test_backward_of_attention_by_matrix_products_counts_as_attention() -> None:
    def forward(name: str, start: float, end: float, number: int) -> dict[str, Any]:
        return event("cpu_op", name, start, end, Sequence_number=number, Fwd_thread_id=0)

    def backward(name: str, start: float, end: float, number: int) -> dict[str, Any]:
        return event("cpu_op", f"autograd::engine::evaluate_function: {name}", start, end, Sequence_number=number,
                     Fwd_thread_id=1)  # fmt: skip

    timeline = Timeline.from_events(
        [
            event("user_annotation", "ProfilerStep#1", 0, 100),
            forward("aten::scaled_dot_product_attention", 0, 20, 7),
            forward("aten::bmm", 5, 10, 7),
            forward("aten::transpose", 12, 13, 8),  # without a node of its own: the next one's number
            forward("aten::mm", 20, 30, 8),
            backward("MmBackward0", 30, 60, 8),
            event("cpu_op", "aten::mm", 35, 55),
            backward("BmmBackward0", 60, 90, 7),
            event("cpu_op", "aten::bmm", 61, 89),
        ]
    )
    assert timeline.fractions() == fractions(attention=0.50, matmul=0.30, host=0.20)


def test_events_are_read_one_at_a_time() -> None:
    text = '{"schemaVersion": 1,\n "traceEvents": [\n {"ph": "X", "name": "a]"},\n\n{"ph": "M"}\n ],"traceName": "x" }'
    begin, events = find_events(text)
    assert list(events) == [{"ph": "X", "name": "a]"}, {"ph": "M"}]
    assert json.loads(text[:begin] + '{"ph": "i"},' + text[begin:])["traceEvents"][0] == {"ph": "i"}


@pytest.mark.parametrize("text", ['{"traceEvents": [{"ph": "X"}, {"ph"', '{"traceEvents": [{"ph": "X"}]', "", "{}"])
def test_truncated_trace_is_rejected(text: str) -> None:
    with pytest.raises(ValueError):
        list(find_events(text)[1])


# ---------------------------------------------------------------------------------------------------------------
# What it does to the means


def test_profiled_steps_are_excluded_from_means() -> None:
    meter = StepTimer()
    meter.count(1.0, 0.1, 100)
    meter.count(5.0, 3.0, 100, is_profiled=True)
    meter.count(1.0, 0.1, 100)
    found = meter.read()
    assert (found.step_s, found.data_s, found.tokens_per_s) == pytest.approx((1.0, 0.1, 100.0))


def test_means_of_profiled_steps_only() -> None:
    meter = StepTimer()
    meter.count(5.0, 1.0, 100, is_profiled=True)
    meter.count(3.0, 1.0, 100, is_profiled=True)
    found = meter.read()
    assert (found.step_s, found.data_s, found.tokens_per_s) == (4.0, 1.0, 25.0)
    assert not meter.has_steps


# ---------------------------------------------------------------------------------------------------------------
# Runs


PROFILED = ["train.steps=8", "log.profile_steps=[3,5]"]


def profiled_config(folder: Path, *overrides: str) -> RunConfig:
    return tiny_config(folder, *merged(PROFILED, overrides))


def fit(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Train to the end and return the lines of metrics.jsonl."""
    return tests.helpers.tiny.fit(folder, *merged(PROFILED, overrides))


def of(kind: str, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in found if line["kind"] == kind]


def files(folder: Path) -> list[str]:
    """Return all files in the folder of profiles, including hidden ones."""
    return sorted(path.name for path in (folder / "profile").glob("*"))


def read_trace(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        return json.load(file)["traceEvents"]


def names(events: list[dict[str, Any]], category: str) -> Counter[str]:
    return Counter(event["name"] for event in events if event.get("cat") == category)


def updates_in(path: Path) -> list[int]:
    return [int(update.name) for update in Timeline.from_events(read_trace(path)).steps]


@pytest.fixture(autouse=True)
def _no_group_is_left_open() -> Iterator[None]:
    """Keep a test that fails before it closes its Trainer from failing the next."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile") / "run"
    fit(folder, "eval.every=4", "checkpoint.every=4")
    return folder


@pytest.mark.slow
def test_perfetto_can_open_the_trace(profiled: Path) -> None:
    """As in https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU for JSON traces."""
    (name,) = files(profiled)
    assert name == "trace_3-5_rank0.json.gz"
    events = read_trace(profiled / "profile" / name)
    assert {event["ph"] for event in events} <= set("XMsfi")
    for found in events:
        assert {"name", "pid", "tid", "ts"} <= set(found) or found["ph"] == "M"
        if found["ph"] == "X":
            assert type(found["ts"]) in (int, float)
            assert found["dur"] >= 0
    assert names(events, "cpu_op")["aten::mm"] > 3 * 2


@pytest.mark.slow
def test_trace_names_steps_and_their_phases(profiled: Path) -> None:
    """An evaluation and a save lie between the profiled steps; each step has two micro-batches."""
    events = read_trace(profiled / "profile" / "trace_3-5_rank0.json.gz")
    timeline = Timeline.from_events(events)
    assert [update.name for update in timeline.steps] == ["3", "4", "5"]
    found = names(events, "phase")
    assert {name: found[name] for name in ("data", "backward", "reduce", "optimizer", "evaluate")} == {
        "data": 3, "backward": 6, "reduce": 6, "optimizer": 3, "evaluate": 1
    }  # fmt: skip
    assert found["save"] >= 1
    assert set(found) == {"data", "forward", "backward", "reduce", "optimizer", "evaluate", "save"}
    phases = [event for event in events if event.get("cat") == "phase"]
    for before, after in itertools.pairwise(phases):
        assert before["ts"] + before["dur"] <= after["ts"] + 0.01, "one at a time"


@pytest.mark.slow
def test_phases_use_the_clock_of_the_trace(profiled: Path) -> None:
    """Each attention of a forward pass begins in the phase `forward`, and each fused step in `optimizer`."""
    events = read_trace(profiled / "profile" / "trace_3-5_rank0.json.gz")
    where = {"aten::scaled_dot_product_attention": {"forward", "evaluate"}, "aten::_fused_adamw_": {"optimizer"},
             "aten::_scaled_dot_product_flash_attention_for_cpu_backward": {"backward"}}  # fmt: skip
    phases = [event for event in events if event.get("cat") == "phase"]
    num_found = Counter[str]()
    for found in events:
        if found["name"] in where:
            around = {p["name"] for p in phases if p["ts"] <= found["ts"] < p["ts"] + p["dur"]}
            assert around <= where[found["name"]], found["name"]
            assert around
            num_found[found["name"]] += 1
    assert num_found["aten::scaled_dot_product_attention"] > 3 * 2 * 2, "two layers, and those of the evaluation"
    assert num_found["aten::_scaled_dot_product_flash_attention_for_cpu_backward"] == 3 * 2 * 2


@pytest.mark.slow
def test_profile_record(profiled: Path) -> None:
    (record,) = of("profile", lines(profiled))
    assert (record["first_step"], record["step"]) == (3, 5)
    assert (record["trace"], record["memory"]) == ("trace_3-5_rank0.json.gz", None)
    assert math.fsum(record[kind] for kind in KINDS) == pytest.approx(1.0, abs=1e-9)
    assert record["exposed_communication"] == 0.0, "there is one rank"
    assert min(record["matmul"], record["attention"], record["other_kernels"], record["data"], record["host"]) > 0
    timeline = Timeline.from_events(read_trace(profiled / "profile" / record["trace"]))
    assert timeline.fractions() == pytest.approx({kind: record[kind] for kind in KINDS}), "the file says it again"
    assert record["update_s"] == pytest.approx(sum(u.duration_us for u in timeline.steps) / 3e6)


@pytest.mark.slow
def test_readers_of_metrics_ignore_profile_records(profiled: Path, tmp_path: Path) -> None:
    found = lines(profiled)
    without = [line for line in found if line["kind"] != "profile"]
    assert compute_goodput(found) == compute_goodput(without)
    assert read_run(profiled).last_step == 8
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))
    sink = JsonLines(tmp_path / "metrics.jsonl", 4)
    sink.close()
    kept = lines(tmp_path)
    assert sink.lost_steps == 4
    assert of("profile", kept) == [], "it is made anew, as the steps are"
    assert [line["step"] for line in of("train", kept)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_times_of_profiled_steps_are_marked_if_there_are_no_others(profiled: Path, tmp_path: Path) -> None:
    marked = [line["step"] for line in of("train", lines(profiled)) if line.get("profiled")]
    assert marked == [3, 4, 5]
    assert not any("profiled" in line for line in of("train", fit(tmp_path, "log.every=4", "train.steps=8")))


@pytest.mark.slow
def test_profile_does_not_change_training(profiled: Path, tmp_path: Path) -> None:
    plain = fit(tmp_path, "log.profile_steps=null", "eval.every=4", "checkpoint.every=4")
    for kind in ("train", "eval"):
        assert [line["loss"] for line in of(kind, plain)] == [line["loss"] for line in of(kind, lines(profiled))]
    assert not (tmp_path / "profile").exists()
    assert not of("profile", plain)


def test_no_profiler_runs_without_profile_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("a profiler was started")

    monkeypatch.setattr(torch.profiler, "profile", started)
    own = Trainer(profiled_config(tmp_path, "log.profile_steps=null"))
    for _ in own.steps():
        assert own.watchdog.observers == [own.metrics.console.enter_phase], "the status bar alone"
    own.close()


# ---------------------------------------------------------------------------------------------------------------
# The shares of real runs, against another calculation


def capture(monkeypatch: pytest.MonkeyPatch) -> list[torch.profiler.profile]:
    """Return a list that the profilers are going to be in."""
    profilers: list[torch.profiler.profile] = []
    export = torch.profiler.profile.export_chrome_trace

    def captured(self: torch.profiler.profile, *arguments: Any) -> Any:
        profilers.append(self)
        return export(self, *arguments)

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", captured)
    return profilers


@pytest.mark.campaign
def test_shares_against_torchs_own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares llama_small with torch's table, restricted to events within a step because the table has no steps.

    Both read the same recording, so durations do not matter.
    """
    profilers = capture(monkeypatch)
    quiet = ["eval.every=0", "checkpoint.every=0", "log.sample_tokens=0", "train.steps=4", "log.profile_steps=[3,4]"]
    own = Trainer(load_config("llama_small", [*quiet, "run.threads=1", f"run.dir={tmp_path}"]))
    assert own.fit() == 0
    own.close()
    (record,) = of("profile", lines(tmp_path))
    trace = read_trace(tmp_path / "profile" / record["trace"])
    timeline, events = Timeline.from_events(trace), profilers[0].events()
    # The same product in both, as their clocks have not the same beginning.
    first_us = min(event["ts"] for event in trace if event["name"] == "aten::mm")
    shift_us = first_us - min(event.time_range.start for event in events if event.name == "aten::mm")
    total_us = 2e6 * record["update_s"]

    def lies_in(event: Any, ranges: list[tuple[float, float]]) -> bool:
        return any(start <= event.time_range.start < end for start, end in ranges)

    def own_share(found: list[Any]) -> float:
        return sum(event.self_cpu_time_total for event in found) / total_us

    updates = [(update.start_us - shift_us, update.end_us - shift_us) for update in timeline.steps]
    inside = [event for event in events if lies_in(event, updates)]
    products = [event for event in inside if event.name in ("aten::mm", "aten::addmm", "aten::bmm")]
    assert record["matmul"] == pytest.approx(own_share(products), rel=0.01)
    # All that happens within: the copies, too, that an attention makes for itself.
    backward = "autograd::engine::evaluate_function: ScaledDotProductFlashAttentionForCpuBackward0"
    attentions = [event for event in inside if event.name in ("aten::scaled_dot_product_attention", backward)]
    assert record["attention"] == pytest.approx(sum(a.cpu_time_total for a in attentions) / total_us, rel=0.01)
    within = [(event.time_range.start, event.time_range.end) for event in attentions]
    operators = [
        event for event in inside if event.name.startswith(("aten::", "fsdp::")) and not lies_in(event, within)
    ]
    others = own_share(operators) - own_share(products)
    assert record["other_kernels"] == pytest.approx(others, rel=0.01)
    data_us = sum(phase.duration_us for phase in timeline.phases if phase.kind == DATA)
    assert record["data"] == pytest.approx(data_us / total_us, rel=0.01)
    assert record["exposed_communication"] == 0.0


COLLECTIVES = ("all_gather_single", "reduce_scatter_single", "all_gather_into_tensor", "reduce_scatter_tensor",
               "all_reduce")  # fmt: skip
"""What FSDP2 and the Trainer call, in one version of torch or the other."""


def train_with_a_stop_watch(folder: Path) -> dict[int, float]:
    """Train llama_small on this rank; return the seconds that each profiled step was in collectives, by the clock."""
    spent_s: dict[int, float] = Counter()
    is_inside = False

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal is_inside
            counts = not is_inside and own is not None and own.watchdog.phase in PHASES and own.config.log.profiles(
                own.state.step + 1
            )  # fmt: skip
            started, is_inside = time.perf_counter(), is_inside or counts
            try:
                return function(*arguments, **options)
            finally:
                if counts:
                    spent_s[own.state.step + 1] += time.perf_counter() - started
                    is_inside = False

        return call

    own: Trainer | None = None
    for name in COLLECTIVES:
        if hasattr(dist, name):
            setattr(dist, name, timed(getattr(dist, name)))
    work = torch._C._distributed_c10d.Work
    work.wait = timed(work.wait)  # type: ignore[method-assign]
    quiet = ["eval.every=0", "checkpoint.every=0", "log.sample_tokens=0", "train.steps=7", "log.profile_steps=[3,7]"]
    own = Trainer(load_config("llama_small", [*quiet, "run.threads=1", "log.profile_ranks=[1]", f"run.dir={folder}"]))
    for _ in own.steps():
        pass
    own.close()
    return spent_s


PHASES = ("data", "forward", "backward", "reduce", "optimizer")


@pytest.mark.campaign
@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    """A thread that calls a collective waits in it. The trace has the same, without the calls' overhead.

    Compared in the median of five steps: a rank that is briefly descheduled affects only one step.
    """
    spent_s = run_ranks(2, train_with_a_stop_watch, tmp_path)
    assert files(tmp_path) == ["trace_3-7_rank0.json.gz", "trace_3-7_rank1.json.gz"]
    (record,) = of("profile", lines(tmp_path))
    for rank in (0, 1):
        timeline = Timeline.from_events(read_trace(tmp_path / "profile" / f"trace_3-7_rank{rank}.json.gz"))
        missing, ratios = [], []
        for update in timeline.steps:
            by_clock = spent_s[rank][int(update.name)] / (update.duration_us / 1e6)
            found = replace(timeline, steps=[update]).fractions()[COMMUNICATION]
            missing.append(by_clock - found)
            ratios.append(found / by_clock)
        print(f"rank {rank}: less than by the clock by {missing}, ratios {ratios}")
        assert len(missing) == 5
        assert -0.03 < statistics.median(missing) < 0.15
        assert statistics.median(ratios) > 0.5
        fractions_of_all = timeline.fractions()
        assert math.fsum(fractions_of_all.values()) == pytest.approx(1.0, abs=1e-9)
        if rank == 0:
            assert fractions_of_all == pytest.approx({kind: record[kind] for kind in KINDS})


# ---------------------------------------------------------------------------------------------------------------
# Runs that do not get through


@pytest.mark.slow
def test_run_that_ends_within_the_profiled_steps(tmp_path: Path) -> None:
    (record,) = of("profile", fit(tmp_path, "train.steps=4"))
    assert files(tmp_path) == ["trace_3-4_rank0.json.gz"]
    assert updates_in(tmp_path / "profile" / files(tmp_path)[0]) == [3, 4]
    assert (record["first_step"], record["step"]) == (3, 4)


@pytest.mark.campaign
def test_a_run_that_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Within the profiled steps it profiles the rest; after them nothing, with a message."""
    fit(tmp_path, "train.steps=4")
    found = fit(tmp_path, "train.steps=6")
    assert files(tmp_path) == ["trace_3-4_rank0.json.gz", "trace_5-5_rank0.json.gz"]
    assert [(line["first_step"], line["step"]) for line in of("profile", found)] == [(3, 4), (5, 5)]
    capsys.readouterr()
    assert len(of("profile", fit(tmp_path, "train.steps=8"))) == 2
    assert "log.profile_steps=[3,5]: no profile, because the run is already past these steps" in capsys.readouterr().out


@pytest.mark.campaign
def test_run_that_is_too_short_reports_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, "train.steps=2")
    assert "log.profile_steps=[3,5]: no profile, because the run ends earlier, at step 2" in capsys.readouterr().out
    assert not (tmp_path / "profile").exists()


@pytest.mark.campaign
def test_custom_loop_that_is_left_and_continued(tmp_path: Path) -> None:
    own = Trainer(profiled_config(tmp_path))
    for record in own.steps():
        if record.step == 4:
            break
    assert files(tmp_path) == ["trace_3-4_rank0.json.gz"], "nothing of what the user does then"
    assert own.watchdog.observers == [own.metrics.console.enter_phase], "the status bar alone"
    assert [record.step for record in own.steps()] == [5, 6, 7, 8]
    own.close()
    assert files(tmp_path) == ["trace_3-4_rank0.json.gz", "trace_5-5_rank0.json.gz"]


@pytest.mark.campaign
def test_going_back_to_a_checkpoint_ends_the_profile(tmp_path: Path) -> None:
    own = Trainer(profiled_config(tmp_path))
    has_gone_back = False
    for record in own.steps():
        if record.step == 1:
            own.save_checkpoint(wait=True)
        if record.step == 4 and not has_gone_back:
            has_gone_back = True
            own.load_checkpoint()
    own.close()
    assert files(tmp_path) == ["trace_3-4_rank0.json.gz", "trace_3-5_rank0.json.gz"]
    assert updates_in(tmp_path / "profile" / files(tmp_path)[0]) == [3, 4]


class FailsInItsFourthUpdate(Trainer):
    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.state.step == 3:
            raise ArithmeticError("as if")
        return super().loss(batch)


@pytest.mark.campaign
def test_failure_keeps_the_partial_profile(tmp_path: Path) -> None:
    own = FailsInItsFourthUpdate(profiled_config(tmp_path))
    with pytest.raises(ArithmeticError, match="as if"):
        own.fit()
    own.close()
    assert files(tmp_path) == ["trace_3-4_rank0.json.gz"]
    assert updates_in(tmp_path / "profile" / files(tmp_path)[0]) == [3, 4]
    (record,) = of("profile", lines(tmp_path))
    assert record["step"] == 3, "the last step that was through"
    assert not torch.autograd.profiler._is_profiler_enabled


@pytest.mark.campaign
def test_failure_before_the_first_step_ended(tmp_path: Path) -> None:
    own = FailsInItsFourthUpdate(profiled_config(tmp_path, "log.profile_steps=[4,5]"))
    with pytest.raises(ArithmeticError, match="as if"):
        own.fit()
    own.close()
    assert files(tmp_path) == ["trace_4-4_rank0.json.gz"]
    assert of("profile", lines(tmp_path)) == []


@pytest.mark.campaign
def test_failing_start_of_the_profiler_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def taken(self: torch.profiler.profile) -> None:
        raise RuntimeError("as if CUPTI were taken")

    monkeypatch.setattr(torch.profiler.profile, "start", taken)
    found = fit(tmp_path)
    assert "log.profile_steps: the profiler cannot start: as if CUPTI were taken" in capsys.readouterr().err
    assert of("end", found)[0]["step"] == 8
    assert files(tmp_path) == []


def test_no_memory_is_recorded_if_the_profiler_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a stack would be recorded for each allocation until the end of the run."""

    def taken(self: torch.profiler.profile) -> None:
        raise RuntimeError("as if CUPTI were taken")

    history = Mock()
    monkeypatch.setattr(torch.profiler.profile, "start", taken)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", history)
    with pytest.raises(RuntimeError, match="as if"):
        trainer.metrics.profile._Recording(torch.device("cuda"))
    assert not history.called


@pytest.mark.campaign
@pytest.mark.parametrize("cause", ["no space", "no JSON"])
def test_failing_write_of_a_profile_does_not_end_a_run(
    cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    def cut_off(self: torch.profiler.profile, path: str) -> None:
        Path(path).write_text('{"traceEvents": [{"ph": "X", "na')

    if cause == "no space":
        monkeypatch.setattr(trainer.metrics.profile, "gzip", SimpleNamespace(open=full))
    else:
        monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", cut_off)
    found = fit(tmp_path)
    assert "log.profile_steps: the profile cannot be written" in capsys.readouterr().err
    assert files(tmp_path) == []
    assert of("profile", found) == []
    assert of("end", found)[-1]["reason"] == "finished"


@pytest.mark.slow
def test_leftovers_of_a_killed_attempt_are_removed(tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir()
    for name in (".trace_3-5_rank0.json.gz.123", ".trace_3-5_rank1.json.gz.124"):
        (tmp_path / "profile" / name).write_text("half a tr")
    fit(tmp_path)
    assert files(tmp_path) == [".trace_3-5_rank1.json.gz.124", "trace_3-5_rank0.json.gz"], "another rank's is its own"


@pytest.mark.campaign
def test_profile_during_a_different_profiler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.profiler.profile() as theirs:
        found = fit(tmp_path)
    assert "another profiler is already running" in capsys.readouterr().err
    assert of("profile", found) == []
    assert any(row.key == "aten::mm" for row in theirs.key_averages())


def train_with_a_slow_disk(folder: Path) -> int:
    """Take so long to write the profile that the other rank asks why, and keeps waiting."""

    def slow(*arguments: Any, **options: Any) -> Any:
        until = time.monotonic() + 120
        while own.watchdog._num_reports == 0:
            if time.monotonic() > until:
                raise AssertionError("nobody has asked")
            time.sleep(0.1)
        return gzip.open(*arguments, **options)

    trainer.metrics.profile.gzip = SimpleNamespace(open=slow)  # type: ignore[assignment]
    config = profiled_config(folder, "run.step_timeout_s=6", "log.profile_steps=[3,3]", "train.steps=5")
    own = Trainer(config)
    code = own.fit()
    own.close()
    return code


@pytest.mark.campaign
@pytest.mark.slow
def test_other_ranks_wait_for_the_trace_file(tmp_path: Path) -> None:
    assert run_ranks(2, train_with_a_slow_disk, tmp_path) == [0, 0]
    assert files(tmp_path) == ["trace_3-3_rank0.json.gz"]


@pytest.mark.slow
def test_from_the_command_line(tmp_path: Path) -> None:
    """Two ranks with accumulation, a save and an evaluation between the profiled steps; a line on the console."""
    ran = run_tiny(tmp_path / "run", "nproc=2", "train.steps=5", "log.profile_steps=[2,4]", "checkpoint.every=3",
                   "eval.every=3", "eval.steps=1", "data.source=synthetic", "run.threads=1")  # fmt: skip
    (record,) = of("profile", ran.metrics)
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("profiled steps 2 to 4")]
    assert f"matmul {100 * record['matmul']:.1f}%, attention {100 * record['attention']:.1f}%" in line
    assert line.endswith("; trace_2-4_rank0.json.gz")
    assert ran.stdout.count("trace only; memory snapshots need CUDA") == 1
    assert record["exposed_communication"] > 0
    assert files(ran.folder) == ["trace_2-4_rank0.json.gz"]


# ---------------------------------------------------------------------------------------------------------------
# The configuration


@pytest.mark.parametrize(
    ("override", "legal"),
    [
        ("log.profile_steps=[13,10]", "[10,13]"),
        ("log.profile_steps=[0,3]", "[1,3]"),
        ("log.profile_steps=[-4,-2]", "[1,1]"),
        ("log.profile_steps=[10]", "[10,10]"),
        ("log.profile_steps=10", "[10,10]"),
        ("log.profile_steps=[1,2,3]", "[1,2]"),
        ("log.profile_steps=[1.4,3.6]", "[1,4]"),
        ("log.profile_ranks=[0,8]", "[0,7]"),
        ("log.profile_ranks=[-1,2]", "[0,2]"),
        ("log.profile_ranks=3", "[3]"),
    ],
)
def test_rejected_settings(override: str, legal: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(UserError) as refused:
        check_config(load_config("llama_small", [override, "train.micro_batch_size=1"]), 8, 8)
    assert str(refused.value).startswith(f"{override}: must be")
    assert str(refused.value).endswith(f"nearest legal value: '{key}={legal}'")
    check_config(load_config("llama_small", [f"{key}={legal}", "train.micro_batch_size=1"]), 8, 8)


def test_one_step_and_no_steps_are_legal() -> None:
    for value, expected in (("[7,7]", (7, 7)), ("null", None)):
        config = load_config("llama_small", [f"log.profile_steps={value}", "log.profile_ranks=[]"])
        check_config(config, 1, 1)
        assert config.log.profile_steps == expected


# ---------------------------------------------------------------------------------------------------------------
# On a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    (record,) = of("profile", fit(tmp_path, "run.device=cuda"))
    assert files(tmp_path) == ["memory_3-5_rank0.pickle", "trace_3-5_rank0.json.gz"]
    with open(tmp_path / "profile" / record["memory"], "rb") as file:
        snapshot = pickle.load(file)
    assert snapshot["segments"]
    assert any(entry["action"] == "alloc" for entries in snapshot["device_traces"] for entry in entries)
    timeline = Timeline.from_events(read_trace(tmp_path / "profile" / record["trace"]))
    assert {kernel.kind for kernel in timeline.kernels} >= {MATMUL, ATTENTION, OTHER}
    assert all(kernel.launched_us is not None for kernel in timeline.kernels)
    assert math.fsum(record[kind] for kind in KINDS) == pytest.approx(1.0, abs=1e-9)
    assert record["matmul"] > 0


def test_a_record_without_shares_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    from trainer.metrics.console import ConsoleWriter, PlainScreen

    none = dict.fromkeys(KINDS)
    ConsoleWriter(5, PlainScreen(sys.stdout)).write(
        Record(kind="profile", step=5, first_step=3, update_s=0.5, trace="t.gz", memory=None, **none)
    )
    assert "profiled steps 3 to 5, 0.5 s per step under the profiler; t.gz" in capsys.readouterr().out
