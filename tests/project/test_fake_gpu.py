"""The trainer on fake GPUs: the host's code for a GPU runs, and every kernel compiles."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.fake_gpu import SOURCES, Stand, find_stand
from tests.helpers.gate import wait_until
from tests.helpers.launch import launch, merged, tiny

pytestmark = pytest.mark.campaign
OWN = ["run.device=cuda", "data.source=synthetic", "train.steps=6", "eval.every=0"]
BF16 = ["fsdp.param_dtype=bfloat16", "train.weights_dtype=bfloat16", "optim.state_dtype=bfloat16"]


@pytest.fixture(scope="module")
def stand() -> Stand:
    found = find_stand()
    if isinstance(found, str):
        pytest.skip(found)
    return found


def arguments(folder: Path, *overrides: str) -> list[str]:
    given = tiny(*merged(OWN, overrides))
    return ["-m", "trainer.run", "recipe=llama_small", *given, f"run.dir={folder / 'run'}"]


def records(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


MESHES = {"1": ["nproc=1"], "2x2": ["nproc=4", "mesh.replicate=2"]}
OPTIONS: dict[str, list[str]] = {
    "plain": ["train.compile=false"],
    "accumulated, evaluated": ["train.global_batch_size=16", "eval.every=3", "eval.steps=1", "train.compile=false"],
    "bf16, compiled": BF16,
    "bf16 throughout": [*BF16, "fsdp.reduce_dtype=bfloat16", "train.global_batch_size=16"],
    "float8": ["train.float8=tensorwise", "fsdp.param_dtype=bfloat16", "model.dim=64", "model.num_heads=4"],
    "offloaded": ["train.offload_activations=1", "train.compile=false", "model.num_layers=4", "data.seq_len=256"],
    "in order": ["run.deterministic=true", "train.compile=false"],
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("option", OPTIONS)
def test_training_saving_and_resuming_on_fake_gpus(stand: Stand, mesh: str, option: str, tmp_path: Path) -> None:
    own = [*MESHES[mesh], *OPTIONS[option], "checkpoint.every=2", "checkpoint.mode=async"]
    for steps in (4, 6):
        ran = stand.run(*arguments(tmp_path, *own, f"train.steps={steps}"), FAKE_GPUS=mesh.replace("2x2", "4"))
        assert ran.returncode == 0, ran.stdout + ran.stderr
    kinds = [record["kind"] for record in records(tmp_path)]
    assert kinds.count("train") == 6
    (_, again) = [record for record in records(tmp_path) if record["kind"] == "start"]
    assert again["resumed_step"] == 4
    assert again["device"] == "NVIDIA H200"


TINY_MIXTURE = [
    *("model.balance=0", "model.num_layers=2", "model.dim=32", "model.num_heads=4", "model.head_dim=8"),
    *("model.expert_dim=24", "model.num_experts=4", "model.num_chosen=2", "data.source=synthetic", "data.seq_len=32"),
    *("train.global_batch_size=8", "train.micro_batch_size=1", "schedule.warmup_steps=5", "run.threads=1"),
    *("eval.every=0", "log.every=1", "log.sample_tokens=0"),
]
COMPILED = [*BF16, "model.vocab_size=32768", "data.seq_len=4096", "train.global_batch_size=2"]


def test_kernels_compile_once_and_are_lean(stand: Stand, tmp_path: Path) -> None:
    """No graph is compiled after the second step, the host does not wait, and each kernel is compiled for the GPU."""
    cache = tmp_path / "triton"
    overrides = [*tiny(*merged(OWN, COMPILED)), f"run.dir={tmp_path / 'run'}"]
    variables = {"TRITON_CACHE_DIR": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    ran = stand.run(str(SOURCES / "kernels.py"), str(cache), *overrides, **variables)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    print(found["torch"], found["graphs"], *sorted(found["kernels"].items()), sep="\n")
    assert found["graphs"][1] == found["graphs"][-1]
    updates = [count for name, count in found["kernels"].items() if "bitwise_xor" in name or "mix" in name]
    assert updates
    assert min(updates) <= 95  # of the block sizes that are tried, the largest; the smaller ones begin more often
    loss = [name for name in found["kernels"] if "logsumexp" in name or "arange_copy_copy" in name]
    assert len({name.split()[0] for name in loss}) <= 3


@pytest.mark.parametrize("compiles", ["false", "true"])
def test_weights_are_unpacked_by_one_kernel(stand: Stand, compiles: str, tmp_path: Path) -> None:
    """It compiles for the GPU, nothing waits for it, and its values, in Triton's interpreter, are the CPU's."""
    from tests.helpers.hf_models import folder_of

    base, cache = folder_of(tmp_path / "base", "llama", hidden_size=64, intermediate_size=192), tmp_path / "triton"
    own = [f"train.init_from={base}", "lora.rank=4", "lora.base_dtype=nf4", "fsdp.param_dtype=bfloat16"]
    shaped = tiny(*merged(OWN, [*own, f"train.compile={compiles}"]))
    overrides = [item for item in shaped if not item.startswith("model.")]
    variables = {"TRITON_CACHE_DIR": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    ran = stand.run(str(SOURCES / "kernels.py"), str(cache), *overrides, f"run.dir={tmp_path / 'run'}", **variables)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["graphs"][1] == found["graphs"][-1]
    (unpacking,) = [count for name, count in found["kernels"].items() if name.startswith("_unpack ")]
    print(f"{unpacking:.1f} instructions a weight")
    assert unpacking <= 20
    (code,) = [path.read_text() for path in cache.rglob("_unpack.ptx")]
    assert "cvt.rn.bf16" in code, "rounded to nearest, as on the CPU"
    ran = stand.run(str(SOURCES / "unpacking.py"), TRITON_INTERPRET="1", LD_PRELOAD="")
    assert ran.returncode == 0, ran.stdout + ran.stderr


OPTIMIZERS: dict[str, list[str]] = {
    "adamw": [],
    "muon": ["optim.name=muon"],
    "normuon": ["optim.name=muon", "optim.muon.variant=normuon"],
    "small buckets": ["optim.name=muon", "optim.muon.bucket_mib=0.01"],
}


@pytest.mark.parametrize("mesh", ["1", "2x2"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_lines_make_the_host_wait_for_nothing(stand: Stand, optimizer: str, mesh: str, tmp_path: Path) -> None:
    """Only for the event of a step whose successor is queued, which torch does not complain of."""
    ranks = {"1": 1, "2x2": 4}[mesh]
    common = ["train.compile=false", "log.every=1", "train.global_batch_size=4", "train.micro_batch_size=1"]
    replicate = ["mesh.replicate=2"] if mesh == "2x2" else []
    own = [*merged(OWN, [*common, *replicate, *OPTIMIZERS[optimizer]]), f"run.dir={tmp_path / 'run'}"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    ran = stand.run(*torchrun, str(SOURCES / "lines.py"), *tiny(*own), FAKE_GPUS=str(ranks))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = [record for record in records(tmp_path) if record["kind"] == "train"]
    assert len(lines) == 6
    assert all({"own", "rows"} <= record.keys() for record in lines)


BY_METHOD: dict[str, tuple[list[str], int]] = {
    "exchange": (["mesh.expert_method=exchange", "train.compile=false"], 1),
    "exchange, recomputed": (
        ["mesh.expert_method=exchange", "train.compile=false", "train.activation_checkpoint=full"],
        2,
    ),
    "gather": (["mesh.expert_method=gather", "train.compile=false"], 0),
    "gather, compiled": (["mesh.expert_method=gather", "train.compile=true"], 0),
}
"""Settings, and how often the host waits in each layer and micro-batch."""


@pytest.mark.parametrize("method", BY_METHOD)
def test_experts_that_ranks_share_out(stand: Stand, method: str, tmp_path: Path) -> None:
    """Training, saving and resuming by both methods; only an exchange makes the host wait, for its numbers of rows."""
    ranks = 2
    overrides, num_waits = BY_METHOD[method]
    common = [*TINY_MIXTURE, *BF16, "run.device=cuda", "checkpoint.every=2", "checkpoint.mode=async", *overrides]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    for steps in (4, 6):
        own = merged(common, [f"mesh.expert={ranks}", f"train.steps={steps}", f"run.dir={tmp_path / 'run'}"])
        command = [*torchrun, str(SOURCES / "waits.py"), "qwen3_moe_small", *own]
        ran = stand.run(*command, FAKE_GPUS=str(ranks))
        assert ran.returncode == 0, ran.stdout + ran.stderr
        if steps == 4:
            (waits,) = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
            print(method, ranks, waits)
            assert sum(waits.values()) == num_waits * 2 * (8 // ranks), "of two layers, in each micro-batch"
    assert [record["resumed_step"] for record in records(tmp_path) if record["kind"] == "start"] == [None, 4]


def test_signal_ends_a_run_with_exit_code_75(stand: Stand, tmp_path: Path) -> None:
    command = stand.command(arguments(tmp_path, "train.steps=100000", "train.compile=false"))
    started = launch(command, tmp_path / "run", stand.environment())
    wait_until(lambda: len(started.train("step")) > 3, "it trains")
    started.signal(signal.SIGTERM)
    assert started.wait().code == 75


def test_hanging_gpu_is_named(stand: Stand, tmp_path: Path) -> None:
    own = ["nproc=2", "train.compile=false", "run.step_timeout_s=4", "train.steps=100"]
    ran = stand.run(*arguments(tmp_path, *own), FAKE_GPUS="2", FAKE_GPU_HANGS_AFTER="6")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "made no progress" in ran.stderr
    assert (tmp_path / "run" / "collectives_rank_0").stat().st_size > 0
    assert (tmp_path / "run" / "collectives_rank_1").stat().st_size > 0


def test_memory_that_cannot_be_page_locked_is_still_copied(stand: Stand, tmp_path: Path) -> None:
    own = ["checkpoint.every=2", "checkpoint.mode=async", "train.compile=false"]
    ran = stand.run(*arguments(tmp_path, *own), FAKE_GPU_REFUSES_LOCKING="1")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stderr.count("cannot be page-locked") == 1


WRAPPER = """import os, runpy, sys
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"] if sys.argv[1] == "each" else "0"
sys.argv = sys.argv[1:]
runpy.run_module("trainer.run", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("launcher", "gpus", "ends"),
    [("nproc", "1", 2), ("torchrun", "1", 1), ("torchrun each", "2", 0), ("torchrun same", "2", 1)],
)
def test_one_gpu_and_two_ranks(stand: Stand, launcher: str, gpus: str, ends: int, tmp_path: Path) -> None:
    """Valid if each rank sees a different GPU; otherwise one message. torchrun turns every failure into exit code 1."""
    rest = arguments(tmp_path, "train.compile=false")[2:]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(WRAPPER)
    commands = {
        "nproc": ["-m", "trainer.run", *rest, "nproc=2"],
        "torchrun": [*torchrun, "-m", "trainer.run", *rest],
        "torchrun each": [*torchrun, str(wrapper), "each", *rest],
        "torchrun same": [*torchrun, str(wrapper), "same", *rest],
    }
    ran = stand.run(*commands[launcher], FAKE_GPUS=gpus)
    assert ran.returncode == ends, ran.stdout + ran.stderr
    assert ran.stderr.count("error: ") == (ends != 0)
