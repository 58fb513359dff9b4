"""The command line: arguments -> RunConfig -> Trainer -> exit code.

    python -m trainer.run recipe=llama_small [section.key=value ...] [nproc=N]

Whatever can be found wrong is found before torch is imported and before a process is started.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from trainer.config import RunConfig, check_config, least_mesh, load_config, usage
from trainer.config.needs import check_needs, likely_device
from trainer.distributed import stop
from trainer.distributed.deaths import find_killed
from trainer.distributed.environment import (
    LAUNCHER,
    SPAWNED_BY_US,
    Environment,
    allocate_in_segments,
    find_environment,
    follow_parent,
    limit_spinning,
    note_start,
    without_collecting,
)
from trainer.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    PeerFailed,
    TrainingFailed,
    UserError,
    nearest,
    say,
    setting_error,
    tell,
)
from trainer.lifecycle.folder import note_end, read_status
from trainer.metrics.clock import uptime
from trainer.metrics.record import last_step
from trainer.recipe import look_in_working_folder

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

_MAX_PROCESSES = 1024
"""More than any machine has room for."""

_REPORT_S = 2.0
"""How long a rank that is not the first waits before it leaves with a user's mistake, for the first to report it."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of the command line."""

    recipe: str | None
    overrides: list[str]
    nproc: int | None
    wants_help: bool
    wants_config: bool


def parse(argv: Sequence[str]) -> Arguments:
    """Sort the arguments.  Raises UserError for one that is none of the known forms."""
    flags = {"--help", "-h", "--print-config"}
    named: dict[str, str] = {}
    overrides = []
    for argument in argv:
        key, equals, value = argument.partition("=")
        if argument in flags:
            continue
        if argument.startswith("-"):
            raise UserError(f"{argument}: no such option\n  {_instead_of(argument, flags)}")
        if key in ("recipe", "nproc") and equals:
            if key in named:
                raise setting_error(key, value, f"is given twice (first as {named[key]!r}); give it once")
            named[key] = value
        else:
            overrides.append(argument)
    return Arguments(
        recipe=named.get("recipe"),
        overrides=overrides,
        nproc=_parse_nproc(named["nproc"]) if "nproc" in named else None,
        wants_help="--help" in argv or "-h" in argv,
        wants_config="--print-config" in argv,
    )


def _instead_of(option: str, flags: Collection[str]) -> str:
    """Return what is to be said of an option that there is none of."""
    name = option.lstrip("-")
    if name.partition("=")[0] in ("recipe", "nproc"):
        return f"did you mean {name if '=' in name else f'{name}=...'}?"
    if "=" in name or "." in name:
        return f"to fix: keys are written without dashes, as {name if '=' in name else f'{name}=...'}"
    best = nearest(name, [flag.lstrip("-") for flag in flags])
    return f"did you mean --{best}?" if best else "to fix: see --help"


def _parse_nproc(text: str) -> int:
    rule = f"must be a number of processes, from 1 to {_MAX_PROCESSES}"
    if not text.isdecimal() or len(text) > 9:
        raise setting_error("nproc", text, rule, example=1)
    if not 1 <= int(text) <= _MAX_PROCESSES:
        raise setting_error("nproc", text, rule, min(max(1, int(text)), _MAX_PROCESSES))
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for.  Returns the exit code; prints a user's mistake once, without traceback."""
    began = uptime()
    look_in_working_folder()
    limit_spinning()
    allocate_in_segments()
    stop.catch_signals_early()
    env, trains = Environment(), False
    try:
        env = find_environment()
        if env.launcher in ("nproc", "torchrun") and env.has_a_parent:
            follow_parent(True)
        arguments = parse(sys.argv[1:] if argv is None else argv)
        if arguments.wants_help:
            tell(usage.full_help())
            return EXIT_FINISHED
        if arguments.recipe is None:
            if arguments.overrides or arguments.wants_config:
                raise UserError(f"recipe=NAME is missing\n\n{usage.USAGE}\n{usage.recipe_list()}")
            raise UserError(f"{usage.USAGE}\n{usage.recipe_list()}")
        config = load_config(arguments.recipe, arguments.overrides)
        if env.launcher != "nproc":  # whose parent has done so
            stop.note_stale_notice(config.run_dir)
        spawns = _spawns(arguments.nproc, env)
        if arguments.wants_config:
            _check_as_printed(config, arguments.nproc, env)
            config = _with_steps(config)
            tell(config.to_yaml(), end="")
            return EXIT_FINISHED
        _check(config, arguments.nproc or 1, env, spawns)
        trains = True
    except UserError as error:
        return _report(error, env)
    finally:
        if not trains:
            stop.let_go()
    note_start(began)
    return _spawn(arguments, config) if spawns else _train(config)


def _spawns(nproc: int | None, env: Environment) -> bool:
    if nproc is not None and env.is_distributed and nproc != env.world_size:
        rule = f"{env.launcher} has started {env.world_size} processes already; leave it out, or say so"
        raise setting_error("nproc", nproc, rule, env.world_size)
    return nproc is not None and nproc > 1 and not env.is_distributed


def _check(config: RunConfig, nproc: int, env: Environment, spawns: bool) -> None:
    """Find what can be found wrong before anything is started."""
    _check_without_torch(config, *((nproc, nproc) if spawns else (env.world_size, env.local_world_size)), env)
    if spawns and (config.fsdp.wrap != "block" or isinstance(config.fsdp.reshard_after_forward, list)):
        from trainer.model.shard import check_sharding

        check_sharding(config)  # needs torch and the model's structure, so only where a setting speaks of it


def _check_without_torch(config: RunConfig, world_size: int, local_world_size: int, env: Environment) -> None:
    """Find rules between fields that are broken, libraries and compilers that are missing, data that cannot be read."""
    from trainer.data.mixed import find_order
    from trainer.data.opening import open_source

    check_config(config, world_size, local_world_size)
    check_needs(config, likely_device(config.run.device))
    if config.recipe.trainer is None and env.rank == 0:
        find_order(open_source(config.data, config.vocab_size, "train"), config)
        open_source(config.data, config.vocab_size, "eval")


def _check_as_printed(config: RunConfig, nproc: int | None, env: Environment) -> None:
    """Check a configuration that is printed: it may be for ranks that are elsewhere, and its data still to come.

    Where neither a launcher nor `nproc` says how many ranks there are, they are the fewest that it can mean.
    """
    if config.data.source in ("tokens", "chat") and not config.data.path:
        config = replace(config, data=config.data.generated())
    if nproc is None and not env.is_distributed:
        least = least_mesh(config)
        config = replace(config, log=replace(config.log, profile_ranks=(0,)))
        _check_without_torch(config, least.num_ranks, least.shard, env)
    else:
        num_ranks = nproc or env.world_size
        _check_without_torch(config, num_ranks, env.local_world_size if env.is_distributed else num_ranks, env)


def _with_steps(config: RunConfig) -> RunConfig:
    """Return what is printed, with the steps that its epochs take if the data are there."""
    from trainer.data.epochs import with_steps

    return with_steps(config) if config.data.path else config


def _report(error: UserError | TrainingFailed, env: Environment, exit_code: int = EXIT_USER_ERROR) -> int:
    """Print what all ranks know once, on the first; the others give it the time to.

    A launcher ends the other ranks as soon as one has left, and reports how they died: all leave with the same code.
    """
    _ignore_termination()
    if env.rank == 0:
        prefix = "" if str(error).startswith("usage:") else "error: "
        say(f"{prefix}{error}")
    else:
        time.sleep(_REPORT_S)
    return exit_code


def _ignore_termination() -> None:
    if threading.current_thread() is threading.main_thread():
        for number in stop.STOP_SIGNALS:
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_IGN)


def _train(config: RunConfig) -> int:
    """Train in this process, as one rank of however many there are."""
    with without_collecting():
        from trainer.plan.forecast import is_out_of_memory
        from trainer.trainer import Trainer

        gc.freeze()  # what has been imported is not looked through again: a full collection took 0.3 s
    trainer = None
    if find_environment().rank != 0:
        warnings.simplefilter("ignore")  # the first rank warns for all
    try:
        with without_collecting():
            trainer = config.recipe.trainer_class(Trainer)(config)
        exit_code = trainer.fit()
        _ignore_termination()
        trainer.close()
        return exit_code
    except UserError as error:
        return _report(error, find_environment())
    except TrainingFailed as error:
        return _report(error, find_environment(), EXIT_FAILED)
    except BaseException as error:
        first = trainer.world.first_failure if trainer is not None else None
        if is_out_of_memory(error):
            if text := _out_of_memory(error, config, is_built=trainer is not None):
                say(text)
        elif first is None and not isinstance(error, PeerFailed):
            say(traceback.format_exc().rstrip())
        return EXIT_FAILED


def _out_of_memory(error: BaseException, config: RunConfig, is_built: bool) -> str:
    """Return what is said last of a full memory; nothing where another rank says it."""
    if is_built:
        return "\n".join(getattr(error, "__notes__", []))
    return (
        f"{traceback.format_exc().rstrip()}\nout of memory while the model was built\n"
        f"  python -m trainer.plan shows what a rank needs, and what would fit (run.name={config.run.name})"
    )


def _spawn(arguments: Arguments, config: RunConfig) -> int:
    """Start the workers through torch's elastic launcher, and return the exit code that the run earned."""
    import logging

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the workers report for themselves
    os.environ[SPAWNED_BY_US] = str(arguments.nproc)
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each rank sets its own share once it knows it
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")  # a save may take longer than the 30 s before a kill
    launch = _launch_config(arguments.nproc or 1)
    command = ["-m", "trainer.run", f"recipe={arguments.recipe}", *arguments.overrides]
    before = read_status(config.run_dir)

    def interrupt(number: int, frame: object) -> NoReturn:
        raise SignalException(f"asked to stop by {signal.Signals(number).name}", signal.Signals(number))

    try:
        for number in stop.caught_signals():  # until the launcher installs its own, which do the same
            signal.signal(number, interrupt)
        if stop.find_stop_request().reason() is not None:
            return EXIT_STOPPED  # while torch was being imported
        elastic_launch(launch, sys.executable)(*command)
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        if killed := find_killed(error.failures):
            _note_end(config, before, killed)
        return next((code for code in (EXIT_USER_ERROR, EXIT_STOPPED) if code in codes), EXIT_FAILED)
    except SignalException:
        # The launcher has only seen its workers go: what they achieved is on record.
        status = read_status(config.run_dir)
        if status == before:
            return EXIT_STOPPED  # before the first step
        if status.get("exit_code") is None:
            _note_end(config, before, "the run was asked to stop, and its ranks have gone without a word")
            return EXIT_FAILED
        return int(status["exit_code"])
    return EXIT_FINISHED


def _launch_config(nproc: int) -> LaunchConfig:
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        # Unhandled, SIGUSR1 kills it and orphans the ranks; what nohup has had ignored it would catch.
        signals_to_handle=",".join(number.name for number in stop.caught_signals()),
    )


def _note_end(config: RunConfig, before: Mapping[str, Any], reason: str) -> None:
    """Say, and leave in `status.json`, how the ranks ended where they could not say it themselves."""
    say(f"error: {reason}")
    note_end(config.run_dir, before, last_step(config.run_dir / "metrics.jsonl"), reason)


def leave(exit_code: int) -> NoReturn:
    """End this process now.

    Process groups that are still alive when the interpreter takes itself apart abort it: 13 of 16 finished runs died
    with "terminate called without an active exception".
    """
    with contextlib.suppress(OSError):  # it is not read any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)


def command_line() -> NoReturn:
    """Run the command line and leave with its exit code."""
    leave(main())


if __name__ == "__main__":
    command_line()
