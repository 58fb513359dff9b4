"""The command `trainer.run`, which trains the model that a recipe and settings describe.

    python -m trainer.run recipe=llama_small [section.key=value ...] [nproc=N]

The command checks as much of the input as possible before it imports torch or starts any process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from trainer import __version__, hub
from trainer.config.command_line import (
    ALLOW_IMPORT,
    USAGE,
    Arguments,
    full_help,
    missing_recipe_error,
    parse,
    recipe_list,
)
from trainer.config.derive import Loaded
from trainer.config.load import load, load_config
from trainer.config.parallel import smallest_mesh
from trainer.config.requirements import check_requirements, likely_device
from trainer.config.rules import check_config
from trainer.config.schema import RunConfig
from trainer.distributed.environment import (
    Environment,
    check_rendezvous,
    die_with_parent,
    find_environment,
    limit_spinning,
    record_start_time,
    use_expandable_segments,
    without_garbage_collection,
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
    print_stderr,
    print_stdout,
    setting_error,
)
from trainer.lifecycle.launch import dry_run_config, spawn
from trainer.registry import add_working_directory_to_sys_path
from trainer.stopping import stop

if TYPE_CHECKING:
    from trainer.trainer import Trainer

_REPORT_DELAY_S = 2.0
"""Seconds that all ranks but 0 wait before they exit on an error that all ranks raise, so that rank 0 can report it."""


def main(argv: Sequence[str] | None = None, trainer: type[Trainer] | None = None) -> int:
    """Run the command line and return the exit code.  User errors are printed once, without a traceback.

    trainer: a custom Trainer class, which replaces the model spec's or the objective's.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    return start(words, lambda env, stack: _prepare(parse(words), env, stack, trainer))


@dataclass(frozen=True)
class Task:
    """What a command does on ranks.

    config: the configuration of the Trainer on each rank.
    trainer_class: returns the class of the Trainer, given `Trainer` itself, which is imported on the ranks only.
    action: called with the Trainer; returns the exit code.
    nproc: number of ranks for this process to start; None if it is a rank itself.
    program: the arguments of the Python interpreter on each rank that this process starts.
    """

    config: RunConfig
    trainer_class: Callable[[type[Trainer]], type[Trainer]]
    action: Callable[[Trainer], int]
    nproc: int | None
    program: Sequence[str]


def start(argv: Sequence[str], prepare: Callable[[Environment, ExitStack], Task | None]) -> int:
    """Run a command that trains or evaluates: prepare it, then start its ranks or run as one; return the exit code.

    User errors are printed once, however many ranks a launcher has started.

    argv: the command line, for messages.
    prepare: loads and checks the configuration; returns None if there is nothing left to do.  What it enters into the
        stack is closed when the command ends.
    """
    hearing_signals = stop.hearing_signals(lambda number: EXIT_STOPPED, note="run the same command again")
    with hearing_signals, ExitStack() as stack:
        start_time = time.time()
        add_working_directory_to_sys_path()
        limit_spinning()
        use_expandable_segments()
        env = Environment()
        try:
            env = find_environment()
            check_rendezvous(env)
            if env.launcher in ("nproc", "torchrun") and env.has_launcher_parent:
                die_with_parent(True)
            task = prepare(env, stack)
        except UserError as error:
            return report_error(error, env)
        except TrainingFailed as error:
            return report_error(error, env, EXIT_FAILED)
        except OSError as error:
            return report_error(_unusable_path_error(error, argv), env)
        if task is None:
            return EXIT_FINISHED
        record_start_time(start_time)
        if task.nproc is None:
            return run_trainer(task)
        os.environ[hub.PINS] = hub.pins_for_children()
        return spawn(task.nproc, task.program, task.config)


def ranks_to_start(nproc: int | None, env: Environment) -> int | None:
    """Return how many ranks this process must start; None if it is a rank itself.

    Raises UserError if a launcher has already started a number of ranks other than `nproc`.
    """
    if nproc is not None and env.is_distributed and nproc != env.world_size:
        rule = f"{env.launcher} has already started {env.world_size} processes; leave it out, or give that number"
        raise setting_error("nproc", nproc, rule, env.world_size)
    return nproc if nproc is not None and nproc > 1 and not env.is_distributed else None


def _unusable_path_error(error: OSError, argv: Sequence[str]) -> UserError:
    """Return the error for a path that cannot be accessed, for example because permission is denied."""
    path = str(error.filename or "")
    settings = (word.partition("=") for word in argv)
    key = next((key for key, _, value in settings if value and value in path), "")
    fix = "give another path"
    if not key:
        return UserError(f"{path or 'a file'}: cannot be used ({error.strerror})\n  to fix: {fix}")
    return setting_error(key, path, f"cannot be used ({error.strerror})", fix=fix)


# ---------------------------------------------------------------------------------------------------------------
# Before the ranks


def _prepare(
    arguments: Arguments, env: Environment, stack: ExitStack, trainer: type[Trainer] | None = None
) -> Task | None:
    """Load and check the configuration.  Returns None if the command only prints something, like `--help`."""
    recipe, overrides = arguments.recipe, arguments.overrides
    if "--version" in arguments.options:
        print_stdout(f"meshtrainer {__version__}")
        return None
    if "--help" in arguments.options:
        shown = load_config(recipe, overrides, arguments.allow_import, needs_weights=False) if recipe else None
        print_stdout(full_help(arguments.sections, shown))
        return None
    if recipe is None:
        if overrides or arguments.options:
            raise missing_recipe_error(USAGE.partition("\n")[0], overrides)
        raise UserError(f"{USAGE}\n{recipe_list()}")
    loaded = load(recipe, overrides, arguments.allow_import)
    if "--print-config" in arguments.options:
        _check_before_printing(loaded.config, arguments.nproc, env)
        _print_config(loaded, "--why" in arguments.options)
        return None
    if env.launcher != "nproc" and env.rank == 0:  # with nproc, the parent process has already done this
        for note in loaded.notes:
            print_stderr(note)

    config = loaded.config
    nproc = ranks_to_start(arguments.nproc, env)
    num_ranks, num_local_ranks = (nproc, nproc) if nproc else (env.world_size, env.local_world_size)
    check_config(config, num_ranks, num_local_ranks)
    check_requirements(config, likely_device(config.run.device))
    if config.spec.trainer is None and trainer is None:  # otherwise the data may be the Trainer's own
        _check_data(config, opens_text=True, opens_shards=env.rank == 0)
    if nproc and (config.fsdp.wrap != "block" or isinstance(config.fsdp.reshard_after_forward, list)):
        from trainer.model.shard import check_sharding

        check_sharding(config)  # imports torch and builds the model, so it is only called for these settings

    action: Callable[[Trainer], int] = _train
    if "--dry-run" in arguments.options:
        action = partial(_dry_run, config)
        config = stack.enter_context(dry_run_config(config, env))
    return Task(
        config,
        trainer_class=lambda default: trainer or config.trainer_class(default),
        action=action,
        nproc=nproc,
        program=_program(arguments, trainer),
    )


def _print_config(loaded: Loaded, explains: bool) -> None:
    """Print the configuration as YAML, with the number of steps if that is known without tokenizing text."""
    from trainer.data.opening import is_untokenized, resolve_from_data

    if loaded.config.data.path and not is_untokenized(loaded.config.data):
        loaded.apply("the length of the data", resolve_from_data)
    print_stdout(loaded.config.to_yaml(loaded.origins if explains else None), end="")


def _check_data(config: RunConfig, opens_text: bool, opens_shards: bool) -> None:
    """Check without torch that the data can be read, which tokenizes text.

    opens_text: whether to open text that has not been tokenized yet.  All ranks share this work.
    opens_shards: whether to open other data.

    Raises UserError.
    """
    from trainer.data.mixture import make_order
    from trainer.data.opening import check_tokenizer, is_untokenized, open_source, resolve_from_data

    if not (opens_text if is_untokenized(config.data) else opens_shards):
        return
    source = open_source(config.data, config.vocab_size, "train")
    check_tokenizer(source, config)
    make_order(source, resolve_from_data(config))
    if config.rows_per_sample == 1 and source.rows_per_sample > 1:  # the ordinary loss, but preference pairs
        rule = "rejected responses would be trained on like chosen ones"
        raise setting_error("data.format", "preference", rule, fix="use recipe=dpo, or set train.objective=dpo")
    open_source(config.data, config.vocab_size, "eval")


def _check_before_printing(config: RunConfig, nproc: int | None, env: Environment) -> None:
    """Check a configuration before it is printed.  It may be for another machine, and its data may not exist yet.

    Without a launcher or `nproc`, the smallest possible number of ranks is assumed.
    """
    if config.data.source in ("tokens", "chat") and not config.data.path:
        config = replace(config, data=config.data.as_synthetic())
    num_ranks = nproc or env.world_size
    num_local_ranks = env.local_world_size if env.is_distributed else num_ranks
    if nproc is None and not env.is_distributed:
        smallest = smallest_mesh(config)
        num_ranks = smallest.num_ranks
        num_local_ranks = smallest.shard
        config = replace(config, log=replace(config.log, profile_ranks=(0,)))
    check_config(config, num_ranks, num_local_ranks)
    check_requirements(config, likely_device(config.run.device))
    if config.spec.trainer is None:
        _check_data(config, opens_text=False, opens_shards=env.rank == 0)


def _program(arguments: Arguments, trainer: type[Trainer] | None) -> list[str]:
    """Return the Python interpreter's arguments for a rank: `trainer.run` or the user's script, and its options."""
    program = ["-m", "trainer.run"]
    if trainer is not None:
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        program = ["-m", spec.name.removesuffix(".__main__")] if spec else [os.path.abspath(sys.argv[0])]
    options = sorted(arguments.options) + [word for module in arguments.allow_import for word in (ALLOW_IMPORT, module)]
    return [*program, f"recipe={arguments.recipe}", *arguments.overrides, *options]


# ---------------------------------------------------------------------------------------------------------------
# On each rank


def run_trainer(task: Task) -> int:
    """Build a Trainer on this rank, do the task with it, and return the exit code."""
    with without_garbage_collection():
        from trainer.plan.forecast import is_out_of_memory
        from trainer.trainer import Trainer

        gc.freeze()  # never scan imported objects again: a full collection took 0.3 s
    trainer = None
    if find_environment().rank != 0:
        warnings.simplefilter("ignore")  # rank 0 shows the warnings
    try:
        with without_garbage_collection():
            trainer = task.trainer_class(Trainer)(task.config)
        exit_code = task.action(trainer)
        stop.is_ending = True
        trainer.close()
        return exit_code
    except UserError as error:
        if trainer is not None:
            trainer.world.leave()
        return report_error(error, find_environment())
    except TrainingFailed as error:
        return report_error(error, find_environment(), EXIT_FAILED)
    except BaseException as error:
        failure = None if trainer is None else trainer.run.failure
        if failure is not None and failure.exit_code == EXIT_STOPPED:
            return EXIT_STOPPED  # another rank was asked to stop before its first step
        is_own = failure is None or trainer is None or trainer.world.monitor.is_own(failure, error)
        if is_out_of_memory(error):
            if text := _out_of_memory(error, task.config, is_built=trainer is not None):
                print_stderr(text)
        elif is_own and not isinstance(error, PeerFailed):
            print_stderr(traceback.format_exc().rstrip())
        return EXIT_FAILED


def report_error(error: UserError | TrainingFailed, env: Environment, exit_code: int = EXIT_USER_ERROR) -> int:
    """Report an error that all ranks have raised: rank 0 prints it.  Returns the exit code.

    The other ranks wait a moment, because a launcher kills all ranks as soon as one exits.
    """
    stop.is_ending = True
    if env.rank == 0:
        prefix = "" if str(error).startswith("usage:") else "error: "
        print_stderr(f"{prefix}{error}")
    else:
        time.sleep(_REPORT_DELAY_S)
    return exit_code


def _train(trainer: Trainer) -> int:
    return trainer.fit()


def _dry_run(config: RunConfig, trainer: Trainer) -> int:
    """Start up without training, and print the plan.

    config: the configuration of the actual run, which gives its checkpoint folder.
    """
    from trainer.checkpoint.storage import open_storage
    from trainer.plan.show import print_plan

    trainer.storage_to_check = open_storage(config.checkpoint.dir or config.run_dir / "checkpoints")

    with trainer.run.attempt():
        trainer.start()
        if trainer.world.is_main:
            if trainer.forecast.plan is not None:
                print_plan(trainer.forecast.plan, trainer.plan_choice)
            step, steps = trainer.state.step, trainer.config.train.steps
            outcome = (
                f"would train steps {step + 1} to {steps}" if step < steps else f"nothing to do: step {step} of {steps}"
            )
            print_stdout(f"dry run: {outcome}; nothing was written")
    return EXIT_FINISHED


def _out_of_memory(error: BaseException, config: RunConfig, is_built: bool) -> str:
    """Return the message for an out-of-memory error, or an empty string if it has been explained already."""
    if is_built:
        return "\n".join(getattr(error, "__notes__", []))
    return (
        f"{traceback.format_exc().rstrip()}\nout of memory while the model was built\n"
        f"  python -m trainer.plan recipe=RECIPE shows what each rank needs, and what would fit "
        f"(run.name={config.run.name})"
    )


def exit_process(exit_code: int) -> NoReturn:
    """Exit immediately, without finalizing the interpreter.

    Process groups that are still alive at finalization abort the process: in a test, 13 of 16 finished runs died with
    "terminate called without an active exception".
    """
    with contextlib.suppress(OSError):  # the reader of the pipe has exited
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)


COMMANDS = {
    "run": "trainer.run",
    "plan": "trainer.plan.__main__",
    "prepare": "trainer.prepare",
    "data": "trainer.data.__main__",
    "evaluate": "trainer.evaluate",
    "generate": "trainer.generate",
    "export": "trainer.export",
    "checkpoints": "trainer.checkpoints",
    "report": "trainer.report.__main__",
    "init": "trainer.init.__main__",
}
"""Maps each subcommand of `meshtrainer` to the module with its `command_line` function."""


def meshtrainer() -> NoReturn:
    """Run the command `meshtrainer`: a subcommand with its arguments, or the arguments of `run`."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in COMMANDS:
        del sys.argv[1]
        sys.exit(importlib.import_module(COMMANDS[name]).command_line())
    if name.isidentifier():
        suggestion = nearest(name, COMMANDS)
        advice = f"did you mean meshtrainer {suggestion}?" if suggestion else f"the commands are: {', '.join(COMMANDS)}"
        print_stderr(f"error: meshtrainer {name}: no such command\n  {advice}")
        sys.exit(EXIT_USER_ERROR)
    command_line()


def command_line() -> NoReturn:
    """Run the command line and exit with its exit code."""
    exit_process(main())


if __name__ == "__main__":
    command_line()
