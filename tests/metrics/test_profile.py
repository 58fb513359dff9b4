"""Profiles of chosen steps: how their time is divided, the trace for Perfetto, and that training does not change."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

import tests.helpers.tiny
from tests.helpers.launch import merged, run
from tests.helpers.tiny import SEQ_LEN, lines, tiny_config
from trainer import Trainer, UserError, load_config
from trainer.config.rules import check_config
from trainer.metrics.profile import fractions_of, ranges_of_steps
from trainer.metrics.time_breakdown import classify_kernel

KINDS = ("matmul", "attention", "other_kernels", "exposed_communication", "data", "host")
PROFILED = ["train.steps=8", "log.profile_steps=[3,5]"]


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


def steps_in(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the ranges of the profiled steps."""
    found = [event for event in events if event["name"].startswith("ProfilerStep#") and event.get("ph") == "X"]
    return {int(event["name"].partition("#")[2]): event for event in found}


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluation and a save lie between the profiled steps; each step has two micro-batches."""
    folder = tmp_path_factory.mktemp("profile") / "run"
    fit(folder, "eval.every=4", "checkpoint.every=4")
    return folder


@pytest.fixture(scope="module")
def events(profiled: Path) -> list[dict[str, Any]]:
    return read_trace(profiled / "profile" / "trace_3-5_rank0.json.gz")


# ---------------------------------------------------------------------------------------------------------------
# The trace


def test_perfetto_can_open_the_trace(profiled: Path, events: list[dict[str, Any]]) -> None:
    """As in https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU for JSON traces."""
    assert files(profiled) == ["trace_3-5_rank0.json.gz"]
    assert {event["ph"] for event in events} <= set("XMsfi")
    for found in events:
        assert {"name", "pid", "tid", "ts"} <= set(found) or found["ph"] == "M"
        if found["ph"] == "X":
            assert type(found["ts"]) in (int, float)
            assert found["dur"] >= 0


def test_trace_names_steps_and_the_waits_for_their_data(events: list[dict[str, Any]]) -> None:
    steps = steps_in(events)
    assert [*steps] == [3, 4, 5]
    waits = [event for event in events if event["name"] == "waiting for data" and event["ph"] == "X"]
    assert len(waits) == 3
    for step, wait in zip(steps.values(), waits, strict=True):
        assert is_inside(wait, step)


# ---------------------------------------------------------------------------------------------------------------
# The shares


def test_shares_are_those_of_the_trace(profiled: Path, events: list[dict[str, Any]]) -> None:
    """Of matrix products, attention and data, added up here from the trace alone."""
    (record,) = of("profile", lines(profiled))
    assert (record["first_step"], record["step"]) == (3, 5)
    assert (record["trace"], record["memory"]) == ("trace_3-5_rank0.json.gz", None)
    assert math.fsum(record[kind] for kind in KINDS) == pytest.approx(1.0, abs=1e-9)
    assert record["exposed_communication"] == 0.0, "there is one rank"
    steps = [*steps_in(events).values()]
    total_us = sum(step["dur"] for step in steps)
    assert record["update_s"] == pytest.approx(total_us / 3e6)

    def in_a_step(event: dict[str, Any]) -> bool:
        return any(step["ts"] <= event["ts"] < step["ts"] + step["dur"] for step in steps)

    operators = [event for event in events if event.get("cat") == "cpu_op" and in_a_step(event)]
    attention = [
        event
        for event in operators
        if event["name"] == "aten::scaled_dot_product_attention" or "ScaledDotProductFlashAttention" in event["name"]
    ]
    outer = [event for event in attention if not any(is_inside(event, other) for other in attention)]
    assert record["attention"] == pytest.approx(sum(event["dur"] for event in outer) / total_us, rel=0.02)
    products = [
        event
        for event in operators
        if event["name"] in ("aten::mm", "aten::addmm", "aten::bmm") and not any(is_inside(event, o) for o in outer)
    ]
    assert record["matmul"] == pytest.approx(sum(event["dur"] for event in products) / total_us, rel=0.02)
    data = [event for event in events if event["name"] == "waiting for data" and in_a_step(event)]
    assert record["data"] == pytest.approx(sum(event["dur"] for event in data) / total_us, rel=0.05)
    assert min(record["other_kernels"], record["host"]) > 0


def is_inside(event: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether an operator is called by another one on the same thread."""
    end, other_end = event["ts"] + event["dur"], other["ts"] + other["dur"]
    is_same = event is other or event["tid"] != other["tid"]
    return not is_same and other["ts"] <= event["ts"] and end <= other_end


def on_host(name: str, start_us: float, end_us: float, thread: int = 1) -> FunctionEvent:
    return FunctionEvent(0, name, thread, start_us, end_us, trace_name=name, is_user_annotation="::" not in name)


def on_gpu(name: str, start_us: float, end_us: float, is_range: bool = False) -> FunctionEvent:
    kind = {"device_type": DeviceType.CUDA, "is_user_annotation": is_range}
    return FunctionEvent(0, name, 0, start_us, end_us, trace_name=name, **kind)


def shares(events: list[FunctionEvent], *steps: int) -> dict[str, float]:
    """Return the shares that are not zero."""
    tree = EventList(events)
    tree._build_tree()
    found = fractions_of(tree, ranges_of_steps(tree, steps))
    return {kind: share for kind, share in found.items() if share}


def test_shares_on_a_gpu() -> None:
    """Step 4 takes 100 us on the host and until 140 on the GPU; then 20 us of evaluation; step 5 is 160 to 200."""
    events = [
        on_host("ProfilerStep#4", 0, 100),
        on_gpu("ProfilerStep#4", 10, 140, is_range=True),
        on_host("waiting for data", 0, 5),
        on_host("aten::mm", 5, 9),
        on_gpu("nvjet_tst_128x64", 10, 50),
        on_gpu("ncclDevKernel_AllGather_RING_LL", 40, 70),
        on_gpu("void pytorch_flash::flash_bwd_kernel", 70, 140),
        on_gpu("nvjet_tst_64x8", 140, 160),
        on_host("ProfilerStep#5", 160, 200),
        on_host("waiting for data", 160, 170),
        on_host("gloo:all_reduce", 165, 180, thread=2),
        on_gpu("Memcpy HtoD (Pinned -> Device)", 172, 176),
    ]
    assert shares(events, 4, 5) == pytest.approx(
        {
            "matmul": 40 / 180,
            "attention": 70 / 180,
            "other_kernels": 4 / 180,
            "exposed_communication": (20 + 7 + 4) / 180,
            "data": (5 + 5) / 180,
            "host": (5 + 20) / 180,
        }
    )


def test_shares_on_a_cpu() -> None:
    """The thread waits outside operators while Gloo works; operators of other threads do not belong to the step."""
    events = [
        on_host("ProfilerStep#1", 0, 100),
        on_host("waiting for data", 0, 10),
        on_host("aten::stack", 2, 8),
        on_host("aten::matmul", 10, 40),
        on_host("aten::mm", 12, 38),
        on_host("FSDP::all_gather (layers.0)", 40, 70),
        on_host("c10d::_allgather_base_", 40, 45),
        on_host("gloo:all_gather", 44, 65, thread=2),
        on_host("aten::copy_", 60, 70),
        on_host("aten::mm", 70, 90, thread=3),
        on_host("aten::scaled_dot_product_attention", 90, 98),
        on_host("aten::bmm", 92, 96),
        on_host("aten::mm", 100, 120),
    ]
    assert shares(events, 1) == pytest.approx(
        {
            "matmul": 0.26,
            "attention": 0.08,
            "other_kernels": 0.04 + 0.10,  # in a copy it does not wait
            "exposed_communication": 0.20,
            "data": 0.10,
            "host": 0.22,
        }
    )


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("ampere_bf16_s16816gemm_bf16_128x128", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop>", "matmul"),
        ("triton_tem_fused_mm_0", "matmul"),
        ("triton_poi_fused_mm_silu_3", "other_kernels"),
        ("fmha_cutlassF_bf16_aligned_64x64", "attention"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16", "exposed_communication"),
        ("void at::native::vectorized_elementwise_kernel<4>", "other_kernels"),
    ],
)
def test_kind_of_a_kernel(kernel: str, kind: str) -> None:
    assert classify_kernel(kernel) == kind


def test_profile_does_not_change_training(profiled: Path, tmp_path: Path) -> None:
    plain = fit(tmp_path, "log.profile_steps=null", "eval.every=4", "checkpoint.every=4")
    for kind in ("train", "eval"):
        assert [line["loss"] for line in of(kind, plain)] == [line["loss"] for line in of(kind, lines(profiled))]
    assert not (tmp_path / "profile").exists()
    assert not of("profile", plain)


def test_times_of_profiled_steps_are_marked_if_there_are_no_others(profiled: Path, tmp_path: Path) -> None:
    marked = [line["step"] for line in of("train", lines(profiled)) if line.get("profiled")]
    assert marked == [3, 4, 5]
    assert not any("profiled" in line for line in of("train", fit(tmp_path, "log.every=4")))


class Growing(Trainer):
    """Step n has 2n targets, n in each micro-batch."""

    def build_loader(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in itertools.count(2):
            tokens = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN) % 32
            targets = torch.full((2, SEQ_LEN), -100)
            targets.view(-1)[: number // 2] = tokens.view(-1)[: number // 2]
            yield {"tokens": tokens, "targets": targets}


@pytest.mark.campaign
def test_means_are_over_the_steps_that_are_not_profiled(tmp_path: Path) -> None:
    found = tests.helpers.tiny.fit(tmp_path, *PROFILED, "log.every=8", kind=Growing)
    last = of("train", found)[-1]
    assert last["tokens_per_s"] * last["step_s"] == pytest.approx(2 * (2 + 6 + 7 + 8) / 4), "of steps 2 to 8"


@pytest.mark.campaign
def test_two_ranks_from_the_command_line(tmp_path: Path) -> None:
    """With a line on the console. Communication that counts is at most the time in all collectives."""
    own = ["nproc=2", "train.steps=3", "log.profile_steps=[2,3]", "log.profile_ranks=[0,1]", "data.source=synthetic"]
    ran = run(tmp_path / "run", *own)
    (record,) = ran.of_kind("profile")
    (line,) = [line for line in ran.out.splitlines() if line.startswith("profiled steps 2 to 3")]
    for text in (f"{100 * record['matmul']:.1f}%", f"{100 * record['attention']:.1f}%", "trace_2-3_rank0.json.gz"):
        assert text in line
    assert files(ran.folder) == ["trace_2-3_rank0.json.gz", "trace_2-3_rank1.json.gz"]
    assert math.fsum(record[kind] for kind in KINDS) == pytest.approx(1.0, abs=1e-9)
    events = read_trace(ran.folder / "profile" / record["trace"])
    collectives = [event for event in events if re.match("gloo:|_?c10d", event["name"]) and event["ph"] == "X"]
    total_us = sum(step["dur"] for step in steps_in(events).values())
    assert 0 < record["exposed_communication"] <= sum(event["dur"] for event in collectives) / total_us


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    (record,) = of("profile", fit(tmp_path, "run.device=cuda"))
    assert files(tmp_path) == ["memory_3-5_rank0.pickle", "trace_3-5_rank0.json.gz"]
    with open(tmp_path / "profile" / record["memory"], "rb") as file:
        assert pickle.load(file)["segments"]
    assert math.fsum(record[kind] for kind in KINDS) == pytest.approx(1.0, abs=1e-9)
    assert min(record["matmul"], record["attention"], record["other_kernels"]) > 0


# ---------------------------------------------------------------------------------------------------------------
# Runs that do not get through


@pytest.mark.campaign
def test_run_that_is_shorter_and_leftovers_of_a_killed_attempt(tmp_path: Path) -> None:
    """It profiles the steps that there are. Half a trace of this rank is removed; another rank's is its own."""
    (tmp_path / "profile").mkdir()
    for name in (".trace_3-4_rank0.json.gz.123", ".trace_3-4_rank1.json.gz.124"):
        (tmp_path / "profile" / name).write_text("half a tr")
    (record,) = of("profile", fit(tmp_path, "train.steps=4"))
    assert files(tmp_path) == [".trace_3-4_rank1.json.gz.124", "trace_3-4_rank0.json.gz"]
    assert [*steps_in(read_trace(tmp_path / "profile" / record["trace"]))] == [3, 4]
    assert (record["first_step"], record["step"]) == (3, 4)


@pytest.mark.campaign
def test_a_run_that_is_resumed_profiles_the_rest(tmp_path: Path) -> None:
    fit(tmp_path, "train.steps=4")
    found = fit(tmp_path, "train.steps=6")
    assert files(tmp_path) == ["trace_3-4_rank0.json.gz", "trace_5-5_rank0.json.gz"]
    assert [(line["first_step"], line["step"]) for line in of("profile", found)] == [(3, 4), (5, 5)]
    assert len(of("profile", fit(tmp_path, "train.steps=8"))) == 2


class FailsInItsFourthUpdate(Trainer):
    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.state.step == 3:
            raise ArithmeticError("as if")
        return super().loss(batch)


@pytest.mark.campaign
def test_failure_keeps_the_partial_profile(tmp_path: Path) -> None:
    own = FailsInItsFourthUpdate(tiny_config(tmp_path, *PROFILED))
    with pytest.raises(ArithmeticError):
        own.fit()
    own.close()
    (record,) = of("profile", lines(tmp_path))
    assert record["step"] == 3, "the last step that was through"
    assert [*steps_in(read_trace(tmp_path / "profile" / record["trace"]))] == [3, 4]


@pytest.mark.campaign
@pytest.mark.parametrize("method", ["start", "export_chrome_trace"])
def test_failing_profiler_does_not_end_a_run(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("as if")

    monkeypatch.setattr(torch.profiler.profile, method, fail)
    found = fit(tmp_path)
    assert "log.profile_steps: " in capsys.readouterr().err
    assert found[-1]["reason"] == "finished"
    assert files(tmp_path) == []
    assert of("profile", found) == []


@pytest.mark.parametrize(
    ("override", "legal"),
    [
        ("log.profile_steps=[13,10]", "[10,13]"),
        ("log.profile_steps=[0,3]", "[1,3]"),
        ("log.profile_steps=10", "[10,13]"),
        ("log.profile_ranks=[0,8]", "[0,7]"),
        ("log.profile_ranks=3", "[3]"),
    ],
)
def test_rejected_settings(override: str, legal: str) -> None:
    """What the message proposes is accepted."""
    key = override.partition("=")[0]
    with pytest.raises(UserError) as refused:
        check_config(load_config("llama_small", [override, "train.micro_batch_size=1"]), 8, 8)
    assert str(refused.value).startswith(f"{override}: ")
    assert f"{key}={legal}" in str(refused.value)
    check_config(load_config("llama_small", [f"{key}={legal}", "train.micro_batch_size=1"]), 8, 8)
