"""Resolves settings that are `auto` to the fastest values that fit in memory.

The search evaluates candidates with the planner, not with trial launches.  One candidate takes milliseconds, except
that each combination of micro-batch size, checkpointing, offloading, and context and expert group sizes must be traced
once.

A unit that is not resharded after the forward pass saves one all-gather, but stays in memory until its backward pass.
The last units in the forward pass stay for the shortest time, so the search leaves the last k units unsharded.  It
finds the largest k that fits by bisection, and then, in small models, tunes the units one by one.

Among group sizes that are about equally fast, the search takes the smallest; among plans that have the same group
sizes and are about equally fast, it takes the one that needs the least memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from trainer.config.parallel import MeshShape, context_choices
from trainer.config.rules import offloaded_fraction
from trainer.config.schema import AUTO, Resharding, RunConfig, TrainSection, UnitResharding
from trainer.errors import UserError
from trainer.model.shard import checkpointing_choices
from trainer.plan.experts import possible_choices
from trainer.plan.machine import Machine
from trainer.plan.plan import Plan, make_plan
from trainer.plan.probe import Probe

_TIME_TOLERANCE = 0.005
"""Choices that are slower than the fastest by at most this fraction count as equally fast."""
_MIN_IMPROVEMENT = 1e-6
"""A change to a single unit is accepted only if it shortens the step by more than this fraction."""
_MAX_UNITS = 16
"""Units are tuned one by one only in models with at most this many; in larger models, a single unit hardly matters."""
_OFFLOADED_FRACTIONS = (1.0, 0.5, 0.25)
"""Fractions of the blocks whose activations `train.offload_activations=auto` tries to offload on a GPU."""


class NothingFits(UserError):
    """Raised if no combination of the `auto` settings fits.  `plan` is the candidate that needs the least memory."""

    def __init__(self, message: str, plan: Plan) -> None:
        super().__init__(message)
        self.plan = plan


@dataclass(frozen=True)
class PlannedChoice:
    """The plan with the resolved `auto` settings, up to four runners-up, and the number of candidates tried."""

    plan: Plan
    runners_up: tuple[Plan, ...]
    num_candidates: int

    @property
    def settings(self) -> dict[str, object]:
        config = self.plan.config
        methods = {"mesh.expert": config.expert, "mesh.expert_method": config.mesh.expert_method}
        return chosen_settings(config) | methods


def chosen_settings(config: RunConfig) -> dict[str, object]:
    """Return the settings that may be `auto`, by key, with their values in `config`.

    `mesh.expert` is included only if it is `auto` or the model spec declares experts.
    """
    has_experts = config.spec.declares_experts(config.model) or config.mesh.expert == AUTO
    return {
        "fsdp.reshard_after_forward": config.fsdp.reshard_after_forward,
        "train.activation_checkpoint": config.train.activation_checkpoint,
        "train.micro_batch_size": config.train.micro_batch_size,
        "mesh.context": config.mesh.context,
        "train.offload_activations": config.train.offload_activations,
        **({"mesh.expert": config.mesh.expert} if has_experts else {}),
    }


def settings_to_show(config: RunConfig) -> dict[str, object]:
    """Return the entries of `chosen_settings` that are worth mentioning: offloading only if it is used."""
    settings = chosen_settings(config)
    if settings["train.offload_activations"] == "none":
        del settings["train.offload_activations"]
    return settings


def uses_auto(config: RunConfig) -> bool:
    """Return whether any setting is `auto`."""
    return AUTO in chosen_settings(config).values()


def fastest_choice(config: RunConfig, mesh: MeshShape, machine: Machine) -> PlannedChoice:
    """Return the fastest choice of the `auto` settings in `config` that fits `machine`.

    Among sizes of context-parallel or expert-parallel groups, it takes the smallest within the time tolerance of the
    fastest.  Context-parallel groups that span nodes are tried only if nothing else fits.

    Raises NothingFits if no choice fits; its message lists changes to other settings that would help.
    """
    try:
        return _with_context(config, mesh, machine, Probe(config, machine.device_type, machine.imbalance))
    except _DoesNotFit as error:
        # The message is built only once, since each change that it suggests needs another plan.
        raise NothingFits(_nothing_fits(config, error.smallest), error.smallest) from None


class _DoesNotFit(Exception):
    """Raised if no combination of some settings fits.  `smallest` is the candidate that needs the least memory."""

    def __init__(self, smallest: Plan) -> None:
        super().__init__()
        self.smallest = smallest


def _with_context(config: RunConfig, mesh: MeshShape, machine: Machine, probe: Probe) -> PlannedChoice:
    """Return the best choice over all sizes of context-parallel groups, if that setting is `auto`."""
    if config.mesh.context != AUTO:
        return _with_experts(config, mesh, machine, probe)
    per_node = machine.rates.ranks_per_node
    choices = context_choices(config, mesh, per_node)
    within_node = [candidate for candidate in choices if per_node % candidate.context == 0]
    across_nodes = [candidate for candidate in choices if per_node % candidate.context]
    return _smallest_near_fastest((within_node, across_nodes), mesh, machine, probe)


def _with_experts(config: RunConfig, mesh: MeshShape, machine: Machine, probe: Probe) -> PlannedChoice:
    """Return the best choice over all sizes of expert-parallel groups, if that setting is `auto`."""
    if config.mesh.expert != AUTO:
        return _Search(config, mesh, machine, probe.with_config(config)).best()
    return _smallest_near_fastest((possible_choices(config, mesh, machine.rates.ranks_per_node),), mesh, machine, probe)


def _smallest_near_fastest(
    groups: Iterable[Sequence[RunConfig]], mesh: MeshShape, machine: Machine, probe: Probe
) -> PlannedChoice:
    """Return the first choice, in the given order, that is within the time tolerance of the fastest.

    A group of configurations is tried only if nothing fits in the groups before it.
    """
    fitting: list[PlannedChoice] = []
    smallest: list[Plan] = []
    for group in groups:
        for candidate in group if not fitting else []:
            try:
                fitting.append(_with_experts(candidate, mesh, machine, probe))
            except _DoesNotFit as error:
                smallest.append(error.smallest)
    if not fitting:
        raise _DoesNotFit(min(smallest, key=lambda plan: plan.memory.peak.total))
    fastest_s = min(choice.plan.time.total_s for choice in fitting)
    best = next(choice for choice in fitting if choice.plan.time.total_s <= (1 + _TIME_TOLERANCE) * fastest_s)
    others = sorted((choice.plan for choice in fitting if choice is not best), key=lambda plan: plan.time.total_s)
    return PlannedChoice(best.plan, (*best.runners_up, *others)[:4], sum(choice.num_candidates for choice in fitting))


class _Search:
    """Searches the other `auto` settings of a configuration whose context and expert group sizes are fixed."""

    def __init__(self, config: RunConfig, mesh: MeshShape, machine: Machine, probe: Probe) -> None:
        self.config, self.mesh, self.machine, self._probe = config, mesh, machine, probe
        self.num_candidates = 0

    def best(self) -> PlannedChoice:
        fitting: list[Plan] = []
        smallest: Plan | None = None
        train = self.config.train
        rank_batch_size = train.global_batch_size // self.config.num_groups(self.mesh.num_ranks)
        sizes = [size for size in range(1, rank_batch_size + 1) if rank_batch_size % size == 0]
        if train.micro_batch_size != AUTO:
            sizes = [int(train.micro_batch_size)]
        policies = [train.activation_checkpoint]
        if train.activation_checkpoint == AUTO:  # least memory first
            policies = sorted(checkpointing_choices(self.config), key=("full", "selective", 2, 4, "none").index)
        fractions: list[float | Literal["none", "auto"]] = [train.offload_activations]
        if train.offload_activations == AUTO:  # least memory first; on a CPU there is no other memory to offload to
            fractions = [*(_OFFLOADED_FRACTIONS if self.machine.device_type == "cuda" else ()), "none"]
        for size in sizes:
            for policy in policies:  # if one policy does not fit, no later one does; the same holds for fractions
                num_fitting_before = len(fitting)
                for fraction in fractions:
                    settings = replace(
                        train, micro_batch_size=size, activation_checkpoint=policy, offload_activations=fraction
                    )
                    plans = list(self._with_resharding(settings))
                    smallest = min([*plans, *([smallest] if smallest else [])], key=lambda plan: plan.memory.peak.total)
                    if not any(plan.fits for plan in plans):
                        break
                    fitting += [plan for plan in plans if plan.fits]
                if len(fitting) == num_fitting_before:
                    break
        if not fitting:
            assert smallest is not None
            raise _DoesNotFit(smallest)
        fitting += self._tune_units(min(fitting, key=lambda plan: plan.time.total_s))
        fastest_s = min(plan.time.total_s for plan in fitting)
        as_fast = [plan for plan in fitting if plan.time.total_s <= (1 + _TIME_TOLERANCE) * fastest_s]
        best = min(as_fast, key=lambda plan: plan.memory.peak.total)
        runners_up: list[Plan] = []  # the next best, ignoring differences in the number of unsharded units
        families = {_family(best)}
        for plan in sorted(fitting, key=lambda plan: plan.time.total_s):
            if _family(plan) not in families and len(runners_up) < 4:
                families.add(_family(plan))
                runners_up.append(plan)
        return PlannedChoice(self._simplify(best), tuple(runners_up), self.num_candidates)

    def _plan(self, train: TrainSection, reshard: Resharding) -> Plan:
        self.num_candidates += 1
        config = replace(self.config, fsdp=replace(self.config.fsdp, reshard_after_forward=reshard), train=train)
        return make_plan(config, self.mesh, self.machine, self._probe)

    def _with_resharding(self, train: TrainSection) -> Iterator[Plan]:
        setting = self.config.fsdp.reshard_after_forward
        if setting != AUTO:
            yield self._plan(train, setting)
            return
        for entry in self._resharding_choices:
            uniform = self._plan(train, [entry] * self._probe.num_units)
            yield uniform
            if uniform.fits:
                yield from self._leave_last_unsharded(uniform, entry)

    @cached_property
    def _resharding_choices(self) -> list[UnitResharding]:
        """The alternatives to `never` for one unit: reshard fully after the forward pass, or to groups of n ranks."""
        shard, node = self.mesh.shard, self.machine.rates.ranks_per_node
        sizes = {n for n in (2, 4, 8, 16, node) if n < shard and shard % n == 0}
        return ["always", *sorted(sizes, reverse=True)]

    def _leave_last_unsharded(self, uniform: Plan, entry: UnitResharding) -> Iterator[Plan]:
        """Yield the plan that leaves as many of the last units unsharded as fit; nothing if not even one fits."""
        num_units = uniform.trace.root

        low, high = 0, num_units
        best: Plan | None = None
        while low < high:
            middle = (low + high + 1) // 2
            reshard: list[UnitResharding] = [entry] * (num_units - middle) + ["never"] * middle
            plan = self._plan(uniform.config.train, reshard)
            if plan.fits:
                low, best = middle, plan
            else:
                high = middle - 1
        if best is not None:
            yield best

    def _tune_units(self, plan: Plan) -> list[Plan]:
        """Change one unit at a time for as long as that makes the step faster; return the successive plans."""
        if self.config.fsdp.reshard_after_forward != AUTO or plan.trace.root > _MAX_UNITS:
            return []
        plans = [plan]
        improves = True
        while improves:
            improves = False
            for unit in range(plan.trace.root):
                reshard: list[UnitResharding] = _as_list(plans[-1])
                entries: list[UnitResharding] = ["never", *self._resharding_choices]
                for entry in entries:
                    if entry == reshard[unit]:
                        continue
                    changed: list[UnitResharding] = [*reshard[:unit], entry, *reshard[unit + 1 :]]
                    other = self._plan(plan.config.train, changed)
                    if other.fits and other.time.total_s < (1 - _MIN_IMPROVEMENT) * plans[-1].time.total_s:
                        plans.append(other)
                        improves = True
        return plans[1:]

    def _simplify(self, plan: Plan) -> Plan:
        """Return the plan with a single value for resharding in place of a list of equal entries."""
        entries = _as_list(plan)
        if len(set(entries)) > 1:
            return plan
        entry: Resharding = "default" if entries[:1] in ([], ["always"]) else entries[0]
        return self._plan(plan.config.train, entry)


def _nothing_fits(config: RunConfig, smallest: Plan) -> str:
    settings = ", ".join(f"{key}=auto" for key, value in chosen_settings(config).items() if value == AUTO)
    least = ", ".join(f"{key}={format_setting(value)}" for key, value in settings_to_show(smallest.config).items())
    lines = [
        f"{settings}: nothing fits {smallest.machine.memory_gib:.4g} GiB; the smallest candidate, {least}, needs "
        f"{smallest.needed_gib:.4g} GiB"
    ]
    lines += [f"  {line}" for line in remedies(smallest)] or ["  no single change of other settings would be enough"]
    return "\n".join(lines)


def remedies(plan: Plan, limit: int = 2) -> list[str]:
    """Return descriptions of the `limit` cheapest changes that would make `plan` fit.

    Changes that need fewer ranks come first.  Among changes with the same number of ranks, those that round weights or
    moments come last; otherwise the device time per token decides.
    """
    fitting = []
    for change, config, mesh in _changes(plan):
        has_same_trace = _traced_settings(config) == _traced_settings(plan.config)
        changes_rounding = (
            config.train.weights_dtype != plan.config.train.weights_dtype or config.optim != plan.config.optim
        )
        changes_rounding = changes_rounding or config.lora != plan.config.lora
        try:
            other = make_plan(config, mesh, plan.machine, plan.probe if has_same_trace else None)
        except UserError:  # for example, rows whose length cannot be packed
            continue
        if other.fits:
            cost = other.time.total_s * mesh.num_ranks / other.tokens
            text = f"{change}: {other.needed_gib:.2f} GiB, {other.time.total_s:.3g} s per step"
            fitting.append((mesh.num_ranks, changes_rounding, cost, text))
    return [f"would fit: {text}" for *_, text in sorted(fitting)[:limit]]


def _traced_settings(config: RunConfig) -> tuple[object, ...]:
    """Return the settings in `_changes` that a `Probe` depends on: dtypes, and groups of ranks in the shard axis."""
    dtypes = config.fsdp.param_dtype, config.train.weights_dtype, config.optim.state_dtype
    return *dtypes, config.lora.base_dtype, config.context, config.expert, config.mesh.expert_method


def _changes(plan: Plan) -> Iterator[tuple[str, RunConfig, MeshShape]]:
    config, mesh = plan.config, plan.mesh
    train, fsdp = config.train, config.fsdp
    if train.activation_checkpoint != "full":
        yield "train.activation_checkpoint=full", _with_train(config, activation_checkpoint="full"), mesh
    if plan.machine.device_type == "cuda" and offloaded_fraction(train.offload_activations) < 1:
        yield "train.offload_activations=1", _with_train(config, offload_activations=1), mesh
        if train.activation_checkpoint != "full":
            both = _with_train(config, activation_checkpoint="full", offload_activations=1)
            yield "train.activation_checkpoint=full with train.offload_activations=1", both, mesh
    rank_batch_size = train.global_batch_size // config.num_groups(mesh.num_ranks)
    for size in {1, rank_batch_size} - {int(train.micro_batch_size)}:
        yield f"train.micro_batch_size={size}", _with_train(config, micro_batch_size=size), mesh
    if fsdp.reshard_after_forward not in ("always", "default"):
        always = replace(config, fsdp=replace(fsdp, reshard_after_forward="always"))
        yield "fsdp.reshard_after_forward=always", always, mesh
    if fsdp.param_dtype == "float32":
        half = replace(config, fsdp=replace(fsdp, param_dtype="bfloat16"))
        yield "fsdp.param_dtype=bfloat16", half, mesh
    if config.optim.name == "adamw":
        if train.weights_dtype == "float32":
            yield "train.weights_dtype=bfloat16", _with_train(config, weights_dtype="bfloat16"), mesh
        if config.optim.state_dtype == "float32":
            moments = replace(config, optim=replace(config.optim, state_dtype="bfloat16"))
            yield "optim.state_dtype=bfloat16", moments, mesh
    for packed in ("fp8", "nf4") if config.lora.rank and not config.lora.packs else ():
        yield f"lora.base_dtype={packed}", replace(config, lora=replace(config.lora, base_dtype=packed)), mesh
    if not fsdp.cpu_offload and plan.machine.device_type == "cuda":
        yield "fsdp.cpu_offload=true", replace(config, fsdp=replace(fsdp, cpu_offload=True)), mesh
    if mesh.replicate > 1:
        yield f"mesh.replicate=1 (shard {mesh.num_ranks})", config, MeshShape(1, mesh.num_ranks)
    if fsdp.accumulate == "unsharded" and plan.num_micro_batches > 1:
        shards = replace(config, fsdp=replace(fsdp, accumulate="sharded"))
        yield "fsdp.accumulate=sharded", shards, mesh
    per_node = plan.machine.rates.ranks_per_node
    for split in context_choices(config, mesh, per_node) if config.spec.context else []:
        if config.context < split.context and per_node % split.context == 0:
            yield f"mesh.context={split.context}", split, mesh
    for divided in possible_choices(config, mesh, per_node) if config.spec.declares_experts(config.model) else []:
        if config.expert < divided.expert:
            method = divided.mesh.expert_method
            yield f"mesh.expert={divided.expert} mesh.expert_method={method}", divided, mesh
    for factor in (2, 4, 8, 16, 32, 64, 128, 256):
        larger = MeshShape(mesh.replicate, mesh.shard * factor)
        sequences = config.num_groups(larger.num_ranks) * int(train.micro_batch_size)
        batch = -(-train.global_batch_size // sequences) * sequences
        change = f"{larger.num_ranks} ranks (mesh.shard={larger.shard})"
        change += f" with train.global_batch_size={batch}" if batch != train.global_batch_size else ""
        yield change, _with_train(config, global_batch_size=batch), larger


def _with_train(config: RunConfig, **train: object) -> RunConfig:
    return replace(config, train=replace(config.train, **train))  # type: ignore[arg-type]


def _as_list(plan: Plan) -> list[Any]:
    setting = plan.config.fsdp.reshard_after_forward
    return list(setting) if isinstance(setting, list) else [setting] * plan.trace.root


def _family(plan: Plan) -> tuple[object, ...]:
    train = plan.config.train
    resharding = tuple(sorted({str(entry) for entry in _as_list(plan)}))
    return train.micro_batch_size, train.activation_checkpoint, train.offload_activations, resharding


def format_setting(value: object) -> str:
    """Format a setting, with runs of equal entries of a list abbreviated: [always x 30, never x 4]."""
    if not isinstance(value, list):
        return str(value)
    runs: list[list[object]] = []
    for entry in value:
        if runs and runs[-1][0] == entry:
            runs[-1][1] = int(str(runs[-1][1])) + 1
        else:
            runs.append([entry, 1])
    return "[" + ", ".join(f"{entry} x {count}" if count != 1 else f"{entry}" for entry, count in runs) + "]"
