"""The state of a run (`TrainState`): everything that a resume restores.

State that is not registered here is not restored.  A subclass of Trainer that has a random generator, or an object with
`state_dict` and `load_state_dict`, must register it with `self.state.add("name", thing)`, or exclude it with
`self.state.leave_out(thing)`.  Otherwise `Trainer.fit` raises an error before the first step; in a custom loop, the
first save raises it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from trainer.checkpoint.compare import tensor_differences
from trainer.checkpoint.layout import StoredTensor
from trainer.checkpoint.state_parts import Stateful, StatePart
from trainer.data.loader import TrainLoader
from trainer.distributed.channel import Channel
from trainer.errors import UserError
from trainer.metrics.step_metrics import SkipCounter
from trainer.model.parameters import local, mesh_of, num_writes, tied_names
from trainer.optim.ema import WeightAverage
from trainer.optim.optimizer import Optimizer
from trainer.weights.adapters import BASE, BaseWeights

EMA = "ema"
"""Name of the state part that holds the average of the weights."""

MAX_PLAUSIBLE_WEIGHT = 2.0**64
"""A trained weight of at least this magnitude counts as an error: its square overflows float32."""


class TrainState:
    """The state of a run: counters, weights, optimizer, position in the data, random states, and registered parts."""

    def __init__(
        self,
        owner: object,
        model: nn.Module,
        optimizer: Optimizer,
        skips: SkipCounter,
        random_state: RandomState,
        base: BaseWeights | None = None,
    ) -> None:
        """base: the frozen weights under adapters, or None.  Checkpoints leave out the weights in `base.names`."""
        self._owner = owner
        self.step = 0
        self.tokens = 0
        self.eval_pending = False
        """True if the evaluation at this step was interrupted; `fit` repeats the evaluation after the next start."""
        self.evaluation: dict[str, float] = {}
        """The finite results of this step's evaluation (the losses and `eval.metric`), keyed by field name; empty until
        the evaluation has run."""
        self.model, self.random, self.skips = model, random_state, skips
        names = {id(p): clean_name(name) for name, p in model.named_parameters()}
        self.parts: dict[str, Stateful] = {
            "model": ModelState(model, base.names if base else ()),
            "optimizer": OptimizerState(optimizer, names),
            "counters": _Counters(self),
            "skipped_updates": skips,
        }
        """Parts whose values are the same on all ranks, or sharded (DTensors), so they can be restored on any mesh."""
        self.per_rank_parts: dict[str, Stateful] = {"random": random_state}
        """Parts that differ between ranks, restored only on the same number of ranks.  On a different number, parts
        with a `restart` method are restarted, and a part without one prevents the run from resuming."""
        if base is not None:
            self.parts[BASE] = base
        self._registered: list[object] = [model, *optimizer.parts, optimizer, skips, random_state]
        self._first_fingerprints: dict[int, list[tuple[object, list[float]]]] = {}

    @property
    def magnitude_limits(self) -> dict[str, float]:
        """Each weight's magnitude limit, by key.  No checkpoint with a weight that reaches its limit is published."""
        saved = self.parts["model"].state_dict()
        named = ((clean_name(name), parameter) for name, parameter in self.model.named_parameters())
        return {
            f"model.{name}": MAX_PLAUSIBLE_WEIGHT if p.requires_grad else math.inf for name, p in named if name in saved
        }

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name, tied ones once."""
        named = self.model.named_parameters()
        return {clean_name(name): parameter for name, parameter in named if parameter.requires_grad}

    @property
    def num_skipped(self) -> int:
        """Number of consecutive skipped steps, the same on all ranks.  Above 0, the weights may be bad."""
        return self.skips.in_a_row

    def add(self, name: str, part: Any, per_rank: bool = False) -> None:
        """Save and restore `part` under `name`.

        `part` is an object with `state_dict` and `load_state_dict`, or a random generator.  Its state may contain
        DTensors, which are saved sharded; everything else must be the same on all ranks.  With `per_rank`, each
        rank saves its own state, which is restored only on the same number of ranks.  Raises ValueError if the name is
        taken, TypeError for other objects.
        """
        if name in {*self.parts, *self.per_rank_parts}:
            raise ValueError(f"TrainState already has a part named {name!r}")
        self._registered.append(part)
        parts = self.per_rank_parts if per_rank else self.parts
        parts[name] = part if per_rank and _is_stateful(part) else _as_part(part)

    def add_loaders(self, loader: object, eval_loader: object, channel: Channel) -> None:
        """Save and restore the position in the training data; evaluation data has no position.  One broadcast."""
        if isinstance(loader, TrainLoader):
            loader.fingerprint = channel.broadcast(loader.fingerprint)
            self.add("loader", loader)
        elif hasattr(loader, "state_dict"):
            self.add("loader", loader, per_rank=True)
        self.leave_out(eval_loader)

    def advance(self, num_targets: int) -> None:
        """Count one completed step."""
        self.step += 1
        self.tokens += num_targets
        self.evaluation = {}

    def record_evaluation(self, record: Mapping[str, Any], metric: str) -> None:
        """Record this step's evaluation results that are finite: the losses, and `metric` (that is, `eval.metric`)."""
        losses = {n: value for n, value in record.items() if n in ("loss", metric) or n.startswith("loss_")}
        self.evaluation = {k: v for k, v in losses.items() if isinstance(v, float) and math.isfinite(v)}

    def leave_out(self, *things: object) -> None:
        """Exclude objects that need not be restored, for example because the configuration determines them."""
        self._registered += things

    def check_complete(self) -> None:
        """Raise UserError if an attribute of the owner, a Trainer, holds state that is neither registered nor left out.

        A module without trainable parameters, such as a frozen teacher, counts as state only if it changes, as an
        average does.
        """
        known_ids = {id(thing) for thing in self._registered} | {
            id(p) for p in (*self.parts.values(), *self.per_rank_parts.values())
        }
        forgotten = {
            name: thing
            for name, thing in _attributes(self._owner)
            if not isinstance(thing, type)
            and (_is_stateful(thing) or isinstance(thing, tuple(_GENERATORS)))
            and id(thing) not in known_ids
            and not self._is_constant(thing)
        }
        if forgotten:
            class_name = type(self._owner).__name__
            lines = [
                f"  {class_name}.{name} ({type(thing).__name__}): self.state.add({name!r}, self.{name})"
                for name, thing in forgotten.items()
            ]
            raise UserError(
                "this state would be lost at the first restart; register each in the constructor, or exclude it "
                "with self.state.leave_out(...):\n" + "\n".join(lines)
            )

    def _is_constant(self, thing: object) -> bool:
        if not isinstance(thing, nn.Module) or any(p.requires_grad for p in thing.parameters()):
            return False
        current = [_cheap_fingerprint(tensor) for tensor in (*thing.parameters(), *thing.buffers())]
        first = self._first_fingerprints.setdefault(id(thing), current)
        # While an FSDP unit is unsharded it has different tensors, which cannot be compared.
        return not any(a != b for (form, a), (other_form, b) in zip(first, current, strict=False) if form == other_form)


def _cheap_fingerprint(tensor: torch.Tensor) -> tuple[object, list[float]]:
    """Return a tensor's type and local shape, and a fingerprint: its number of in-place writes and a few of its values.

    Writes to `.data` are not counted.
    """
    local_tensor = local(tensor.detach())
    values = local_tensor.real.flatten()[:: max(1, local_tensor.numel() // 16)]
    return (type(tensor), tuple(local_tensor.shape)), [
        num_writes(tensor) + num_writes(local_tensor),
        *values.double().nan_to_num().tolist(),
    ]


def _attributes(owner: object) -> Iterator[tuple[str, Any]]:
    """Yield an object's attributes, and the items of its collections, each with the code that accesses it."""
    for name, value in vars(owner).items():
        yield name, value
        if isinstance(value, (list, tuple)):
            yield from ((f"{name}[{number}]", item) for number, item in enumerate(value))
        elif isinstance(value, dict):
            yield from ((f"{name}[{key!r}]", item) for key, item in value.items())


def _is_stateful(thing: object) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def _as_part(part: Any) -> Stateful:
    if isinstance(part, nn.Module):
        return ModelState(part)
    if isinstance(part, torch.optim.Optimizer):
        numbered = enumerate(p for group in part.param_groups for p in group["params"])
        return OptimizerState(Optimizer(part), {id(p): str(number) for number, p in numbered})
    if _is_stateful(part):
        stateful: Stateful = part
        return stateful
    for kind, (read, write) in _GENERATORS.items():
        if isinstance(part, kind):
            return _Generator(part, read, write)
    raise TypeError(f"{type(part).__name__} has no state_dict and load_state_dict, and is not a random generator")


_GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.Generator: (
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
}


class _Generator(StatePart):
    def __init__(self, generator: Any, read: Callable[[Any], Any], write: Callable[[Any, Any], Any]) -> None:
        self._generator, self._read, self._write = generator, read, write

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._read(self._generator)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._write(self._generator, state["state"])


_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def clean_name(name: str) -> str:
    """Return a parameter's name without the prefixes that module wrappers add."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


class ModelState(StatePart):
    """A model's parameters and persistent buffers by name, except those in `stored_elsewhere`.

    A tied parameter appears once, under its first name.
    """

    def __init__(self, model: nn.Module, stored_elsewhere: Collection[str] = ()) -> None:
        self.model = model
        self._excluded_names = {alias for _, *aliases in tied_names(model) for alias in aliases} | set(stored_elsewhere)

    def state_dict(self) -> dict[str, Any]:
        # keep_vars avoids detaching each tensor, which takes about 50 us per DTensor.
        full_state = self.model.state_dict(keep_vars=True)
        saved = {clean_name(name): value for name, value in full_state.items() if name not in self._excluded_names}
        return {
            n: _for_checkpoint(value, value) if isinstance(value, nn.Parameter) else value for n, value in saved.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        current = self.state_dict()
        extra_states = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                _copy_unless_shared(current[name], value)
            else:
                extra_states[name] = value
        for path, module in self.model.named_modules():
            key = clean_name(f"{path}._extra_state" if path else "_extra_state")
            if key in extra_states:
                module.set_extra_state(extra_states[key])

    def differences(self, plain: Any, stored: Mapping[str, StoredTensor]) -> list[str]:
        tensors = {name: value for name, value in self.state_dict().items() if isinstance(value, torch.Tensor)}
        return list(tensor_differences(tensors, stored))

    def may_differ(self, key: str) -> bool:
        """Return True for buffers, such as running means of one rank's data."""
        return key in {clean_name(name) for name, _ in self.model.named_buffers()}


def _for_checkpoint(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, which belongs to `parameter`, in the form that checkpoints store; copies nothing.

    If `parameter` is replicated and has the same shape, this is a replicated DTensor, so that the ranks share the work
    of writing it and need not compare their values.
    """
    if isinstance(tensor, DTensor):
        return tensor
    mesh = None if isinstance(parameter, DTensor) else mesh_of(parameter)
    if mesh is None or tensor.shape != parameter.shape:
        # Detach, since the type Parameter would be stored, while copies for background saves are plain tensors.
        return tensor.detach()
    return DTensor.from_local(tensor.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)


def _copy_unless_shared(target: torch.Tensor, loaded: torch.Tensor) -> None:
    """Copy a loaded tensor to `target`, unless it was read in place, so that they share memory."""
    if local(target).data_ptr() != local(loaded).data_ptr():
        target.detach().copy_(loaded)


def _algorithm(part: torch.optim.Optimizer) -> str:
    """Return the name of an optimizer's algorithm, by default its class name, to compare with the checkpoint's."""
    return getattr(part, "algorithm", type(part).__name__)


class OptimizerState(StatePart):
    """The optimizer's moments, by parameter name.

    Hyperparameters come from the configuration, not from the checkpoint, unless the optimizer itself changed them
    during training.  The learning rate always comes from the schedule.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self.optimizer, self._names = optimizer, set(names.values())
        self._initial_hyperparameters = optimizer.hyperparameters()
        self._parameters = {
            names.get(id(p), f"unnamed.{number}"): (part, group, p)
            for part in optimizer.parts
            for group in part.param_groups
            for number, p in enumerate(group["params"])
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "state": {
                name: {
                    field: _for_checkpoint(value, p) if isinstance(value, torch.Tensor) and p.ndim else value
                    for field, value in part.state[p].items()
                }
                for name, (part, _, p) in self._parameters.items()
                if p in part.state
            },
            "classes": {name: _algorithm(part) for name, (part, _, _) in self._parameters.items()},
            "parameters": {name: _kind_of(p) for name, (_, _, p) in self._parameters.items()},
            "groups": self.optimizer.hyperparameters(),
            "built": self._initial_hyperparameters,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, values in state["state"].items():
            part, _, parameter = self._parameters[name]
            moments = part.state[parameter]
            for field, value in values.items():
                if isinstance(value, torch.Tensor) and isinstance(moments.get(field), torch.Tensor):
                    _copy_unless_shared(moments[field], value)
                else:
                    moments[field] = value
        groups = [group for part in self.optimizer.parts for group in part.param_groups]
        if len(groups) == len(state["groups"]):
            for group, stored, initial in zip(groups, state["groups"], state["built"], strict=True):
                group.update({k: v for k, v in stored.items() if k not in ("lr", "initial_lr") and v != initial.get(k)})

    def differences(self, plain: Any, stored: Mapping[str, StoredTensor]) -> list[str]:
        changed: dict[tuple[str, str], list[str]] = {}
        for name, (part, _, _) in self._parameters.items():
            old, new = plain["classes"].get(name), _algorithm(part)
            if old is None:
                if name in self._names:
                    changed.setdefault(("none", new), []).append(name)
            elif old != new:
                changed.setdefault((old, new), []).append(name)
        for name in plain["classes"]:
            if name not in self._parameters and name in self._names:
                changed.setdefault((plain["classes"][name], "none"), []).append(name)
        lines = [
            f"optimizer: {old} in the checkpoint, {new} now, for {', '.join(names)}"
            for (old, new), names in changed.items()
        ]
        mismatched = [
            name
            for name, (_, _, parameter) in self._parameters.items()
            if plain["parameters"].get(name, _kind_of(parameter)) != _kind_of(parameter)
        ]
        if mismatched:
            lines.append(f"optimizer: holds moments of parameters with another shape or dtype: {', '.join(mismatched)}")
        return lines

    def prepare(self, stored: Mapping[str, StoredTensor]) -> None:
        """Allocate the moments that the checkpoint has, sharded like their parameters, and drop all others.

        An optimizer has no moments before its first step, and torch's `load_state_dict` expects unsharded ones.
        """
        stored_fields: dict[str, dict[str, StoredTensor]] = {}
        for key, tensor in stored.items():
            if key.startswith("state."):
                name, _, field = key.removeprefix("state.").rpartition(".")
                stored_fields.setdefault(name, {})[field] = tensor
        for name, (part, group, parameter) in self._parameters.items():
            moments = part.state[parameter]
            fields = stored_fields.get(name, {})
            for field in [field for field in moments if field not in fields]:
                del moments[field]
            for field, tensor in fields.items():
                if field not in moments:
                    moments[field] = _moment_like(parameter, group, field, tensor)
            if not moments:
                del part.state[parameter]


def _kind_of(parameter: torch.Tensor) -> str:
    return f"{str(parameter.dtype).removeprefix('torch.')} {'x'.join(map(str, parameter.shape))}"


def _moment_like(parameter: torch.Tensor, group: Mapping[str, Any], field: str, stored: StoredTensor) -> torch.Tensor:
    if stored.shape == tuple(parameter.shape):
        return torch.empty_like(parameter.detach(), dtype=stored.dtype)
    if stored.shape and stored.shape[:-1] == tuple(parameter.shape[:-1]) and stored.shape[-1] < parameter.shape[-1]:
        row_scales = parameter.detach()[..., : stored.shape[-1]]
        return torch.empty_like(row_scales, dtype=stored.dtype)
    on_device = field != "step" or group.get("fused") or group.get("capturable")
    device = parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device
    return torch.empty(stored.shape, dtype=stored.dtype, device=device if on_device else "cpu")


class AverageState(StatePart):
    """The average of the weights, by parameter name; no weights without `train.ema`."""

    def __init__(self, average: WeightAverage) -> None:
        self.average = average

    def state_dict(self) -> dict[str, Any]:
        average = self.average
        if not average.has_started:  # before the first step, the average is the weights
            average.copy_weights()
        weights = {name: _for_checkpoint(tensor, average.parameters[name]) for name, tensor in average.averages.items()}
        return {"has_started": average.has_started, "weights": weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average.has_started = state["has_started"]
        for name, tensor in self.average.averages.items():
            _copy_unless_shared(tensor, state["weights"][name])

    def differences(self, plain: Any, stored: Mapping[str, StoredTensor]) -> list[str]:
        names = {f"weights.{name}" for name in self.average.averages}
        if names == set(stored):
            return []
        where = (
            "only in the checkpoint" if not names else "not in the checkpoint" if not stored else "of different weights"
        )
        return [f"train.ema: the average is {where} (allow it: checkpoint.allow_changes=[state.{EMA}])"]


class _Counters(StatePart):
    def __init__(self, state: TrainState) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        state = self.state
        return {
            "tokens": state.tokens,
            "eval_pending": state.eval_pending,
            "evaluation": dict(state.evaluation),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.tokens = state["tokens"]
        self.state.eval_pending = state["eval_pending"]
        self.state.evaluation = state["evaluation"]


# ---------------------------------------------------------------------------------------------------------------
# Random states


def seed_everything(seed: int, rank: int, step: int = 0) -> None:
    """Seed Python, numpy and torch, differently on each rank, so that dropout differs between ranks."""
    combined = int(np.random.SeedSequence([seed, rank, step] if step else [seed, rank]).generate_state(1)[0])
    random.seed(combined)
    np.random.seed(combined)
    torch.manual_seed(combined)


class RandomState:
    """The states of this rank's random generators, as one part of the state."""

    def __init__(self, seed: int, rank: int) -> None:
        self._seed, self._rank = seed, rank

    def restart(self, step: int) -> None:
        """Reseed for `step`, because there is no stored state, so that the noise of the first steps is not repeated."""
        seed_everything(self._seed, self._rank, step)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
