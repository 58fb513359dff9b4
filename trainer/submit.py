"""Submit a run to a cluster as a job generated from the recipe, or run it on this machine.

    meshtrainer submit slurm recipe=llama3_8b mesh.shard=node        sbatch
    meshtrainer submit k8s --image REGISTRY/IMAGE recipe=llama3_8b   kubectl apply of a JobSet
    meshtrainer submit local recipe=llama_small                      run here, by default on all GPUs
    meshtrainer submit slurm --dry-run recipe=llama3_8b > my.sbatch  only print the job

On a cluster, --nodes sets the number of nodes.  Without it, mesh.replicate and mesh.shard determine the number if both
are fixed.  Otherwise it is the smallest power of two at which the planner predicts that the run fits in memory, or 1
with run.device=cpu.

Settings are checked before the job is submitted.  A cluster job saves a checkpoint when it is warned of a preemption or
of its time limit, and resumes from that checkpoint when the cluster starts it again.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from trainer.config import RunConfig, check_config, load_config
from trainer.config.command_line import Arguments, missing_recipe_error, parse
from trainer.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    CommandParser,
    UserError,
    print_stderr,
    print_stdout,
    run_command,
    setting_error,
)
from trainer.recipe import add_working_directory_to_sys_path

_USAGE = "usage: meshtrainer submit slurm|k8s|local recipe=NAME [section.key=value ...]"
_MAX_NODES = 512
"""The largest number of nodes that the planner tries if neither --nodes nor the mesh determines the number."""


@dataclass(frozen=True)
class ClusterJob:
    """What is needed to submit a run: the arguments of `trainer.run`, and the resources of the cluster job."""

    name: str
    arguments: Sequence[str]
    """Arguments of `trainer.run`: the recipe and the overrides, including run.dir except in a job array."""
    num_nodes: int
    gpus_per_node: int
    """0 for a run on CPUs."""
    ranks_per_node: int
    cpus_per_rank: int
    time: str
    """Time limit, HH:MM:SS."""
    python: str
    """The Python executable of a Slurm job."""
    scheduler_options: Sequence[str] = ()
    """Additional scheduler options, such as `--account=mine`."""


# ---------------------------------------------------------------------------------------------------------------
# Slurm


def batch_file(job: ClusterJob, array: str = "", setup: Sequence[str] = (), extra_arguments: str = "") -> str:
    """Return the batch file of a job.

    array: the task numbers and limit of a job array, such as `0-5%2`.
    setup: lines of bash before the command.
    extra_arguments: further arguments of the run, in bash syntax.
    """
    name = re.sub(r"[^\w.+-]+", "-", job.name)
    resources = f"--nodes={job.num_nodes} --ntasks-per-node={job.ranks_per_node}"
    resources += f" --gpus-per-node={job.gpus_per_node}" if job.gpus_per_node else ""
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={name}",
        *([f"#SBATCH --array={array}"] if array else []),
        f"#SBATCH {resources} --cpus-per-task={job.cpus_per_rank}",
        f"#SBATCH --time={job.time} --signal=B:USR1@300",
        f"#SBATCH --requeue --open-mode=append --output={'%x-%A_%a.log' if array else '%x-%j.log'}",
        *(f"#SBATCH {option}" for option in job.scheduler_options),
        *setup,
        "# Signals stay blocked until Python has installed its handlers, so that an early notice is not lost.",
        f"exec env --block-signal=USR1,TERM {shlex.quote(job.python)} -m trainer.slurm \\",
        f"  {shlex.join(job.arguments)} {extra_arguments}".rstrip(),
    ]
    return "\n".join(lines) + "\n"


def send_to_slurm(text: str) -> int:
    """Submit a batch file with sbatch, print the job's number, and return the exit code."""
    return _pipe_to(["sbatch"], text, "submit on a machine that has Slurm's commands, or use --dry-run")


# ---------------------------------------------------------------------------------------------------------------
# Kubernetes


@dataclass(frozen=True)
class Pod:
    """Settings of a Kubernetes job's pods: the container image and the volume."""

    image: str
    claim: str
    """The persistent volume claim for data and runs."""
    mount: str
    """The mount path of the volume in the container."""


def job_set(job: ClusterJob, pod: Pod) -> dict[str, Any]:
    """Return a job's JobSet (https://jobset.sigs.k8s.io, 0.6 or later); launch/kubernetes.yaml explains its entries."""
    name = _dns_label(job.name)
    arguments = shlex.join(job.arguments)
    command = (
        f'set -- {arguments}; python -m trainer.run "$@" --print-config || exit; '
        f"exec torchrun --nnodes={job.num_nodes} --nproc-per-node={job.ranks_per_node} --rdzv-backend=c10d "
        f'--rdzv-id="{name}-$ATTEMPT" --rdzv-endpoint={name}-node-0-0.{name}:29500 -m trainer.run "$@"'
    )
    limits: dict[str, Any] = (
        {"nvidia.com/gpu": job.gpus_per_node} if job.gpus_per_node else {"cpu": job.ranks_per_node * job.cpus_per_rank}
    )
    attempt = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
    container = {
        "name": "trainer",
        "image": pod.image,
        "env": [
            {"name": "ATTEMPT", "valueFrom": {"fieldRef": {"fieldPath": attempt}}},
            {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": "570"},
        ],
        "command": ["bash", "-c"],
        "args": [command],
        "resources": {"limits": limits},
        "volumeMounts": [{"name": "data", "mountPath": pod.mount}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 600,
        "containers": [container],
        "volumes": [
            {"name": "data", "persistentVolumeClaim": {"claimName": pod.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    mistake = {"action": "FailJob", "onExitCodes": {"containerName": "trainer", "operator": "In", "values": [2]}}
    template = {
        "spec": {
            "parallelism": job.num_nodes,
            "completions": job.num_nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "activeDeadlineSeconds": _seconds(job.time),
            "podFailurePolicy": {"rules": [mistake]},
            "template": {"spec": spec},
        }
    }
    rule = {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": {"maxRestarts": 20, "rules": [rule]},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": template}],
        },
    }


# ---------------------------------------------------------------------------------------------------------------
# The size of a job


def find_num_nodes(config: RunConfig, ranks_per_node: int, device: str) -> int:
    """Return the number of nodes for a run: from its mesh if that has fixed sizes, else the fewest on which it fits.

    Only powers of two are tried.  Without a fixed mesh, a run on CPUs gets one node.  Raises UserError if the mesh does
    not fill its nodes, or if the run does not fit on any number of nodes up to `_MAX_NODES`.
    """
    replicate, shard = config.mesh.replicate, config.mesh.shard
    if shard == "node":
        shard = ranks_per_node
    if isinstance(shard, int) and replicate > 0 and shard > 0:
        ranks = replicate * shard
        if replicate * shard > ranks_per_node and ranks % ranks_per_node:
            rule = f"mesh.replicate x mesh.shard is {ranks}, which does not fill nodes of {ranks_per_node} ranks"
            raise setting_error("--gpus", ranks_per_node, rule)
        if config.mesh.shard != "node" or replicate > 1:
            return max(1, ranks // ranks_per_node)
    if device == "cpu":
        return 1
    return _fewest_nodes(config, ranks_per_node, device)


def _fewest_nodes(config: RunConfig, ranks_per_node: int, device: str) -> int:
    from trainer.config import resolve_context_method
    from trainer.plan.machine import find_machine
    from trainer.plan.plan import make_plan, without_data
    from trainer.plan.search import NothingFits, fastest_choice, uses_auto

    machine = find_machine(device, config.run.memory_gib, ranks_per_node)
    first_mistake: UserError | None = None
    is_too_large = False
    num_nodes = 1
    while num_nodes <= _MAX_NODES:
        ranks = num_nodes * ranks_per_node
        try:
            mesh = check_config(without_data(config), ranks, ranks_per_node)
            resolved = resolve_context_method(without_data(config), ranks_per_node)
            plan = fastest_choice(resolved, mesh, machine).plan if uses_auto(resolved) else None
            if (plan or make_plan(resolved, mesh, machine)).fits:
                print_stderr(
                    f"{num_nodes} x {ranks_per_node} {machine.name}: the smallest of 1, 2, 4, ... nodes on which "
                    "the planner says the run fits"
                )
                return num_nodes
            is_too_large = True
        except NothingFits:
            is_too_large = True
        except UserError as mistake:  # the settings do not work with this number of ranks
            first_mistake = first_mistake or mistake
        num_nodes *= 2
    if first_mistake is not None and not is_too_large:
        raise first_mistake
    rule = f"the run does not fit in memory on any number of nodes up to {_MAX_NODES} that its settings allow"
    raise setting_error(
        "--nodes", "auto", rule, fix="see python -m trainer.plan recipe=NAME ranks=N, then give --nodes"
    )


# ---------------------------------------------------------------------------------------------------------------
# From a command line to a job


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that set a job's size and limits."""
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="nodes (default: from the mesh, or the fewest on which it fits)"
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs per node (default: 8; 0 with run.device=cpu)")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks per node (default: its GPUs, or 1 on CPUs)")
    parser.add_argument("--cpus", type=int, default=12, metavar="N", help="CPUs per rank (default: 12)")
    parser.add_argument("--time", default="24:00:00", help="time limit, HH:MM:SS (default: 24:00:00)")
    parser.add_argument("--device", default="h100", help="GPU that the planner assumes (default: h100)")
    parser.add_argument("--python", default=sys.executable, help="Python for the job on Slurm (default: this one)")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="OPTION",
        help="an additional #SBATCH option: --option=--account=me",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the job instead of submitting it")


def make_job(options: argparse.Namespace, arguments: Arguments, volume: str | None = None) -> ClusterJob:
    """Return the job for a command line, after checking its settings.  Raises UserError.

    volume: mount path of the volume for runs; None if the job uses this machine's file system.
    """
    if arguments.recipe is None:
        raise missing_recipe_error(_USAGE, arguments.overrides)
    if arguments.nproc is not None:
        raise setting_error("nproc", arguments.nproc, "does not apply to a job; use --nodes and --gpus instead")
    config = load_config(arguments.recipe, arguments.overrides, arguments.allow_import, needs_weights=False)
    is_cpu = config.run.device == "cpu"
    gpus = (0 if is_cpu else 8) if options.gpus is None else options.gpus
    ranks = (gpus or 1) if options.ranks is None else options.ranks
    require_at_least(1, nodes=options.nodes, ranks=options.ranks, cpus=options.cpus)
    require_at_least(0, gpus=options.gpus)
    _seconds(options.time)
    for option in options.option:
        if not re.fullmatch(r"-\S.*", option):
            raise setting_error("--option", option, "must be one option of sbatch", example="--account=mine")
    num_nodes = options.nodes or find_num_nodes(config, ranks, "cpu" if is_cpu else options.device)
    check_config(config, num_nodes * ranks, ranks)
    folder = config.run.dir if volume is None else _folder_on_volume(config.run.dir, volume)
    other_overrides = [item for item in arguments.overrides if not item.startswith("run.dir=")]
    return ClusterJob(
        name=config.run.name,
        arguments=[f"recipe={arguments.recipe}", f"run.dir={folder}", *other_overrides],
        num_nodes=num_nodes,
        gpus_per_node=gpus,
        ranks_per_node=ranks,
        cpus_per_rank=options.cpus,
        time=options.time,
        python=options.python,
        scheduler_options=options.option,
    )


def require_at_least(minimum: int, **options: int | None) -> None:
    """Raise UserError if one of the given options is less than `minimum`."""
    for name, value in options.items():
        if value is not None and value < minimum:
            raise setting_error(f"--{name}", value, f"must be at least {minimum}", minimum)


def _folder_on_volume(folder: str, volume: str) -> str:
    """Return the path of the run folder on the volume, given its path relative to the volume or its absolute path.

    Raises UserError for a path that is not on the volume, since all other files of a container are lost when it ends.
    """
    path = posixpath.normpath(posixpath.join(volume, folder))
    if not path.startswith(f"{volume.rstrip('/')}/"):
        rule = f"is not on the volume, which is at {volume}: a restarted job would not find its files"
        raise setting_error("run.dir", folder, rule, example=posixpath.join(volume, "runs", posixpath.basename(path)))
    return path


def _seconds(time: str) -> int:
    """Convert HH:MM:SS to seconds.  Raises UserError if the format is wrong or the time is too short."""
    match = re.fullmatch(r"(\d+):([0-5]\d):([0-5]\d)", time)
    if match is None:
        raise setting_error("--time", time, "must have the form HH:MM:SS", example="24:00:00")
    hours, minutes, seconds = map(int, match.groups())
    total = 3600 * hours + 60 * minutes + seconds
    if total < 60:
        raise setting_error("--time", time, "must be at least a minute", "00:01:00")
    return total


def _dns_label(name: str) -> str:
    """Return a name that Kubernetes accepts: at most 40 lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-") or "run"


def _pipe_to(command: Sequence[str], text: str, fix: str) -> int:
    """Run a command with `text` as its input, print its output, and return the exit code.

    Raises UserError, with the advice `fix`, if this machine does not have the command.
    """
    try:
        finished = subprocess.run(command, input=text, text=True, stdout=subprocess.PIPE)
    except FileNotFoundError as error:
        raise UserError(f"{command[0]}: this machine does not have the command\n  to fix: {fix}") from error
    print_stdout(finished.stdout.rstrip())
    return EXIT_FINISHED if finished.returncode == 0 else EXIT_FAILED


def command_line(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = CommandParser(prog="python -m trainer.submit", description=__doc__)
    parser.add_argument("where", choices=list(_SUBMITTERS), help="slurm, k8s, or local (this machine)")
    add_size_options(parser)
    parser.add_argument("--image", help="on Kubernetes: the container image")
    parser.add_argument("--claim", default="training-data", help="on Kubernetes: the volume claim for data and runs")
    parser.add_argument("--mount", default="/data", help="on Kubernetes: the volume's mount path (default: /data)")
    parser.add_argument(
        "arguments", nargs="*", metavar="key=value", help="recipe=NAME and overrides, as for trainer.run"
    )
    options, other_options = parser.parse_known_intermixed_args(argv)
    add_working_directory_to_sys_path()
    return run_command(lambda: _SUBMITTERS[options.where](options, parse([*options.arguments, *other_options])))


def _submit_to_slurm(options: argparse.Namespace, arguments: Arguments) -> int:
    text = batch_file(make_job(options, arguments))
    if options.dry_run:
        print_stdout(text, end="")
        return EXIT_FINISHED
    return send_to_slurm(text)


def _submit_to_kubernetes(options: argparse.Namespace, arguments: Arguments) -> int:
    if not options.image:
        raise UserError(
            "--image: a job on Kubernetes needs the image to run\n  for example: --image=registry/image:tag"
        )
    if re.search(r"\s", options.image):
        raise setting_error("--image", options.image, "must be the name of an image", example="registry/image:tag")
    if options.claim != _dns_label(options.claim):
        rule = "must be the name of a volume claim: lower-case letters, digits and dashes"
        raise setting_error("--claim", options.claim, rule, example=_dns_label(options.claim))
    if not posixpath.isabs(options.mount) or posixpath.normpath(options.mount) == "/":
        raise setting_error("--mount", options.mount, "must be an absolute path other than /", example="/data")
    job = make_job(options, arguments, volume=options.mount)
    text = yaml.safe_dump(job_set(job, Pod(options.image, options.claim, options.mount)), sort_keys=False, width=10_000)
    if options.dry_run:
        print_stdout(text, end="")
        return EXIT_FINISHED
    return _pipe_to(["kubectl", "apply", "-f", "-"], text, "install kubectl, or use --dry-run")


def _run_locally(options: argparse.Namespace, arguments: Arguments) -> int:
    """Replace this process with the run, so that signals reach it and its exit code is returned."""
    require_at_least(1, ranks=options.ranks)
    require_at_least(0, gpus=options.gpus)
    ranks = options.ranks or options.gpus or _num_local_gpus() or 1
    if options.nodes not in (None, 1):
        raise setting_error("--nodes", options.nodes, "this machine is one node", 1)
    if arguments.recipe is None:
        raise missing_recipe_error(_USAGE, arguments.overrides)
    check_config(load_config(arguments.recipe, arguments.overrides, arguments.allow_import), ranks, ranks)
    command = ["-m", "trainer.run", f"recipe={arguments.recipe}", *arguments.overrides, f"nproc={ranks}"]
    if options.dry_run:
        print_stdout(shlex.join([options.python, *command]))
        return EXIT_FINISHED
    sys.stdout.flush()
    os.execv(options.python, [options.python, *command])


def _num_local_gpus() -> int:
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    except FileNotFoundError:
        return 0
    return len(listed.stdout.splitlines()) if listed.returncode == 0 else 0


_SUBMITTERS: Mapping[str, Callable[[argparse.Namespace, Arguments], int]] = {
    "slurm": _submit_to_slurm,
    "k8s": _submit_to_kubernetes,
    "local": _run_locally,
}


if __name__ == "__main__":
    sys.exit(command_line())
