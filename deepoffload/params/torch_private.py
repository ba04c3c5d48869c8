"""The private names of torch that paging rests on, gathered and checked in one place.

torch has no public way to compose saved-tensor hooks, to see who else refers to a storage, or to step outside the
user's modes. Each name below exists in all of :data:`TESTED_VERSIONS`; a torch that lacks one gets one clear sentence
at import.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, _ops, _utils, nn
from torch._functorch import vmap as _vmap
from torch.autograd.graph import increment_version
from torch.nn.modules import module as _modules
from torch.optim import optimizer as _optimizer
from torch.utils import _python_dispatch, _pytree, checkpoint
from torch.utils.hooks import RemovableHandle

from deepoffload.errors import UnsupportedError
from deepoffload.memory.lock import SHIELD

Found = TypeVar("Found")
TESTED_VERSIONS = "torch 2.11 to 2.15"
"""What ``make test-versions`` tests the ends of, and ``pyproject.toml`` asks for the least of."""


def need(owner: Any, name: str) -> Any:
    """A private name of torch. Raises UnsupportedError where this torch lacks it."""
    found = getattr(owner, name, None)
    if found is None:
        raise UnsupportedError(
            f"torch {torch.__version__} has no {getattr(owner, '__name__', owner)}.{name}, which paged parameters "
            f"need; use {TESTED_VERSIONS}, or report this version"
        )
    return found


_autograd = torch._C._autograd
push_saved_tensors_hooks: Callable[[Any, Any], None] = need(_autograd, "_push_saved_tensors_default_hooks")
pop_saved_tensors_hooks: Callable[[], None] = need(_autograd, "_pop_saved_tensors_default_hooks")
top_saved_tensors_hooks: Callable[[bool], Any] = need(_autograd, "_top_saved_tensors_default_hooks")
saved_tensors_hooks_enabled: Callable[[], bool] = need(_autograd, "_saved_tensors_hooks_is_enabled")
set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = need(_autograd, "_unsafe_set_version_counter")
storage_use_count: Callable[[int], int] = need(torch._C, "_storage_Use_Count")
tensor_use_count: Callable[[Tensor], int] = need(torch._C.TensorBase, "_use_count")
refuse_writes: Callable[[Tensor], None] = need(torch._C, "_set_throw_on_mutable_data_ptr")
_no_torch_function = torch._C.DisableTorchFunctionSubclass
_call_past_doors = need(torch._C, "_disabled_torch_function_impl")
is_functorch_wrapped: Callable[[Tensor], bool] = need(torch._C._functorch, "is_functorch_wrapped_tensor")
get_unwrapped: Callable[[Tensor], Tensor] = need(torch._C._functorch, "get_unwrapped")
_peek_interpreter_stack = need(torch._C._functorch, "peek_interpreter_stack")
storage_at: Callable[[int, torch.device, int], Any] = need(torch._C, "_construct_storage_from_data_pointer")
_swap_implementation = need(torch._C, "_swap_tensor_impl")
disable_current_modes = need(_python_dispatch, "_disable_current_modes")
is_wrapper: Callable[[Any], bool] = need(_python_dispatch, "is_traceable_wrapper_subclass")  # DTensor and the like
_dispatch_mode = need(torch._C, "_get_dispatch_mode")
no_dispatch: Callable[[], object] = need(torch._C, "_DisableTorchDispatch")
_PROXY = need(need(torch._C, "_TorchDispatchModeKey"), "PROXY")
current_node = need(torch._C, "_current_autograd_node")
graph_task: Callable[[], int] = need(torch._C, "_current_graph_task_id")  # the innermost backward's; -1 outside
sequence_number: Callable[[], int] = need(_autograd, "_get_sequence_nr")  # that the next node of this thread gets
AccumulateGrad: Any = need(torch._C._functions, "AccumulateGrad")
call_at_end_of_backward: Any = need(need(torch.autograd.Variable, "_execution_engine"), "queue_callback")
function_mode_at: Callable[[int], object] = need(torch._C, "_get_function_stack_at")
len_dispatch_stack, len_function_stack = (need(torch._C, f"_len_torch_{n}_stack") for n in ("dispatch", "function"))
checkpoint_around: Callable[..., Iterator[None]] = need(checkpoint, "_checkpoint_without_reentrant_generator")
int8_product: Callable[..., Tensor] = need(torch.ops.aten, "_weight_int8pack_mm")
int4_product: Callable[..., Tensor] = need(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
pack_int4: Callable[..., Tensor] = need(torch.ops.aten, "_convert_weight_to_int4pack_for_cpu")
unscale_and_check: Callable[..., None] = need(torch, "_amp_foreach_non_finite_check_and_unscale_")
make_subclass, make_wrapper = (need(Tensor, name) for name in ("_make_subclass", "_make_wrapper_subclass"))
rebuild_tensor: Callable[..., Tensor] = need(_utils, "_rebuild_tensor_v2")
active_ddp_module: Callable[[], Any] = need(nn.parallel.DistributedDataParallel, "_get_active_ddp_module")
parameter_registration_hooks: Mapping[int, Any] = need(_modules, "_global_parameter_registration_hooks")
forward_pre_hooks_of_all: Mapping[int, Any] = need(_modules, "_global_forward_pre_hooks")
forward_hooks_of_all: Mapping[int, Any] = need(_modules, "_global_forward_hooks")
optimizer_step_hooks: Mapping[int, Any] = need(_optimizer, "_global_optimizer_pre_hooks")
TorchDispatchMode: Any = need(_python_dispatch, "TorchDispatchMode")
tree_flatten, tree_map, tree_map_only = _pytree.tree_flatten, _pytree.tree_map, _pytree.tree_map_only
tree_leaves: Callable[[Any], list[Any]] = need(_pytree, "tree_leaves")  # tree_flatten leaves a cycle of references

_say_why: Callable[[int, str], None] | None = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
"""Has a ``c10::StorageImpl`` refuse every access, with a message. Builds for CUDA have it."""

_AWAY = (
    "Cannot access data pointer: native code wants the bytes of a paged tensor, which are away, and has not asked the "
    "tensor's class for them. Give it param.detach()"
)
_STORAGE_BYTES = 64
"""Every ``c10::StorageImpl`` has at least so many, and its flags are among them."""


def _storage_content(tensor: Tensor) -> bytes:
    return ctypes.string_at(tensor.untyped_storage()._cdata, _STORAGE_BYTES)


def _flag_against_reads() -> int:
    """Where in a ``c10::StorageImpl`` the flag lies that makes it refuse reads (``throw_on_immutable_data_ptr_``).

    Builds for the CPU have no function that sets it. It comes right after ``throw_on_mutable_data_ptr_``, for which
    there is one. Whether it does what it should is tried on a tensor that is thrown away.
    """
    tensor = torch.zeros(())
    before = _storage_content(tensor)
    refuse_writes(tensor)
    after = _storage_content(tensor)
    changed = [at for at in range(_STORAGE_BYTES) if before[at] != after[at]]
    flag = changed[-1] + 1 if changed else _STORAGE_BYTES
    if flag < _STORAGE_BYTES and before[flag - 2 : flag + 1] == bytes((0, 0, 0)) and changed == [flag - 2, flag - 1]:
        _set_flag(tensor, flag)
        try:
            tensor.clone()
        except RuntimeError:
            return flag
    raise UnsupportedError(
        f"torch {torch.__version__} has no memory that refuses to be read, which paged parameters need; use "
        f"{TESTED_VERSIONS}, or report this version"
    )


def _set_flag(tensor: Tensor, flag: int) -> None:
    ctypes.c_bool.from_address(tensor.untyped_storage()._cdata + flag).value = True


_READ_FLAG = _flag_against_reads() if _say_why is None else 0


def refuse_access(tensor: Tensor) -> None:
    """From now on, every read of the memory of ``tensor``, and every write, raises a RuntimeError of torch's."""
    if _say_why is None:
        refuse_writes(tensor)
        _set_flag(tensor, _READ_FLAG)
    else:
        _say_why(tensor.untyped_storage()._cdata, _AWAY)


def _with_inner(code: CodeType) -> frozenset[CodeType]:
    return frozenset((code, *(inner for inner in code.co_consts if isinstance(inner, CodeType))))


MODULE_APPLY: CodeType = need(nn.Module, "_apply").__code__
"""What ``model.to(...)``, ``model.half()`` and the like run for each parameter."""
MODULE_CALL: CodeType = need(nn.Module, "_call_impl").__code__
"""What runs for as long as a module is called."""
MODULE_SAVE: CodeType = need(nn.Module, "_save_to_state_dict").__code__
VMAP_SIZES: frozenset[CodeType] = _with_inner(need(_vmap, "_validate_and_get_batch_size").__code__)
"""What ``torch.vmap`` runs for what it maps over, before native code takes it apart, with comprehensions in it."""
make_dual: Any = need(torch._VF, "_make_dual")  # gives a tensor its tangent, in forward-mode differentiation
PARAMETER_NEW: CodeType = nn.Parameter.__new__.__code__

_base: Any = torch._C.TensorBase
requires_grad_of: Callable[[Tensor], bool] = _base.requires_grad.__get__
raw_data: Callable[[Tensor], Tensor] = _base.data.__get__
_set_raw_data = _base.data.__set__
_raw_grad: Callable[[Tensor], Tensor | None] = _base.grad.__get__
_set_raw_grad = _base.grad.__set__
_raw_version: Callable[[Tensor], int] = _base._version.__get__


def past_doors(func: Callable[..., Found], args: Any, kwargs: dict[str, Any] | None = None) -> Found:
    """``func(*args, **kwargs)`` without any door.

    Native code turns the doors off and on again, so no Ctrl-C comes in between. It would leave them off, and every use
    of a paged tensor would get its stand-in.
    """
    found: Found = _call_past_doors(func, (), args, kwargs or {})
    return found


def set_data(tensor: Tensor, value: Tensor) -> None:
    """``tensor.data = value`` without any door."""
    past_doors(_set_raw_data, (tensor, value))


def set_data_elsewhere(tensor: Tensor, value: Tensor) -> None:
    """``tensor.data = value`` where ``value`` may be on another device. The object stays the same.

    torch refuses the assignment between the CPU and devices that are no part of it (``Module.to`` then makes new
    parameters); for these the object gets another implementation.

    Raises:
        UnsupportedError: hooks are registered on the tensor, which would be lost with the old one.
    """
    with SHIELD, _no_torch_function():
        if torch._has_compatible_shallow_copy_type(tensor, value):
            _set_raw_data(tensor, value)
            return
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise UnsupportedError(
                f"hooks on a parameter cannot follow it to {value.device}: register them when offload_context has ended"
            )
        _swap_implementation(tensor, value.detach().requires_grad_(tensor.requires_grad))


swap_memory: Callable[[torch.UntypedStorage, torch.UntypedStorage], None] | None = getattr(
    torch.UntypedStorage, "_swap_data_ptr_", None
)
"""Of two storages: exchanges what they refer to. Views of the one then show the other's memory. None before torch 2.12:
only ``param.data = ...`` with views of the old values needs it."""


def get_data(tensor: Tensor) -> Tensor:
    """``tensor.data`` without any door."""
    return past_doors(raw_data, (tensor,))


def get_grad(tensor: Tensor) -> Tensor | None:
    """What autograd itself keeps in ``.grad``."""
    return past_doors(_raw_grad, (tensor,))


def set_grad(tensor: Tensor, value: Tensor | None) -> None:
    """``tensor.grad = value`` without any door."""
    past_doors(_set_raw_grad, (tensor, value))


def version_of(tensor: Tensor) -> int:
    """The in-place counter of a tensor."""
    return past_doors(_raw_version, (tensor,))


def call_when_accumulated(tensor: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Have autograd call ``hook`` when the tensor's gradient is complete, before every hook that is there already."""
    with outside_user_modes():
        before = dict(tensor._post_accumulate_grad_hooks or {})
        handle = tensor.register_post_accumulate_grad_hook(hook)
        hooks: dict[int, Any] = tensor._post_accumulate_grad_hooks
        for key, other in before.items():  # torch calls them in the order in which they were put in
            del hooks[key]
            hooks[key] = other
    return handle


def held_by_graphs(tensor: Tensor) -> int:
    """How many references to a frozen leaf are those of graphs, made while it was trainable: 1 or 0, since all of them
    share one node. If there is none yet, this makes one, which counts in addition to those that were there before."""
    with outside_user_modes():
        before = tensor_use_count(tensor)
        tensor.requires_grad_(True)
        try:
            with torch.enable_grad():
                node = tensor.view_as(tensor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            found = tensor_use_count(tensor) == before
            del node
        finally:
            tensor.requires_grad_(False)
    return int(found)


def count_change(tensor: Tensor) -> None:
    """Move the in-place counter, as torch's own in-place operations do: a graph that has kept the tensor refuses to go
    backward then."""
    increment_version(tensor)


def refuse_tracing() -> None:
    """``torch.jit.trace`` would store stand-ins as constants: a model that is silently wrong. ``make_fx`` would record
    what we do with bytes."""
    if torch._C._is_tracing():
        raise UnsupportedError("torch.jit.trace cannot record a paged model; trace a plain copy (copy.deepcopy(model))")
    if len_dispatch_stack() and _dispatch_mode(_PROXY) is not None:
        raise UnsupportedError("make_fx cannot record a paged model; trace a plain copy (copy.deepcopy(model))")


def door_caller() -> CodeType:
    """Who called the operation that a ``__torch_function__`` of ours stands for: called from a door's handler."""
    return door_frame(3).f_code


def door_frame(depth: int = 2) -> FrameType:
    """The frame of who called it. Function modes (``torch.set_default_device``, ``with torch.device(...)``) stand
    between the two."""
    frame = sys._getframe(depth)
    while frame.f_back is not None and frame.f_code.co_name != "__torch_function__":
        frame = frame.f_back
    while frame.f_back is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame


_CHECKS = frozenset({"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"})


def _is_not_asked(*arguments: Any) -> bool:
    return False


def _unasked(function: Any, *, needed: bool) -> Any:
    """``function`` without its check for ``__torch_function__`` among its arguments. What it calls is asked as ever.

    A door has been asked already, and cannot call the function itself: to disable the check, it would have to disable
    it for all that runs inside, too.
    """
    checks = _CHECKS.intersection(function.__code__.co_names)
    if not checks:
        if needed:
            raise UnsupportedError(
                f"{function.__module__}.{function.__name__} of torch {torch.__version__} has no has_torch_function, "
                f"which paged parameters need; use {TESTED_VERSIONS}, or report this version"
            )
        return function
    names = {**function.__globals__, **dict.fromkeys(checks, _is_not_asked)}
    unasked = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    unasked.__kwdefaults__ = function.__kwdefaults__
    return unasked


autograd_grad = _unasked(torch.autograd.grad, needed=True)
autograd_backward = _unasked(torch.autograd.backward, needed=False)  # not every torch checks there
make_grads = need(torch.autograd, "_make_grads")
lobpcg = _unasked(torch.lobpcg, needed=True)
triplet_loss = _unasked(nn.functional.triplet_margin_with_distance_loss, needed=True)
Operators = (need(_ops, "OpOverload"), need(_ops, "OpOverloadPacket"))
"""What ``torch.ops`` holds: torch's operators, and those that programs register."""


def optimizer_hooks(optimizer: torch.optim.Optimizer, what: str) -> list[Callable[..., Any]]:
    """The hooks of an optimizer around ``what``: ``state_dict_pre``, ``load_state_dict_post`` and so on."""
    return list(need(optimizer, f"_optimizer_{what}_hooks").values())


def place_in_distributed_file(file: str, begin: int, nbytes: int) -> Any:
    """What ``torch.distributed.checkpoint`` pickles as the place of an item. Imported late: it takes half a second."""
    from torch.distributed.checkpoint import filesystem

    return need(filesystem, "_StorageInfo")(file, begin, nbytes)


@contextlib.contextmanager
def fake_tensors() -> Iterator[tuple[Any, type[Tensor]]]:
    """Operations have shapes and no bytes inside. Imported when it is used: it takes a quarter of a second.
    Gives torch's mode, and the class of the tensors.

    torch logs an operation that fails, with its traceback, and raises the error, too; here it only raises it.
    """
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was, logger.disabled = logger.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            # torch's own memory of calls costs more than it saves where each of them is remembered already
            mode.cache_enabled = False
            yield mode, FakeTensor
    finally:
        logger.disabled = was


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has more than a shape: it is neither on the meta device nor one of :func:`fake_tensors`."""
    if tensor.is_meta:
        return False
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is None or not isinstance(tensor, module.FakeTensor)


class DirectDispatchMode(TorchDispatchMode):
    """A mode whose ``__torch_dispatch__`` torch does not wrap to keep its compiler out: nobody compiles under it, and
    the wrapper takes microseconds for every operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def depends_on_values(error: BaseException) -> bool:
    """Whether an operation failed under :func:`fake_tensors` because its result depends on values."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))


def fake_device(tensor: Tensor) -> torch.device:
    """The device that a tensor made under :func:`fake_tensors` seems to be on; any other's own."""
    return getattr(tensor, "fake_device", None) or tensor.device


def in_functorch() -> bool:
    """True inside a ``torch.func`` transform."""
    return _peek_interpreter_stack() is not None


def in_backward() -> bool:
    """True while autograd evaluates a node."""
    return current_node() is not None


def modes_active() -> bool:
    """True inside any user mode that would see, or change, an operation of ours."""
    stacked = len_dispatch_stack() or len_function_stack() or _peek_interpreter_stack() is not None
    return bool(stacked or torch.is_inference_mode_enabled())


class _WithoutDoors:
    """As :func:`outside_user_modes`, where there are no modes. A generator would cost five times as much."""

    __slots__ = ("_doors", "_has_gradients")

    def __enter__(self) -> None:
        SHIELD.__enter__()
        self._doors = _no_torch_function()
        self._doors.__enter__()
        self._has_gradients = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *raised: Any) -> None:
        torch._C._set_grad_enabled(self._has_gradients)
        self._doors.__exit__(*raised)
        SHIELD.__exit__(*raised)


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    """As :func:`outside_user_modes`, where there are modes."""
    with SHIELD, contextlib.ExitStack() as stack:
        if _peek_interpreter_stack() is not None:
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            stack.enter_context(temporarily_clear_interpreter_stack())
        if len_dispatch_stack():
            stack.enter_context(disable_current_modes())
        if len_function_stack():
            stack.enter_context(torch._C.DisableTorchFunction())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        with _WithoutDoors():
            yield


def outside_user_modes() -> contextlib.AbstractContextManager[None]:
    """Outside every user mode: bytes that deepoffload moves are nobody's operation.

    No dispatch mode, no function mode, no functorch level, no inference mode, no gradient, no default device. The cheap
    tests first: leaving modes that are not there costs as much as the rest together. Ctrl-C waits for the end of it:
    in between, one that unwinds would leave the doors off, or gradients.
    """
    return _without_modes() if modes_active() else _WithoutDoors()


def outside_modes() -> contextlib.AbstractContextManager[None]:
    """:func:`outside_user_modes`, where there are any. Costs next to nothing where there are none."""
    return outside_user_modes() if modes_active() else contextlib.nullcontext()
