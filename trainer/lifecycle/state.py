"""TrainState: everything that a resume restores.

Anything not registered here is not restored.  A subclass of Trainer registers its own state with one line,
`self.state.add("name", thing)`, where the object has `state_dict` and `load_state_dict`.  State that it forgot to
register raises an error at the first save.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.checkpoint.layout import StoredTensor
from trainer.checkpoint.reader import tensor_differences
from trainer.checkpoint.state_parts import Stateful, StatePart
from trainer.data.loader import TrainLoader
from trainer.distributed.channel import Channel
from trainer.errors import UserError
from trainer.metrics.step_metrics import SkipCounter
from trainer.model.parameters import for_checkpoint, local, num_writes, tied_names
from trainer.optim.adamw import convert_moments
from trainer.optim.optimizer import AS_TORCHS, Optimizer
from trainer.weights.adapters import BASE, BaseWeights

MAX_PLAUSIBLE_WEIGHT = 2.0**64
"""No trained weight is this large: its square overflows float32, so the loss could not be finite."""


class TrainState:
    """The state of a run: counters, weights, optimizer, position in the data, random states."""

    def __init__(
        self,
        owner: object,
        model: nn.Module,
        optimizer: Optimizer,
        skips: SkipCounter,
        random_state: RandomState,
        base: BaseWeights | None = None,
    ) -> None:
        """`base`: the frozen weights beneath the adapters; checkpoints refer to them instead of storing them."""
        self._owner = owner
        self.step = 0
        self.tokens = 0
        self.zero_after_end = True
        """Whether a decay to zero reaches 0 one step after the last step.  False in runs of older versions, whose last
        step had learning rate 0."""
        self.eval_pending = False
        """True if the evaluation at this step was abandoned; `fit` repeats it after the next start."""
        self.evaluation: dict[str, float] = {}
        """This step's finite evaluation losses, by field; empty until it has been evaluated."""
        self.model, self.random, self.skips = model, random_state, skips
        names = {id(p): clean_name(name) for name, p in model.named_parameters()}
        self.parts: dict[str, Stateful] = {
            "model": ModelState(model, base.names if base else ()),
            "optimizer": OptimizerState(optimizer, names),
            "counters": _Counters(self),
            "skipped_updates": skips,
        }
        """Parts that are the same on all ranks, or sharded (DTensors).  They can be restored on any mesh."""
        self.per_rank_parts: dict[str, Stateful] = {"random": random_state}
        """Per-rank parts.  They are restored if the number of ranks is the same; otherwise those restart that can."""
        if base is not None:
            self.parts[BASE] = base
        self._known: list[object] = [model, *optimizer.parts, optimizer, skips, random_state]
        self._frozen: dict[int, list[tuple[object, list[float]]]] = {}

    @property
    def weights(self) -> dict[str, float]:
        """Magnitude limit of each parameter, by key.  To be published, values must be finite and below it."""
        kept = self.parts["model"].state_dict()
        named = ((clean_name(name), parameter) for name, parameter in self.model.named_parameters())
        return {
            f"model.{name}": MAX_PLAUSIBLE_WEIGHT if p.requires_grad else math.inf for name, p in named if name in kept
        }

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name; tied ones appear once."""
        named = self.model.named_parameters()
        return {clean_name(name): parameter for name, parameter in named if parameter.requires_grad}

    @property
    def num_skipped(self) -> int:
        """Number of consecutive steps skipped, the same on all ranks.  If it is above 0, the weights may be bad."""
        return self.skips.in_a_row

    def add(self, name: str, part: Any, per_rank: bool = False) -> None:
        """Save and restore `part` under `name`.

        `part` is an object with `state_dict` and `load_state_dict`, or a random generator.  Its state may contain
        DTensors, which are saved sharded; everything else must be the same on all ranks.  With `per_rank` each rank
        saves its own state, which is restored only on the same number of ranks.
        """
        if name in {*self.parts, *self.per_rank_parts}:
            raise ValueError(f"TrainState already has a part named {name!r}")
        self._known.append(part)
        where = self.per_rank_parts if per_rank else self.parts
        where[name] = part if per_rank and _is_stateful(part) else _as_part(part)

    def add_loaders(self, loader: object, eval_loader: object, channel: Channel) -> None:
        """Save and restore the position in the training data.  Evaluation has no position.  Collective."""
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

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """Record the losses of the evaluation at this step."""
        losses = {name: value for name, value in record.items() if name == "loss" or name.startswith("loss_")}
        self.evaluation = {k: v for k, v in losses.items() if isinstance(v, float) and math.isfinite(v)}

    def leave_out(self, *things: object) -> None:
        """Exclude objects that need not be restored, for example because they are rebuilt from the configuration."""
        self._known += things

    def check_complete(self) -> None:
        """Raise UserError if an attribute of the owner, a Trainer, has state that was not registered.

        A module without trainable parameters, such as a frozen teacher, is not state unless it is seen to change, as an
        average does.
        """
        known = {id(thing) for thing in self._known} | {
            id(p) for p in (*self.parts.values(), *self.per_rank_parts.values())
        }
        forgotten = {
            name: thing
            for name, thing in _attributes(self._owner)
            if not isinstance(thing, type)
            and (_is_stateful(thing) or isinstance(thing, tuple(_GENERATORS)))
            and id(thing) not in known
            and not self._is_constant(thing)
        }
        if forgotten:
            kind = type(self._owner).__name__
            lines = [
                f"  {kind}.{name} ({type(thing).__name__}): self.state.add({name!r}, self.{name})"
                for name, thing in forgotten.items()
            ]
            raise UserError(
                "this state would be lost at the first restart; register each in the constructor, or exclude it "
                "with self.state.leave_out(...):\n" + "\n".join(lines)
            )

    def _is_constant(self, thing: object) -> bool:
        if not isinstance(thing, nn.Module) or any(p.requires_grad for p in thing.parameters()):
            return False
        seen = [_glance(tensor) for tensor in (*thing.parameters(), *thing.buffers())]
        before = self._frozen.setdefault(id(thing), seen)
        # An unsharded FSDP unit has other tensors than a sharded one; these cannot be compared.
        return not any(a != b for (form, a), (other, b) in zip(before, seen, strict=False) if form == other)


def _glance(tensor: torch.Tensor) -> tuple[object, list[float]]:
    """Return a tensor's form, and a cheap fingerprint of its content.

    The fingerprint is its number of in-place writes (those to `.data` are not counted) and a few values.
    """
    own = local(tensor.detach())
    some = own.real.flatten()[:: max(1, own.numel() // 16)]
    return (type(tensor), tuple(own.shape)), [
        num_writes(tensor) + num_writes(own),
        *some.double().nan_to_num().tolist(),
    ]


def _attributes(owner: object) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object and the items of its lists and dictionaries, with their access expressions."""
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
    """Return a parameter's name without the prefixes of module wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


class ModelState(StatePart):
    """Parameters and persistent buffers by name, except those in `elsewhere`.

    A tied parameter appears once, under its first name.
    """

    def __init__(self, model: nn.Module, elsewhere: Collection[str] = ()) -> None:
        self.model = model
        self._left_out = {alias for _, *aliases in tied_names(model) for alias in aliases} | set(elsewhere)

    def state_dict(self) -> dict[str, Any]:
        # keep_vars avoids detaching each tensor, which costs some 50 us per DTensor.
        whole = self.model.state_dict(keep_vars=True)
        kept = {clean_name(name): value for name, value in whole.items() if name not in self._left_out}
        return {
            n: for_checkpoint(value, value) if isinstance(value, nn.Parameter) else value for n, value in kept.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        live = self.state_dict()
        extra = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                _take_over(live[name], value)
            else:
                extra[name] = value
        for path, module in self.model.named_modules():
            key = clean_name(f"{path}._extra_state" if path else "_extra_state")
            if key in extra:
                module.set_extra_state(extra[key])

    def differences(self, plain: Any, stored: Mapping[str, StoredTensor]) -> list[str]:
        own = {name: value for name, value in self.state_dict().items() if isinstance(value, torch.Tensor)}
        return list(tensor_differences(own, stored))

    def may_differ(self, key: str) -> bool:
        """Return True for buffers, such as running means of the data that a rank has seen."""
        return key in {clean_name(name) for name, _ in self.model.named_buffers()}


def _take_over(live: torch.Tensor, loaded: torch.Tensor) -> None:
    """Copy a loaded tensor, unless it was read directly into the live one."""
    if local(live).data_ptr() != local(loaded).data_ptr():
        live.detach().copy_(loaded)


def _algorithm(part: torch.optim.Optimizer) -> str:
    """Return the name of an optimizer's algorithm, which must match the checkpoint; by default its class name."""
    return getattr(part, "algorithm", type(part).__name__)


class OptimizerState(StatePart):
    """The optimizer's moments by parameter name.  Hyperparameters come from the configuration, not the checkpoint.

    However, hyperparameters that the optimizer itself changed during training are state and are restored, except the
    learning rate, which belongs to the schedule.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self.optimizer, self._names, self._all_names = optimizer, names, set(names.values())
        self._note_parameters()

    def _note_parameters(self) -> None:
        self._built = self.optimizer.hyperparameters()
        self._parameters = {
            self._names.get(id(p), f"unnamed.{number}"): (part, group, p)
            for part in self.optimizer.parts
            for group in part.param_groups
            for number, p in enumerate(group["params"])
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "state": {
                name: {
                    field: for_checkpoint(value, p) if isinstance(value, torch.Tensor) and p.ndim else value
                    for field, value in part.state[p].items()
                }
                for name, (part, _, p) in self._parameters.items()
                if p in part.state
            },
            "classes": {name: _algorithm(part) for name, (part, _, _) in self._parameters.items()},
            "parameters": {name: _kind_of(p) for name, (_, _, p) in self._parameters.items()},
            "groups": self.optimizer.hyperparameters(),
            "built": self._built,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, values in state["state"].items():
            part, _, parameter = self._parameters[name]
            own = part.state[parameter]
            for field, value in values.items():
                if isinstance(value, torch.Tensor) and isinstance(own.get(field), torch.Tensor):
                    _take_over(own[field], value)
                else:
                    own[field] = value
        for part in self.optimizer.parts:
            convert_moments(part)
        groups = [group for part in self.optimizer.parts for group in part.param_groups]
        if len(groups) == len(state["groups"]):
            for group, saved, built in zip(groups, state["groups"], state["built"], strict=True):
                group.update({k: v for k, v in saved.items() if k not in ("lr", "initial_lr") and v != built.get(k)})

    def _match_torch_muon(self, plain: Any) -> None:
        """Let Muon have the parameters that it had in a checkpoint of torch.optim.Muon, which this trainer once used.

        That one also got output projections and routers, and no stacked experts.
        """
        if not any("ns_steps" in group or AS_TORCHS in group for group in plain["groups"]):
            return
        had = {name for name, kind in plain["classes"].items() if kind == "Muon"}
        self.optimizer.match_torch_muon([p for name, (_, _, p) in self._parameters.items() if name in had])
        self._note_parameters()

    def differences(self, plain: Any, stored: Mapping[str, StoredTensor]) -> list[str]:
        self._match_torch_muon(plain)
        changed: dict[tuple[str, str], list[str]] = {}
        for name, (part, _, _) in self._parameters.items():
            before, now = plain["classes"].get(name), _algorithm(part)
            if before is None:
                if name in self._all_names and plain["classes"]:
                    changed.setdefault(("none", now), []).append(name)
            elif before != now:
                changed.setdefault((before, now), []).append(name)
        for name in plain["classes"]:
            if name not in self._parameters and name in self._all_names:
                changed.setdefault((plain["classes"][name], "none"), []).append(name)
        lines = [
            f"optimizer: {before} in the checkpoint, {now} now, for {', '.join(names)}"
            for (before, now), names in changed.items()
        ]
        others = [
            name
            for name, (_, _, parameter) in self._parameters.items()
            if plain.get("parameters", {}).get(name, _kind_of(parameter)) != _kind_of(parameter)
        ]
        if others:
            lines.append(f"optimizer: holds moments of parameters with another shape or dtype: {', '.join(others)}")
        return lines

    def prepare(self, stored: Mapping[str, StoredTensor]) -> None:
        """Allocate the moments that the checkpoint has, sharded like their parameters, and drop all others.

        A fresh optimizer has no moments before its first step, and torch's `load_state_dict` expects unsharded ones.
        """
        wanted: dict[str, dict[str, StoredTensor]] = {}
        for key, tensor in stored.items():
            if key.startswith("state."):
                name, _, field = key.removeprefix("state.").rpartition(".")
                wanted.setdefault(name, {})[field] = tensor
        for name, (part, group, parameter) in self._parameters.items():
            own = part.state[parameter]
            fields = wanted.get(name, {})
            for field in [field for field in own if field not in fields]:
                del own[field]
            for field, tensor in fields.items():
                if field not in own:
                    own[field] = _moment_like(parameter, group, field, tensor)
            if not own:
                del part.state[parameter]


def _kind_of(parameter: torch.Tensor) -> str:
    return f"{str(parameter.dtype).removeprefix('torch.')} {'x'.join(map(str, parameter.shape))}"


def _moment_like(parameter: torch.Tensor, group: Mapping[str, Any], field: str, stored: StoredTensor) -> torch.Tensor:
    if stored.shape == tuple(parameter.shape):
        # Use the optimizer's dtype if it sets one; moments stored in another dtype are converted while they are read.
        named = group.get("state_dtype") if field != "step" else None
        are_codes = "int8" in (named, str(stored.dtype).removeprefix("torch.u").removeprefix("torch."))
        dtype = getattr(torch, named) if named and not are_codes else stored.dtype  # codes are converted afterwards
        return torch.empty_like(parameter.detach(), dtype=dtype)
    if stored.shape and stored.shape[:-1] == tuple(parameter.shape[:-1]) and stored.shape[-1] < parameter.shape[-1]:
        of_each_row = parameter.detach()[..., : stored.shape[-1]]
        return torch.empty_like(of_each_row, dtype=stored.dtype)
    on_device = field != "step" or group.get("fused") or group.get("capturable")
    device = parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device
    return torch.empty(stored.shape, dtype=stored.dtype, device=device if on_device else "cpu")


class _Counters(StatePart):
    def __init__(self, state: TrainState) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        state = self.state
        return {
            "tokens": state.tokens,
            "owes_evaluation": state.eval_pending,
            "evaluation": dict(state.evaluation),
            "zero_after_end": state.zero_after_end,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.tokens = state["tokens"]
        self.state.eval_pending = state.get("owes_evaluation", False)
        self.state.evaluation = state.get("evaluation", {})
        self.state.zero_after_end = state.get("zero_after_end", False)


# ---------------------------------------------------------------------------------------------------------------
# Random states


def seed_everything(seed: int, rank: int, step: int = 0) -> None:
    """Seed Python, numpy and torch with a value that differs between ranks (and so does dropout)."""
    mixed = int(np.random.SeedSequence([seed, rank, step] if step else [seed, rank]).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


class RandomState:
    """The random states of this rank as one resumable object."""

    def __init__(self, seed: int, rank: int) -> None:
        self._seed, self._rank = seed, rank

    def restart(self, step: int) -> None:
        """Reseed at `step`, if this rank has no stored state, so that the first steps' noise does not repeat."""
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
