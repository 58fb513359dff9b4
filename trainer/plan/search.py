"""Resolves settings that are `auto` to the fastest values that fit in memory, and says why.

The search evaluates candidates with the planner, not with trial launches.  A candidate takes milliseconds, except that
each combination of micro-batch size, checkpointing, offloading, and context, tensor and expert group sizes is traced
once.

A unit that is not resharded after the forward pass saves one all-gather, but stays in memory until its backward pass.
The last units in the forward pass stay for the shortest time, so the search leaves the last k units unsharded, for the
largest k that fits.

Of the plans that are about equally fast, it takes the one with the smallest groups of ranks; of these, the one that
needs the least memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from trainer.config.parallel import MeshShape, group_choices, with_context, with_tensor
from trainer.config.rules import offloaded_fraction
from trainer.config.schema import AUTO, Resharding, RunConfig, TrainSection, UnitResharding
from trainer.errors import UserError
from trainer.model.network import build_network
from trainer.model.shard import checkpointing_choices, resolve_resharding
from trainer.model.tensor import split_parameters
from trainer.plan.experts import possible_choices
from trainer.plan.machine import Machine
from trainer.plan.plan import Plan, make_plan
from trainer.plan.probe import Probe

TIME_TOLERANCE = 0.005
"""Choices that are slower than the fastest by at most this fraction count as equally fast."""
_OFFLOADED_FRACTIONS = (1.0, 0.5, 0.25)
"""Fractions of the blocks whose activations `train.offload_activations=auto` tries to offload on a GPU."""


class NothingFits(UserError):
    """Raised if no combination of the `auto` settings fits.  `plan` is the candidate that needs the least memory."""

    def __init__(self, message: str, plan: Plan) -> None:
        super().__init__(message)
        self.plan = plan


@dataclass(frozen=True)
class Alternative:
    """The best candidate with another value of one `auto` setting."""

    value: object
    plan: Plan
    """The fastest plan with this value that fits; if none fits, the one that needs the least memory."""


@dataclass(frozen=True)
class PlannedChoice:
    """The plan with the resolved `auto` settings."""

    plan: Plan
    num_candidates: int
    alternatives: dict[str, tuple[Alternative, ...]]
    """By the key of each setting that was `auto`: the other values, those that fit first, the fastest of them first.

    Lists for `fsdp.reshard_after_forward`, which only differ in the number of units, are left out."""

    @property
    def settings(self) -> dict[str, object]:
        config = self.plan.config
        methods = {"mesh.expert": config.expert, "mesh.expert_method": config.mesh.expert_method}
        return chosen_settings(config) | methods


def _alternatives(chosen: Plan, candidates: Iterable[Plan], key: str) -> tuple[Alternative, ...]:
    by_value: dict[object, list[Plan]] = {}
    for plan in candidates:
        value = chosen_settings(plan.config)[key]
        if value != chosen_settings(chosen.config)[key] and not isinstance(value, list):
            by_value.setdefault(value, []).append(plan)
    found = [Alternative(value, _best(plans)) for value, plans in by_value.items()]
    return tuple(sorted(found, key=lambda other: (not other.plan.fits, other.plan.time.total_s)))


def _best(plans: Iterable[Plan]) -> Plan:
    """Return the fastest plan that fits; if none fits, the one that needs the least memory."""
    return min(plans, key=lambda plan: (not plan.fits, plan.time.total_s if plan.fits else plan.memory.peak.total))


def chosen_settings(config: RunConfig) -> dict[str, object]:
    """Return the settings that may be `auto`, by key, with their values in `config`."""
    return {
        "fsdp.reshard_after_forward": config.fsdp.reshard_after_forward,
        "train.activation_checkpoint": config.train.activation_checkpoint,
        "train.micro_batch_size": config.train.micro_batch_size,
        "mesh.context": config.mesh.context,
        "mesh.tensor": config.mesh.tensor,
        "mesh.expert": config.mesh.expert,
        "train.offload_activations": config.train.offload_activations,
    }


def settings_to_show(config: RunConfig) -> dict[str, object]:
    """Return the entries of `chosen_settings` that are worth mentioning.

    Offloading and `mesh.tensor` are mentioned only if they are used; `mesh.expert` if the model spec declares experts.
    """
    settings = chosen_settings(config)
    if settings["train.offload_activations"] == "none":
        del settings["train.offload_activations"]
    if settings["mesh.tensor"] == 1:
        del settings["mesh.tensor"]
    if not config.spec.declares_experts(config.model):
        del settings["mesh.expert"]
    return settings


def auto_settings(config: RunConfig) -> tuple[str, ...]:
    """Return the keys of the settings that are `auto`."""
    return tuple(key for key, value in chosen_settings(config).items() if value == AUTO)


def fastest_choice(config: RunConfig, mesh: MeshShape, machine: Machine) -> PlannedChoice:
    """Return the fastest choice of the `auto` settings in `config` that fits `machine`.

    Ranks that share sequences are on several nodes, with `mesh.context=auto`, only if nothing else fits.

    Raises NothingFits if no choice fits; its message lists changes to other settings that would help.  Raises UserError
    if every size of `mesh.tensor` with which the batch is legal leaves one of the model's matrices undivided.
    """
    probe = Probe(config, machine.device_type, machine.imbalance)
    per_node = machine.rates.ranks_per_node
    groups = _possible_groups(config, mesh, per_node)
    within_nodes = [each for each in groups if per_node % each.ranks_per_sample == 0 or config.mesh.context != AUTO]
    candidates: list[Plan] = []
    for choices in (within_nodes, [each for each in groups if each not in within_nodes]):
        for choice in choices:
            is_open = choice.mesh.expert == AUTO
            for each in possible_choices(choice, mesh, per_node) if is_open else [choice]:
                candidates += _Search(each, mesh, machine, probe.with_config(each)).candidates()
        if any(plan.fits for plan in candidates):
            break
    fitting = [plan for plan in candidates if plan.fits]
    if not fitting:
        smallest = _best(candidates)
        raise NothingFits(_nothing_fits(config, smallest), smallest)
    fastest_s = min(plan.time.total_s for plan in fitting)
    as_fast = [plan for plan in fitting if plan.time.total_s <= (1 + TIME_TOLERANCE) * fastest_s]
    best = min(as_fast, key=_preference)
    alternatives = {key: _alternatives(best, candidates, key) for key in auto_settings(config)}
    return PlannedChoice(best, len(candidates), alternatives)


def _preference(plan: Plan) -> tuple[int, ...]:
    """Return what decides between plans that are equally fast; the smallest is preferred."""
    config = plan.config
    return config.ranks_per_sample, config.tensor, config.expert, plan.memory.peak.total


def _possible_groups(config: RunConfig, mesh: MeshShape, ranks_per_node: int) -> list[RunConfig]:
    """Return those of `group_choices` whose `mesh.tensor` divides the model's matrices; `config` if nothing is auto.

    Raises UserError if there are none.
    """
    if AUTO not in (config.mesh.context, config.mesh.tensor):
        return [config]
    model = build_network(config)
    possible = []
    reason = None
    for choice in group_choices(config, mesh, ranks_per_node):
        try:
            if choice.tensor > 1:
                split_parameters(model, config.spec, choice.tensor)
            possible.append(choice)
        except UserError as error:
            reason = error
    if not possible and reason is not None:
        raise reason
    return possible


class _Search:
    """The candidates for a configuration whose context, tensor and expert group sizes are fixed."""

    def __init__(self, config: RunConfig, mesh: MeshShape, machine: Machine, probe: Probe) -> None:
        self._config = config
        self._mesh = mesh
        self._machine = machine
        self._probe = probe

    def candidates(self) -> list[Plan]:
        """Return the plans that were tried: of those that do not fit, only some."""
        tried: list[Plan] = []
        for size in self._micro_batch_sizes():
            found = self._with_recomputation(size)
            is_too_large = any(plan.fits for plan in tried) and not any(plan.fits for plan in found)
            tried += found
            if is_too_large:  # as would be the sizes after it
                break
        return tried

    def _micro_batch_sizes(self) -> list[int]:
        train = self._config.train
        if train.micro_batch_size != AUTO:
            return [int(train.micro_batch_size)]
        rank_batch_size = train.global_batch_size // self._config.num_groups(self._mesh.num_ranks)
        return [size for size in range(1, rank_batch_size + 1) if rank_batch_size % size == 0]

    def _with_recomputation(self, size: int) -> list[Plan]:
        setting = self._config.train.activation_checkpoint
        if setting != AUTO:
            return self._with_offloading(size, setting)
        tried: list[Plan] = []
        choices = checkpointing_choices(self._config)
        for policy in (policy for policy in ("full", 2, 4, "none") if policy in choices):
            found = self._with_offloading(size, policy)
            tried += found
            if not any(plan.fits for plan in found):  # nor would one that recomputes fewer blocks
                break
        # This may need more or less memory than recomputing some blocks fully.
        if "selective" in choices and any(plan.fits for plan in tried):
            tried += self._with_offloading(size, "selective")
        return tried

    def _fractions(self) -> list[float | Literal["none", "auto"]]:
        """Return the values of `train.offload_activations` to try, the one that needs the least memory first."""
        setting = self._config.train.offload_activations
        if setting != AUTO:
            return [setting]
        # A CPU has no other memory to offload to.
        return [*(_OFFLOADED_FRACTIONS if self._machine.device_type == "cuda" else ()), "none"]

    def _with_offloading(self, size: int, policy: int | str) -> list[Plan]:
        tried: list[Plan] = []
        for fraction in self._fractions():
            train = replace(
                self._config.train, micro_batch_size=size, activation_checkpoint=policy, offload_activations=fraction
            )
            found = list(self._with_resharding(train))
            tried += found
            if not any(plan.fits for plan in found):  # nor would one that offloads less
                break
        return tried

    def _with_resharding(self, train: TrainSection) -> Iterator[Plan]:
        setting = self._config.fsdp.reshard_after_forward
        if setting != AUTO:
            yield self._plan(train, setting)
            return
        for entry in self._resharding_choices:
            uniform = self._plan(train, entry)
            yield uniform
            if uniform.fits:
                yield from self._leave_last_unsharded(train, entry)

    @cached_property
    def _resharding_choices(self) -> list[UnitResharding]:
        """The alternatives to `never` for one unit: reshard fully after the forward pass, or to groups of n ranks.

        Groups are not possible if some parameters are on a mesh of their own.
        """
        if self._config.tensor > 1 or self._config.expert > 1:
            return ["always"]
        shard = self._mesh.shard
        node = self._machine.rates.ranks_per_node
        sizes = {n for n in (2, 4, 8, 16, node) if n < shard and shard % n == 0}
        return ["always", *sorted(sizes, reverse=True)]

    def _leave_last_unsharded(self, train: TrainSection, entry: UnitResharding) -> Iterator[Plan]:
        """Yield the plan that leaves as many of the last units unsharded as fit; nothing if not even one fits."""
        low = 0
        high = len(self._probe.unit_names)
        best: Plan | None = None
        while low < high:
            middle = (low + high + 1) // 2
            plan = self._plan(train, self._unsharded_from_the_end(middle, entry))
            if plan.fits:
                low = middle
                best = plan
            else:
                high = middle - 1
        if best is not None:
            yield best

    def _unsharded_from_the_end(self, num_unsharded: int, entry: UnitResharding) -> Resharding:
        """Return the setting that reshards all but the last units: one word, if there is one for it."""
        names = self._probe.unit_names
        entries: list[UnitResharding] = [entry] * (len(names) - num_unsharded)
        entries += ["never"] * num_unsharded
        for word in ("default", "never"):
            if resolve_resharding(word, names, self._mesh.shard) == resolve_resharding(
                entries, names, self._mesh.shard
            ):
                return word
        return entries

    def _plan(self, train: TrainSection, reshard: Resharding) -> Plan:
        config = replace(self._config, fsdp=replace(self._config.fsdp, reshard_after_forward=reshard), train=train)
        return make_plan(config, self._mesh, self._machine, self._probe)


def _nothing_fits(config: RunConfig, smallest: Plan) -> str:
    settings = ", ".join(f"{key}=auto" for key in auto_settings(config))
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
    groups = config.context, config.tensor, config.expert, config.mesh.expert_method
    return *dtypes, config.lora.base_dtype, *groups


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
    for split in _possible_groups(with_context(config, AUTO), mesh, per_node):
        if config.context < split.context and per_node % split.ranks_per_sample == 0:
            yield f"mesh.context={split.context}", split, mesh
    for split in _possible_groups(with_tensor(config, AUTO), mesh, per_node):
        if config.tensor < split.tensor and per_node % split.ranks_per_sample == 0:
            yield f"mesh.tensor={split.tensor}", split, mesh
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
