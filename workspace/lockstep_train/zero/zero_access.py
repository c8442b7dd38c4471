"""State of DeepSpeed's engine, read for a commit and put back from one.

Stage3 cuts every trainable parameter, flattened, into equal chunks, one a rank; the last rank's chunk ends in uninitialized
padding. Stage1 and Stage2 cut one flat buffer of all parameters; a rank owns whole parameters and up to two cut ones.
Either way a rank's part of a parameter is one range of its elements, and reading it needs no collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep_train.base.errors import NonFinite
from lockstep_train.zero.kinds import FULL, LITE, MASTER, MOMENTS, WEIGHTS
from lockstep_train.zero.parameters import full_shape, is_sharded, own_values, shards

KINDS = FULL
_LOSS_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


Values = dict[str, torch.Tensor]
"""FP32 elements of the range that was asked for, by kind."""


@dataclass(frozen=True)
class RangeNeed:
    """Range of one parameter that a rank needs: masters and moments of [start, start + numel), and with `whole` all masters, because
    the weights that it computes with are all here."""

    start: int
    numel: int
    whole: bool


class UnknownDeepSpeed(RuntimeError):
    """DeepSpeed does not behave as this module expects; nothing may be saved or loaded with it."""


@dataclass(frozen=True)
class Fragment:
    """Views of this rank's elements [start, start + numel) of one flattened parameter; padding is not in them."""

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    tensors: Mapping[str, torch.Tensor]
    """Tensors by kind: `fp32` and, once the optimizer has state, the two moments."""


def trainable(engine: Any) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, parameter) for name, parameter in engine.module.named_parameters() if parameter.requires_grad]


def parameter_shapes(engine: Any) -> dict[str, tuple[int, ...]]:
    """True shape of every trainable parameter (under Stage3 the tensor itself may be empty)."""
    return {name: full_shape(parameter) for name, parameter in trainable(engine)}


def fragments(engine: Any, kinds: tuple[str, ...] = KINDS) -> Iterator[Fragment]:
    """Fragments that this rank owns. No collective. Not during a forward pass: looking at a module's parameters may gather them then."""
    if kinds == LITE and not any(is_sharded(parameter) for _, parameter in trainable(engine)):
        yield from _even_weights(engine)
        return
    create_optimizer_state(engine)
    for name, parameter in trainable(engine):
        if is_sharded(parameter):
            yield _stage3_fragment(engine.optimizer, name, parameter, kinds)
        elif parameter._hp_mapping is not None:  # type: ignore[attr-defined]
            yield _flat_fragment(name, parameter, kinds)


def _even_weights(engine: Any) -> Iterator[Fragment]:
    """Equal shares of the weights under Stage1 and Stage2, where every rank has them all."""
    parameters = trainable(engine)
    numbers = [parameter.numel() for _, parameter in parameters]
    for index, start, numel in even_share(numbers, torch.distributed.get_rank(), torch.distributed.get_world_size()):
        name, parameter = parameters[index]
        weights = parameter.detach().view(-1)[start : start + numel]
        yield Fragment(name, tuple(parameter.shape), start, numel, {WEIGHTS: weights})


class Places:
    """Locations of the state. Until it has moved, views taken earlier are views of the state of now.

    Every save asks, on the training thread: so what was found is held and compared, instead of looked up again.
    """

    def __init__(self, engine: Any, kinds: tuple[str, ...], weights_of: Sequence[torch.nn.Parameter]) -> None:
        """Find them, after `fragments` of these kinds. `weights_of`: the trainable parameters, where their weights are read."""
        self._held: list[tuple[Any, Any, Any]] = []
        """(container, key, what was there): of the lists and mappings that lead to the tensors."""
        self._tensors: list[tuple[Any, Any, torch.Tensor, int]] = []
        """(container, key, tensor, address)."""
        if MASTER in kinds:
            self._find_masters(engine.optimizer)
        for parameter in weights_of:
            container, key = (vars(parameter), "ds_tensor") if is_sharded(parameter) else ((parameter,), 0)
            self._add(container, key)

    def _find_masters(self, optimizer: Any) -> None:
        """Masters and moments are parts of a few large tensors."""
        flats, state = getattr(optimizer, _masters_name(optimizer)), optimizer.optimizer.state
        self._held += [(vars(optimizer), _masters_name(optimizer), flats), (vars(optimizer.optimizer), "state", state)]
        for index, flat in enumerate(flats):
            self._held.append((state, flat, state[flat]))
            self._add(flats, index)
            for moment in MOMENTS:
                self._add(state[flat], moment)

    def _add(self, container: Any, key: Any) -> None:
        self._tensors.append((container, key, container[key], container[key].data_ptr()))

    def moved(self) -> bool:
        try:
            replaced = any(container[key] is not value for container, key, value in self._held)
            return replaced or any(container[key] is not tensor or tensor.data_ptr() != at for container, key, tensor, at in self._tensors)
        except LookupError:
            return True


def _stage3_tensor(optimizer: Any, parameter: Any, kind: str) -> torch.Tensor:
    """The whole chunk, padding included."""
    if kind == WEIGHTS:
        return own_values(parameter).detach()
    key = None if kind == MASTER else kind
    tensor: torch.Tensor = optimizer._get_fp32_opt_state_partition(parameter, True, optim_state_key=key)[0]
    return tensor


def _stage3_fragment(optimizer: Any, name: str, parameter: Any, kinds: tuple[str, ...]) -> Fragment:
    _, start, numel = next(shards(parameter))
    tensors = {kind: _stage3_tensor(optimizer, parameter, kind)[:numel] for kind in kinds}
    return Fragment(name, full_shape(parameter), start, numel, tensors)


def _flat_fragment(name: str, parameter: Any, kinds: tuple[str, ...]) -> Fragment:
    mapping = parameter._hp_mapping
    address = mapping.lp_fragment_address
    tensors = {kind: mapping.get_hp_fragment() if kind == MASTER else mapping.get_hp_fragment(kind) for kind in kinds}
    return Fragment(name, tuple(parameter.shape), address.start, address.numel, tensors)


def _masters_name(optimizer: Any) -> str:
    stage3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
    return "fp32_partitioned_groups_flat" if stage3 else "single_partition_of_fp32_groups"


def _flat_masters(optimizer: Any) -> list[torch.Tensor]:
    return list(getattr(optimizer, _masters_name(optimizer)))


def optimizer_step(engine: Any) -> int:
    """Updates the optimizer has applied."""
    states = [engine.optimizer.optimizer.state.get(flat, {}) for flat in _flat_masters(engine.optimizer)]
    return max((int(state["step"]) for state in states if "step" in state), default=0)


def seeks_loss_scale(engine: Any) -> bool:
    """Return True if an overflow lowers the loss scale: in FP16, unless the raw settings fix one."""
    return bool(getattr(getattr(engine.optimizer, "loss_scaler", None), "dynamic", False))


def loss_scale(engine: Any) -> float | None:
    """Return what a loss is multiplied with in FP16; None in another precision."""
    return float(engine.optimizer.loss_scale) if engine.fp16_enabled() else None


def apply_gradients(engine: Any, step: int) -> float:
    """Apply the gradients and return their norm: infinite when DeepSpeed left the update out, which it does for a gradient that
    isn't finite, before anything has changed."""
    try:
        engine.step()
    except Exception as error:
        if "loss scale already at minimum" not in str(error):
            raise
        raise NonFinite(f"gradients of step {step} overflow FP16 even at the smallest loss scale; train in BF16") from error
    norm = engine.get_global_grad_norm()
    return math.inf if engine.optimizer.overflow else float(norm or 0.0)


def loss_scaler_state(engine: Any) -> dict[str, Any] | None:
    """State of the dynamic loss scaler of FP16; None without one."""
    return {name: getattr(engine.optimizer.loss_scaler, name) for name in _LOSS_SCALER} if seeks_loss_scale(engine) else None


def restore_loss_scaler(engine: Any, state: Mapping[str, Any] | None) -> None:
    """Go on with a saved loss scale; a run that has no scaler, or a commit that has no state of one, changes nothing."""
    if state is not None and loss_scaler_state(engine) is not None:
        for name in _LOSS_SCALER:
            setattr(engine.optimizer.loss_scaler, name, state[name])


def set_learning_rate(engine: Any, rate: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = rate


def create_optimizer_state(engine: Any, step: int = 0) -> None:
    """The moments that the first update would create, where there are none: a fresh engine has none to save or to load into."""
    optimizer = engine.optimizer
    missing = [flat for flat in _flat_masters(optimizer) if not optimizer.optimizer.state.get(flat)]
    for flat in missing:
        state = optimizer.optimizer.state[flat]
        for moment in MOMENTS:
            state[moment] = torch.zeros_like(flat)
        state["step"] = torch.tensor(float(step), dtype=torch.float32)
    if missing and hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):  # Stage1 and Stage2 keep views of the moments
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def gather_masters(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every trainable parameter whole, in FP32, on every rank. A collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    for name, parameter in trainable(engine):
        value = safe_get_full_fp32_param(parameter)
        if value is None:
            raise UnknownDeepSpeed(f"DeepSpeed gives no FP32 value of {name}")
        yield name, value.detach()


def even_share(numbers: Sequence[int], rank: int, world_size: int) -> Iterator[tuple[int, int, int]]:
    """This rank's part of tensors of `numbers` elements: (index of the tensor, first element, how many).

    All elements in one row, cut into `world_size` ranges that differ by at most one.
    """
    total = sum(numbers)
    begin, end = total * rank // world_size, total * (rank + 1) // world_size
    offset = 0
    for index, number in enumerate(numbers):
        first, last = max(begin, offset), min(end, offset + number)
        if first < last:
            yield index, first - offset, last - first
        offset += number


def needs(engine: Any) -> dict[str, RangeNeed]:
    """Ranges of each parameter that this rank needs to restore it."""
    owned = {fragment.name: (fragment.start, fragment.numel) for fragment in fragments(engine, kinds=(MASTER,))}
    # A parameter with elements is resident, as under Stage1 and Stage2, and under Stage3 where it is small.
    return {name: RangeNeed(*owned.get(name, (0, 0)), whole=parameter.numel() > 0) for name, parameter in trainable(engine)}


@torch.no_grad()
def restore(engine: Any, fetch: Callable[[str, RangeNeed], Values], optimizer_step: int) -> None:
    """Load the state. `fetch` is called on every rank for every parameter in the same order, so it may be a collective.

    Moments that it doesn't give are zero, as before the first update.
    """
    create_optimizer_state(engine, optimizer_step)
    for flat in _flat_masters(engine.optimizer):
        engine.optimizer.optimizer.state[flat]["step"].fill_(optimizer_step)
    owned = {fragment.name: fragment for fragment in fragments(engine)}
    ranges = needs(engine)
    for name, parameter in trainable(engine):
        need = ranges[name]
        values = fetch(name, need)
        for kind, tensor in owned[name].tensors.items() if name in owned else ():
            if kind in values:
                tensor.copy_(_own(values[kind], need) if kind == MASTER else values[kind])
        _set_weights(engine.optimizer, parameter, values[MASTER], need)
    if hasattr(engine.optimizer, "invalidate_secondary_tensor"):
        engine.optimizer.invalidate_secondary_tensor()  # else the first forward uses the weights from before the load


def set_counters(engine: Any, step: int, accumulation: int, global_batch_size: int) -> None:
    """Set the number of steps done, and that of the micro-batches of each from here on: between two steps only."""
    engine._config.gradient_accumulation_steps = engine.optimizer.gradient_accumulation_steps = accumulation
    engine.global_steps = step
    engine.global_samples = step * global_batch_size
    engine.micro_steps = step * accumulation


def _own(master: torch.Tensor, need: RangeNeed) -> torch.Tensor:
    return master[need.start : need.start + need.numel] if need.whole else master


def _set_weights(optimizer: Any, parameter: Any, master: torch.Tensor, need: RangeNeed) -> None:
    """The low-precision copy that the forward pass uses; under Stage3 the shard, and the whole one if it stays resident."""
    if is_sharded(parameter):
        shard, _, numel = next(shards(parameter))
        _stage3_tensor(optimizer, parameter, MASTER)[numel:].zero_()
        shard[:numel].copy_(_own(master, need))
        shard[numel:].zero_()
    if need.whole:
        parameter.data.copy_(master.view(parameter.shape))
