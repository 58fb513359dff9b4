"""The command `trainer.run`, which trains the model that a recipe and settings describe.

    python -m trainer.run recipe=llama_small [section.key=value ...] [nproc=N]

The command checks as much of the input as possible before it imports torch or starts any process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from trainer import __version__, hub
from trainer.config.command_line import (
    ALLOW_IMPORT,
    USAGE,
    Arguments,
    completion_script,
    full_help,
    missing_recipe_error,
    parse,
    recipe_list,
)
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
    install_redaction,
    nearest,
    print_stderr,
    print_stdout,
    run_command,
    setting_error,
)
from trainer.lifecycle.launch import dry_run_config, spawn
from trainer.registry import add_working_directory_to_sys_path
from trainer.stopping import stop
from trainer.tables import fit_to_width

if TYPE_CHECKING:
    from trainer.trainer import Trainer

_REPORT_DELAY_S = 2.0
"""Seconds that all ranks but 0 wait before they exit on an error that all ranks raise, so that rank 0 can report it."""

STOPPED_NOTE = "run the same command again"
"""What to do if a signal has ended this process before there was anything to save."""


def stopped_exit_code(number: int) -> int:
    """Return the exit code of a run or an evaluation that a signal has ended."""
    return EXIT_STOPPED


def main(argv: Sequence[str] | None = None, trainer: type[Trainer] | None = None) -> int:
    """Run the command line and return the exit code.  User errors are printed once, without a traceback.

    trainer: a custom Trainer class, which replaces the recipe's.
    """
    with stop.hearing_signals(stopped_exit_code, note=STOPPED_NOTE):
        return _main(argv, trainer)


def _main(argv: Sequence[str] | None, trainer: type[Trainer] | None) -> int:
    start_time = time.time()
    install_redaction()
    add_working_directory_to_sys_path()
    limit_spinning()
    use_expandable_segments()
    env = Environment()
    try:
        env = find_environment()
        check_rendezvous(env)
        if env.launcher in ("nproc", "torchrun") and env.has_launcher_parent:
            die_with_parent(True)
        arguments = parse(sys.argv[1:] if argv is None else argv)
        config = _load(arguments, env)
        if config is None:
            return EXIT_FINISHED
        is_spawning = should_spawn(arguments.nproc, env)
        _check(config, arguments.nproc or 1, env, is_spawning, has_custom_trainer=trainer is not None)
    except UserError as error:
        return report_error(error, env)
    except OSError as error:
        return report_error(unusable_path_error(error, sys.argv[1:] if argv is None else argv), env)
    record_start_time(start_time)
    is_dry_run = arguments.has_option("--dry-run")
    action = partial(_dry_run, config) if is_dry_run else lambda trainer: trainer.fit()
    with dry_run_config(config, env) if is_dry_run else contextlib.nullcontext(config) as config:
        if is_spawning:
            os.environ[hub.PINS] = hub.pins_for_children()
            return spawn(arguments.nproc or 1, _worker_command(arguments, trainer), config)
        return run_trainer(config, trainer, action)


def unusable_path_error(error: OSError, argv: Sequence[str]) -> UserError:
    """Return the error for a path that cannot be accessed, for example because permission is denied."""
    path = str(error.filename or "")
    settings = (word.partition("=") for word in argv)
    key = next((key for key, _, value in settings if value and value in path), "")
    fix = "give another path"
    if not key:
        return UserError(f"{path or 'a file'}: cannot be used ({error.strerror})\n  to fix: {fix}")
    return setting_error(key, path, f"cannot be used ({error.strerror})", fix=fix)


def _load(arguments: Arguments, env: Environment) -> RunConfig | None:
    """Return the configuration to train with, or None if the command only prints something, like `--help`."""
    recipe, overrides = arguments.recipe, arguments.overrides
    if arguments.has_option("--version"):
        print_stdout(f"meshtrainer {__version__}")
        return None
    if arguments.has_option("--help"):
        text = full_help(
            arguments.sections,
            load_config(recipe, overrides, arguments.allow_import, needs_weights=False) if recipe else None,
        )
        print_stdout(fit_to_width(text, shutil.get_terminal_size().columns if sys.stdout.isatty() else 0))
        return None
    if recipe is None:
        if overrides or arguments.options:
            raise missing_recipe_error(USAGE.partition("\n")[0], overrides)
        raise UserError(f"{USAGE}\n{recipe_list()}")
    loaded = load(recipe, overrides, arguments.allow_import)
    config = loaded.config
    if arguments.has_option("--print-config"):
        _check_before_printing(config, arguments.nproc, env)
        from trainer.data.opening import is_untokenized, resolve_from_data

        if config.data.path and not is_untokenized(config.data):  # token shards determine the number of steps
            loaded.apply("the length of the data", resolve_from_data)
        text = loaded.config.to_yaml(loaded.origins if arguments.has_option("--why") else None)
        print_stdout(text, end="")
        return None
    if env.launcher != "nproc":  # with nproc, the parent process has already done this
        for note in loaded.notes if env.rank == 0 else ():
            print_stderr(note)
    return config


def _worker_command(arguments: Arguments, trainer: type[Trainer] | None) -> list[str]:
    """Return the Python interpreter's arguments for a rank: `trainer.run` or the user's script, and its options."""
    program = ["-m", "trainer.run"]
    if trainer is not None:
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        program = ["-m", spec.name.removesuffix(".__main__")] if spec else [os.path.abspath(sys.argv[0])]
    options = sorted(arguments.options) + [word for module in arguments.allow_import for word in (ALLOW_IMPORT, module)]
    return [*program, f"recipe={arguments.recipe}", *arguments.overrides, *options]


def should_spawn(nproc: int | None, env: Environment) -> bool:
    """Return whether this process must start the ranks.

    Raises UserError if a launcher has already started a number of ranks other than `nproc`.
    """
    if nproc is not None and env.is_distributed and nproc != env.world_size:
        rule = f"{env.launcher} has already started {env.world_size} processes; leave it out, or give that number"
        raise setting_error("nproc", nproc, rule, env.world_size)
    return nproc is not None and nproc > 1 and not env.is_distributed


def _check(config: RunConfig, nproc: int, env: Environment, is_spawning: bool, has_custom_trainer: bool) -> None:
    """Check the configuration and the data before a Trainer is built.  Raises UserError."""
    num_ranks, num_local_ranks = (nproc, nproc) if is_spawning else (env.world_size, env.local_world_size)
    _check_without_torch(config, num_ranks, num_local_ranks, env, has_custom_trainer)
    if is_spawning and (config.fsdp.wrap != "block" or isinstance(config.fsdp.reshard_after_forward, list)):
        from trainer.model.shard import check_sharding

        check_sharding(config)  # imports torch and builds the model, so it is only called for these settings


def _check_without_torch(
    config: RunConfig,
    world_size: int,
    local_world_size: int,
    env: Environment,
    has_custom_trainer: bool = False,
    tokenizes: bool = True,
) -> None:
    """Check that the settings are consistent, the required libraries and compilers exist, and the data can be read.

    tokenizes: whether to tokenize text that has not been tokenized yet; all ranks share this work.

    Raises UserError.
    """
    from trainer.data.mixture import make_order
    from trainer.data.opening import check_tokenizer, is_untokenized, open_source, resolve_from_data

    check_config(config, world_size, local_world_size)
    check_requirements(config, likely_device(config.run.device))
    if config.spec.trainer is not None or has_custom_trainer:
        return
    is_untokenized_text = is_untokenized(config.data)  # all ranks share the work of tokenizing it
    if tokenizes if is_untokenized_text else env.rank == 0:
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
    if nproc is None and not env.is_distributed:
        smallest = smallest_mesh(config)
        config = replace(config, log=replace(config.log, profile_ranks=(0,)))
        _check_without_torch(config, smallest.num_ranks, smallest.shard, env, tokenizes=False)
    else:
        num_ranks = nproc or env.world_size
        local_world_size = env.local_world_size if env.is_distributed else num_ranks
        _check_without_torch(config, num_ranks, local_world_size, env, tokenizes=False)


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


def run_trainer(config: RunConfig, custom_class: type[Trainer] | None, action: Callable[[Trainer], int]) -> int:
    """Build a Trainer on this rank, call `action` with it, and return the exit code.

    custom_class: a Trainer class that replaces the recipe's.
    """
    with without_garbage_collection():
        from trainer.plan.forecast import is_out_of_memory
        from trainer.trainer import Trainer

        gc.freeze()  # never scan imported objects again: a full collection took 0.3 s
    trainer = None
    if find_environment().rank != 0:
        warnings.simplefilter("ignore")  # rank 0 shows the warnings
    try:
        with without_garbage_collection():
            trainer = (custom_class or config.trainer_class(Trainer))(config)
        exit_code = action(trainer)
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
            if text := _out_of_memory(error, config, is_built=trainer is not None):
                print_stderr(text)
        elif is_own and not isinstance(error, PeerFailed):
            print_stderr(traceback.format_exc().rstrip())
        return EXIT_FAILED


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
    "init": "trainer.init.__main__",
    "prepare": "trainer.prepare",
    "plan": "trainer.plan.__main__",
    "checkpoints": "trainer.checkpoints",
    "data": "trainer.data.__main__",
    "evaluate": "trainer.evaluate",
    "generate": "trainer.generate",
    "export": "trainer.export",
    "report": "trainer.report.__main__",
}
"""Maps each subcommand of `meshtrainer` to the module with its `command_line` function."""


_COMMANDS_OF_OTHER_TOOLS = {
    **dict.fromkeys(("train", "fit", "launch", "start", "finetune", "sft", "resume"), "run"),
    **dict.fromkeys(("eval", "test", "validate"), "evaluate"),
    **dict.fromkeys(("chat", "sample", "inference", "infer"), "generate"),
    **dict.fromkeys(("tokenize", "preprocess"), "prepare"),
    **dict.fromkeys(("convert", "merge", "push", "upload"), "export"),
    **dict.fromkeys(("new", "create", "scaffold"), "init"),
    **dict.fromkeys(("estimate", "estimate-memory"), "plan"),
}
"""Maps the names of similar commands in other tools to subcommands of `meshtrainer`."""


def meshtrainer() -> NoReturn:
    """Run the command `meshtrainer`: a subcommand with its arguments, or the arguments of `run`."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in COMMANDS:
        sys.argv[1:] = arguments[1:]
        sys.exit(importlib.import_module(COMMANDS[arguments[0]]).command_line())
    sys.exit(
        run_command(lambda: _run_unknown_command(arguments))
        if arguments and arguments[0].isidentifier()
        else command_line()
    )


def _run_unknown_command(arguments: Sequence[str]) -> int:
    """Run `completion`, which is not in `COMMANDS`; raise UserError for any other command."""
    if arguments[0] == "completion":
        print_stdout(completion_script(arguments[1] if len(arguments) > 1 else "", COMMANDS), end="")
        return EXIT_FINISHED
    if arguments[0] == "help":
        raise UserError("meshtrainer help: no such command\n  did you mean meshtrainer --help?")
    suggestion = _COMMANDS_OF_OTHER_TOOLS.get(arguments[0]) or nearest(arguments[0], [*COMMANDS, "completion"])
    advice = (
        f"did you mean meshtrainer {suggestion}?"
        if suggestion
        else f"the commands are: {', '.join([*COMMANDS, 'completion'])}"
    )
    raise UserError(f"meshtrainer {arguments[0]}: no such command\n  {advice}")


def command_line() -> NoReturn:
    """Run the command line and exit with its exit code."""
    exit_process(main())


if __name__ == "__main__":
    command_line()
