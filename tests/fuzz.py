"""Random tests of exactness: draws a training task, disturbs it, and compares every step with an undisturbed run.

    python -m tests.fuzz                    # one random seed, which is printed and can be repeated with --seeds
    python -m tests.fuzz --seeds 0-99       # these seeds, one line each
    python -m tests.fuzz --seeds 7 --keep   # keep the seed's folder
    DEFECT=resumed-one-late DEFECT_MARKS=/tmp python -m tests.fuzz    # with a planted defect, which seeds should find

A seed draws a model, data, an optimizer, memory and checkpoint settings, a mesh, and up to three disturbances: one rank
killed, all ranks killed, or a stop request, each after a drawn step. After each disturbance the run is restarted, on
the same mesh or on a different one with a different micro-batch size.

README.md promises what must hold: on the same mesh every loss, gradient norm, learning rate and token count is
bit-identical to the undisturbed run's, and so are all weights and optimizer states at the end.  A run that moves
between meshes agrees within 1e-5 with an undisturbed run on one rank. Each step is in metrics.jsonl exactly once, and
no process is left over.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.helpers.chats import CHATML, conversation, write_tokenizer
from tests.helpers.gate import PATIENCE_S, wait_until
from tests.helpers.launch import Run, command, kill_leftovers, start
from trainer.checkpoint.find import find_checkpoint
from trainer.checkpoint.weights import StoredWeights


@dataclass(frozen=True)
class Mesh:
    """A number of ranks, and their mesh axes."""

    replicate: int = 1
    shard: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard

    @property
    def overrides(self) -> list[str]:
        return [f"mesh.{each.name}={getattr(self, each.name)}" for each in dataclasses.fields(self)]

    def __str__(self) -> str:
        groups = {"context": self.context, "expert": self.expert, "tensor": self.tensor}
        return f"{self.replicate}x{self.shard}" + "".join(f"/{name} {n}" for name, n in groups.items() if n > 1)


MESHES = [Mesh(), Mesh(1, 2), Mesh(2, 1), Mesh(2, 2), Mesh(1, 3), Mesh(1, 4)]
CONTEXT_MESHES = [Mesh(1, 2, 2), Mesh(2, 2, 2), Mesh(1, 4, 2)]
TENSOR_MESHES = [Mesh(1, 2, tensor=2), Mesh(2, 2, tensor=2), Mesh(1, 4, tensor=2)]
EXPERT_MESHES = [Mesh(1, 2, 1, 2), Mesh(2, 2, 1, 2), Mesh(1, 4, 1, 2), Mesh(1, 4, 1, 4)]


@dataclass(frozen=True)
class Disturbance:
    """A disturbance after step `after_step` is in metrics.jsonl, and the mesh of the restart."""

    kind: str
    """`kill one` (rank), `kill all`, or `stop` (SIGTERM to all ranks, as when a job's time ends)."""
    after_step: int
    rank: int
    mesh: Mesh
    micro_batch_size: int

    def __str__(self) -> str:
        return f"{self.kind} after step {self.after_step}, then {self.mesh} x {self.micro_batch_size}"


@dataclass(frozen=True)
class Case:
    """A drawn task and its disturbances."""

    seed: int
    task: str
    overrides: list[str]
    steps: int
    mesh: Mesh
    micro_batch_size: int
    disturbances: list[Disturbance] = field(default_factory=list)
    reference: Mesh = Mesh()
    """The mesh of the undisturbed run; one rank if bits may differ."""

    @property
    def stays_on_its_mesh(self) -> bool:
        """Whether all attempts have the same mesh and micro-batch size, so that all bits must be the same."""
        same = (self.mesh, self.micro_batch_size)
        later = [(each.mesh, each.micro_batch_size) for each in self.disturbances]
        return all(each == same for each in [(self.reference, self.micro_batch_size), *later])

    def arguments(self, mesh: Mesh, micro_batch_size: int) -> list[str]:
        own = [f"train.micro_batch_size={micro_batch_size}", f"nproc={mesh.ranks}"]
        return [*self.overrides, *mesh.overrides, *own]

    def __str__(self) -> str:
        disturbances = "; ".join(map(str, self.disturbances))
        return f"seed {self.seed}: {self.task} on {self.mesh} x {self.micro_batch_size}: {disturbances}"


class Mismatch(AssertionError):
    """The disturbed run differs from the undisturbed one."""


# ---------------------------------------------------------------------------------------------------------------
# Drawing


COMMON = [
    "data.seq_len=32",
    "checkpoint.keep_last=2",
    "log.every=1",
    "log.sample_tokens=0",
    "run.threads=1",
    "run.device=cpu",
    "train.compile=false",
]
MODELS = {
    "llama": ["recipe=llama_small", "model.dim=32", "model.num_layers=2", "model.ffn_dim=64"],
    "gpt2": ["recipe=gpt2", "model.dim=32", "model.num_layers=2", "model.num_heads=4", "model.vocab_size=257"],
    "qwen3": ["recipe=qwen3_small", "model.dim=32", "model.num_layers=2", "model.head_dim=8", "model.ffn_dim=64"],
    "moe": [
        *("recipe=qwen3_moe_small", "model.dim=32", "model.num_layers=2", "model.head_dim=8", "model.expert_dim=16"),
        *("model.num_experts=4", "model.num_chosen=2"),
    ],
}
GLOBAL_BATCH = 24
"""Divides by the ranks of every mesh above and by both micro-batch sizes."""


def draw(seed: int, inputs: Path) -> Case:
    """Return the case of a seed; `inputs` has the data, see `write_inputs`."""
    rng = random.Random(f"fuzz {seed}")
    chance = lambda share: rng.random() < share  # noqa: E731

    kind = rng.choice(["tokens", "text", "mixture", "chat", "dpo", "synthetic"])
    model = rng.choice(["llama", "llama", "gpt2", "qwen3", "moe", "hf"])
    if kind in ("chat", "dpo"):
        model = "folder"
    overrides = list(COMMON)
    if model == "folder":
        overrides += [f"recipe={'dpo' if kind == 'dpo' else 'sft'}", f"model.path={inputs / 'model'}"]
        overrides += ["model.name=hf"] if chance(0.3) else []
        overrides += [f"data.cache_dir={inputs / 'cache'}", "data.seq_len=48", "data.trim_rows=false"]
        overrides += [f"data.path={inputs / ('pairs' if kind == 'dpo' else 'chats')}.jsonl"]
        overrides += ["train.epochs=null"]
    elif model == "hf":
        overrides += ["recipe=llama_small", "model.name=hf", f"model.path={inputs / 'model'}"]
    else:
        overrides += MODELS[model]
    has_documents = kind in ("text", "mixture")
    documents = "joined"
    if kind == "tokens":
        overrides += ["data.source=tokens", f"data.path={inputs / 'shards'}/*.bin"]
    elif kind == "text":
        overrides += ["data.source=tokens", f"data.path={inputs / 'a.jsonl'}", "data.bad=skip"]
    elif kind == "mixture":
        paths = f"{{a: '{inputs / 'a.jsonl'}', b: '{inputs / 'b.jsonl'}'}}"
        overrides += ["data.source=tokens", f"data.path={paths}"]
        if chance(0.5):
            overrides.append("data.phases=[{from: 1, weights: {a: 3, b: 1}}, {from: 7, weights: {a: 1, b: 2}}]")
        else:
            overrides.append("data.weights={a: 2, b: 1}")
    elif kind == "synthetic":
        overrides.append("data.source=synthetic")
    if has_documents:
        overrides.append(f"data.cache_dir={inputs / 'cache'}")
        documents = rng.choice(["joined", "masked", "apart"] if model != "gpt2" else ["joined", "apart"])
        overrides.append(f"data.documents={documents}")

    has_lora = chance(0.6 if model == "folder" else 0.15) and model != "moe"
    dropout = has_lora and chance(0.3)
    if has_lora:
        overrides += ["lora.rank=4"] + ["lora.dropout=0.1"] * dropout
        overrides += [f"train.init_from={inputs / 'model'}"] * (model == "llama")
    if model != "folder":  # whose data are made of the model's own tokens
        overrides.append("checkpoint.allow_changes=[data.tokenizer]")
    optimizer = rng.choice(["adamw", "adamw", "adamw", "sgd", "muon"])
    if has_lora:
        optimizer = "adamw"
    overrides += [f"optim.name={optimizer}", f"optim.lr={ {'adamw': 1e-3, 'sgd': 1e-2, 'muon': 1e-3}[optimizer] }"]
    overrides += ["optim.muon.dtype=float32"] * (optimizer == "muon")
    overrides += [f"optim.weight_decay={rng.choice([0.0, 0.1])}", f"optim.max_grad_norm={rng.choice([0.1, 1.0])}"]
    overrides += [f"schedule.name={rng.choice(['cosine', 'linear', 'wsd', 'constant'])}"]
    overrides += [f"schedule.warmup_steps={rng.choice([0, 3])}", "schedule.warmup_ratio=0"]
    ema = chance(0.25)
    overrides += ["train.ema=0.9"] * ema
    overrides += ["train.activation_checkpoint=" + rng.choice(["none", "none", "full", "selective", "1"])]
    overrides += ["fsdp.reshard_after_forward=" + rng.choice(["default", "always", "never"])]
    low = chance(0.15)
    overrides += ["fsdp.param_dtype=bfloat16" if low else "fsdp.param_dtype=float32"]
    overrides += [f"checkpoint.mode={rng.choice(['async', 'async', 'sync'])}"]
    overrides += [f"checkpoint.every={rng.randint(2, 6)}", f"data.num_workers={int(chance(0.2))}"]
    evaluates = chance(0.3) and kind in ("synthetic", "text")
    overrides += ["eval.every=5", "eval.steps=1"] if evaluates else ["eval.every=0"]
    overrides += ["data.holdout=0.2"] if evaluates and kind == "text" else []
    steps = rng.randint(12, 24)
    overrides += [f"train.steps={steps}", f"train.global_batch_size={GLOBAL_BATCH}", f"run.seed={rng.randint(0, 99)}"]

    context = kind in ("tokens", "text", "synthetic") and model in ("llama", "qwen3") and documents == "joined"
    meshes = MESHES + (CONTEXT_MESHES if context and not has_lora else []) + EXPERT_MESHES * (model == "moe")
    meshes += TENSOR_MESHES * (model in ("llama", "gpt2", "qwen3"))
    mesh, micro_batch_size = rng.choice(meshes), rng.choice([1, 2])
    # Only fp32 without dropout is promised to agree between meshes.  Which experts a token goes to is decided by
    # comparing, so that the last bit can change a whole token's output.
    moves = chance(0.5) and not (low or dropout or model == "moe")
    disturbances = []
    for after in sorted(rng.sample(range(1, steps - 2), rng.randint(1, 3))):
        then = (rng.choice(meshes), rng.choice([1, 2])) if moves else (mesh, micro_batch_size)
        before = disturbances[-1].mesh if disturbances else mesh
        kind_of_disturbance = rng.choice(["kill one", "kill all", "kill all", "stop"])
        disturbances.append(Disturbance(kind_of_disturbance, after, rng.randrange(before.ranks), *then))
    extras = [optimizer, *["lora"] * has_lora, *["dropout"] * dropout, *["ema"] * ema, *["bf16"] * low, documents]
    task = f"{model} on {kind}, {', '.join(extras)}, {steps} steps"
    reference = Mesh() if moves else mesh
    return Case(seed, task, overrides, steps, mesh, micro_batch_size, disturbances, reference)


def write_inputs(folder: Path) -> Path:
    """Write the inputs of the tasks: token shards, two text files, chats, preference pairs, a model with weights."""
    rng = random.Random("material")
    words = ["Hi", "Yes", "No", "two", "four", "Bye", "so", "now"]
    folder.mkdir(parents=True, exist_ok=True)
    for name, number in (("a", 300), ("b", 120)):
        lines = [{"text": " ".join(rng.choices(words, k=rng.randint(1, 30)))} for _ in range(number)]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    command("trainer.prepare", folder / "a.jsonl", "--out", folder / "shards" / "a")
    chats = [conversation(*(" ".join(rng.choices(words, k=rng.randint(1, 4))) for _ in range(2))) for _ in range(60)]
    (folder / "chats.jsonl").write_text("".join(f"{json.dumps({'messages': chat})}\n" for chat in chats))
    answers = [[{"role": "assistant", "content": text}] for text in words]
    pairs = [
        {"prompt": conversation(" ".join(rng.choices(words, k=2))), "chosen": chosen, "rejected": rejected}
        for chosen, rejected in (rng.sample(answers, 2) for _ in range(60))
    ]
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))

    write_tokenizer(folder / "model", CHATML, eos_token="<|im_end|>")
    torch.manual_seed(1)
    settings = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        eos_token_id=2,
    )
    transformers.LlamaForCausalLM(settings).save_pretrained(folder / "model")
    return folder


# ---------------------------------------------------------------------------------------------------------------
# Running


def run_case(case: Case, folder: Path) -> int:
    """Run a case; return how many of its disturbances were applied before the run had ended.  Raises Mismatch."""
    undisturbed = start(folder / "undisturbed", *case.arguments(case.reference, case.micro_batch_size))
    _finish(undisturbed, "the undisturbed run")
    mesh, micro_batch_size, num_applied, pids = case.mesh, case.micro_batch_size, 0, [*undisturbed.pids]
    for disturbance in case.disturbances:
        started = start(folder / "disturbed", *case.arguments(mesh, micro_batch_size))
        num_applied += _disturb(started, disturbance)
        mesh, micro_batch_size = disturbance.mesh, disturbance.micro_batch_size
        pids += started.pids
    last = start(folder / "disturbed", *case.arguments(mesh, micro_batch_size))
    _finish(last, f"after {case.disturbances[-1]}")
    wait_until(lambda: not left_over([*pids, *last.pids]), "all processes have ended")
    compare(undisturbed, last, case)
    return num_applied


def left_over(pids: Sequence[int]) -> list[int]:
    """Return the processes in the sessions of these ranks, which the workers of their loaders share."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session, *_ = path.read_text().rpartition(")")[2].split()
            if int(session) in pids and state != "Z":
                found.append(int(path.parent.name))
    return found


def _finish(started: Run, attempt: str) -> None:
    started.wait()
    if set(started.codes) != {0}:
        raise Mismatch(f"{attempt}: exit codes {started.codes}\n{started.err}")


def _disturb(started: Run, disturbance: Disturbance) -> bool:
    """Wait for the step, disturb the run, and wait until all ranks have ended; False if the run ended first."""
    deadline = time.monotonic() + PATIENCE_S
    while _last_step(started) < disturbance.after_step and None in started.codes:
        if time.monotonic() > deadline:
            started.kill()
            raise Mismatch(f"step {disturbance.after_step} was not reached\n{started.err}")
        time.sleep(0.005)
    was_running = set(started.codes) == {None}
    if disturbance.kind == "stop":
        started.signal(signal.SIGTERM)
    elif disturbance.kind == "kill all":
        started.kill()
    else:
        started.kill(disturbance.rank)
    codes = started.wait().codes
    if disturbance.kind == "stop" and not set(codes) <= {0, 75, -signal.SIGTERM}:  # the last: before Python listens
        raise Mismatch(f"{disturbance}: exit codes {codes}\n{started.err}")
    if 2 in codes:
        raise Mismatch(f"refused: {started.err}")
    return was_running


def _last_step(run: Run) -> int:
    return max((line["step"] for line in run.of_kind("train")), default=0)


def compare(undisturbed: Run, disturbed: Run, case: Case) -> None:
    """Raise Mismatch where the two runs differ by more than is promised."""
    exact = case.stays_on_its_mesh
    for run in (undisturbed, disturbed):
        if run.train("step") != list(range(1, case.steps + 1)):
            raise Mismatch(f"{run.folder.name} has the steps {run.train('step')}, not 1 to {case.steps} once each")
    fields = sorted({name for line in undisturbed.metrics for name in line})
    names = [name for name in fields if name in ("loss", "grad_norm", "lr", "tokens")]
    names += [name for name in fields if name.startswith(("loss_", "epoch_"))]
    for kind in ("train", "eval"):
        pairs = undisturbed.of_kind(kind), disturbed.of_kind(kind)
        if len(pairs[0]) != len(pairs[1]):
            raise Mismatch(f"{len(pairs[0])} lines of kind {kind} in the undisturbed run, {len(pairs[1])} in the other")
        for one, other in zip(*pairs, strict=True):
            for name in names:
                tolerance = 0.0 if exact or name in ("lr", "tokens") else 1e-4 if name == "grad_norm" else 1e-5
                if not _agree(one.get(name), other.get(name), tolerance):
                    where = f"{kind} {name} at step {one['step']}"
                    raise Mismatch(f"{where}: {one.get(name)!r} undisturbed, {other.get(name)!r} disturbed")
    if exact:
        differing = _differing_tensors(undisturbed, disturbed, case.steps)
        if differing:
            raise Mismatch(f"tensors that differ after the last step: {', '.join(differing[:5])}")


def _agree(one: Any, other: Any, tolerance: float) -> bool:
    if one is None or other is None or not tolerance:
        return one == other
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-7)


def _differing_tensors(undisturbed: Run, disturbed: Run, step: int) -> list[str]:
    """Return the weights and optimizer states that are not bit-identical in the checkpoints of a step."""
    paths = [run.checkpoints / f"step_{step:08d}" for run in (undisturbed, disturbed)]
    weights = [StoredWeights(find_checkpoint(str(path))) for path in paths]
    first, second = weights
    names = {*first.layout, *second.layout}
    return [
        name
        for name in sorted(names)
        if name not in first.layout
        or name not in second.layout
        or not torch.equal(first.read_stored(name), second.read_stored(name))
    ]


# ---------------------------------------------------------------------------------------------------------------
# The command


def main(argv: Sequence[str] | None = None) -> int:
    """Run seeds; return 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", default="", help="such as 7, 0-99 or 3,8,20-29 (default: one, a random one)")
    parser.add_argument("--keep", action="store_true", help="keep the folders of the runs")
    parser.add_argument("--inputs", type=Path, help="a folder for the data, to use it again")
    chosen = parser.parse_args(argv)
    seeds = parse_seeds(chosen.seeds) if chosen.seeds else [random.SystemRandom().randrange(10**6)]
    root = Path(tempfile.mkdtemp(prefix="fuzz-"))
    inputs = chosen.inputs or root / "inputs"
    if not (inputs / "pairs.jsonl").exists():
        write_inputs(inputs)
    failed = []
    for seed in seeds:
        case = draw(seed, inputs)
        folder = root / str(seed)
        folder.mkdir()
        since = time.monotonic()
        try:
            num_applied = run_case(case, folder)
        except (Mismatch, AssertionError) as error:
            failed.append(seed)
            print(f"FAILED {case}\n  {shlex.join(case.arguments(case.mesh, case.micro_batch_size))}\n{error}")
        else:
            how = "bit-identical" if case.stays_on_its_mesh else "within 1e-5"
            print(
                f"{how:13} {case} ({num_applied} of {len(case.disturbances)} applied, {time.monotonic() - since:.0f} s)"
            )
        sys.stdout.flush()
        if not chosen.keep and seed not in failed:
            shutil.rmtree(folder, ignore_errors=True)
    kill_leftovers()
    if not (failed or chosen.keep):
        shutil.rmtree(root, ignore_errors=True)
    print(f"{len(seeds) - len(failed)} of {len(seeds)} seeds passed" + (f"; look at {root}" if failed else ""))
    return 1 if failed else 0


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of "3,8,20-29"."""
    seeds = []
    for item in text.split(","):
        first, _, last = item.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    return seeds


if __name__ == "__main__":
    sys.exit(main())
