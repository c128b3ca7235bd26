# SPDX-License-Identifier: BSD-3-Clause
"""The Python half of calls between workers: pickles, functions that others ask for, exceptions,
futures.

A pickle can run code. Pickles come only over links whose other end has proved the job's secret
before anything of it was read; if init_rpc was told so, the names in them are bounded (policy.py).
"""

import functools
import importlib
import io
import pickle
import sys
import traceback

import torch

from .. import _C
from .policy import BoundedUnpickler, in_force

_TENSORS = (torch.Tensor, torch.nn.Parameter)


# ---- pickles: tensors and references travel beside them
# --------------------------------------------------------------


def _tensor(position):
    raise pickle.UnpicklingError("a tensor of a call can be read only as a part of it")


def _parameter(position, requires_grad):
    raise pickle.UnpicklingError("a parameter of a call can be read only as a part of it")


def _reference(position):
    raise pickle.UnpicklingError("an RRef can be read only as a part of a call")


def _script(code):
    return torch.jit.load(io.BytesIO(code))


def _operator(path, overload):
    found = functools.reduce(getattr, path.split("::"), torch.ops)
    return getattr(found, overload) if overload else found


class _Pickler(pickle.Pickler):
    def __init__(self, file):
        super().__init__(file, protocol=5)
        self.tensors, self.references = [], []

    def reducer_override(self, each):
        kind = type(each)
        if kind in _TENSORS:
            # Other layouts go as their parts, which are tensors of this kind.
            if each.layout is not torch.strided or each.is_quantized:
                return NotImplemented
            self.tensors.append(each)
            place = len(self.tensors) - 1
            return (
                (_tensor, (place,))
                if kind is torch.Tensor
                else (_parameter, (place, each.requires_grad))
            )
        if kind is _C.RRef:
            self.references.append(each)
            return _reference, (len(self.references) - 1,)
        if isinstance(each, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
            return _script, (each.save_to_buffer(),)
        if kind is torch._ops.OpOverloadPacket:
            return _operator, (each._qualified_op_name, "")
        if kind is torch._ops.OpOverload:
            return _operator, (each.overloadpacket._qualified_op_name, each._overloadname)
        return NotImplemented


def _beside(tensors, references):
    """Functions by which a pickle gets the parts that travel beside it, by (module, name)."""

    def parameter(position, requires_grad):
        tensor = tensors[position]
        if isinstance(tensor, torch.nn.Parameter):
            return tensor  # of this worker, for a value that is made here
        # In a context of distributed autograd it has come out of an operation: gradients go back to
        # the parameter itself.
        return (
            tensor
            if tensor.grad_fn is not None
            else torch.nn.Parameter(tensor.detach(), requires_grad)
        )

    return {
        (__name__, "_tensor"): tensors.__getitem__,
        (__name__, "_reference"): references.__getitem__,
        (__name__, "_parameter"): parameter,
    }


class _Unpickler(pickle.Unpickler):
    def __init__(self, data, tensors, references):
        super().__init__(io.BytesIO(data))
        # Nothing that knows this object: references go when it does, not when Python looks for
        # cycles.
        self._own = _beside(tensors, references)

    def find_class(self, module, name):
        return self._own.get((module, name)) or super().find_class(module, name)


def _allowed_operator(path, overload):
    if not isinstance(path, str) or not _C._is_allowed_operator(path):
        raise pickle.UnpicklingError(
            f"{path!r} is not among the operators that other workers may call here"
        )
    packet = _operator(path, "")
    if overload == "":
        return packet
    if not isinstance(overload, str) or overload not in packet.overloads():
        raise pickle.UnpicklingError(f"{overload!r} is no overload of {path!r}")
    return getattr(packet, overload)


# Functions that muster's own modules call on other workers, whatever those let programs call. They
# make objects of classes that the caller names, which `check_call` bounds like all others.
_OF_MUSTER = {
    __name__: ["call_method"],
    "muster.nn.api.remote_module": ["_make", "_forward", "_parameters"],
    "muster.optim.distributed_optimizer": ["_make", "_step"],
}


@functools.cache
def _asked_by_muster():
    """Those functions by (module, name)."""
    return {
        (module, name): getattr(importlib.import_module(module), name)
        for module, names in _OF_MUSTER.items()
        for name in names
    }


def _dense(tensor):
    """A copy of a tensor whose elements overlap or have gaps between them; others as they are.
    Some of torch's operators read or return other memory where elements overlap.
    """
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor
    if tensor.grad_fn is not None:
        return tensor.clone(memory_format=torch.contiguous_format)
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return copy.requires_grad_(tensor.requires_grad)


def _loads_bounded(policy, data, tensors, references):
    makers = _beside([_dense(each) for each in tensors], references)
    makers[(__name__, "_operator")] = _allowed_operator
    return BoundedUnpickler(data, policy, makers, _asked_by_muster()).load()


def dumps(each):
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(each)
    return file.getvalue(), pickler.tensors, pickler.references


def loads(data, tensors, references):
    if (policy := in_force.policy) is not None:
        return _loads_bounded(policy, data, tensors, references)
    try:
        return (
            _Unpickler(data, tensors, references).load()
            if tensors or references
            else pickle.loads(data)
        )
    except (AttributeError, ModuleNotFoundError) as error:
        raise type(error)(
            f"{error}. What a call names must be importable on both workers"
        ) from error


# ---- functions that other workers ask for
# ----------------------------------------------------------------------------

LATER = object()


class Later:
    """The result of a function of this module whose value is that of a future."""

    def __init__(self, future):
        self.future = future


_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
# By their type in a schema, and by their name: some overloads have plain numbers there.
_ENUMERATORS = ("ScalarType", "Layout", "MemoryFormat", "dtype", "layout", "memory_format")


# none, mean, sum; parts
_BOUNDS = {"reduction": range(3), "sections": range(1 << 16)}


def _is_number(value):
    """Whether torch takes it where a schema has an int: also a tensor with one integer in it."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not (value.is_floating_point() or value.is_complex())
    return hasattr(type(value), "__index__")


def _has_tensors(schema):
    return any("Tensor" in str(each.type) for each in (*schema.arguments, *schema.returns))


def _check_operator(operator, arguments, named):
    """Refuses what torch does not check: numbers, and tensors that torch takes for numbers, in
    place of a dtype, a layout or a memory format, other reductions of losses, and TorchScript's
    arithmetic of numbers, texts and lists.
    """
    if isinstance(operator, torch._ops.OpOverload):
        overloads = [operator]
    else:
        overloads = [getattr(operator, each) for each in operator.overloads()]
    for overload in overloads:
        for place, argument in enumerate(overload._schema.arguments):
            if place < len(arguments) and not argument.kwarg_only:
                value = arguments[place]
            else:
                value = named.get(argument.name)
            if isinstance(value, torch.layout) and value is not torch.strided:
                raise TypeError(
                    f"{operator}: {value} does not travel; tensors of calls are strided"
                )
            if not _is_number(value):
                continue
            kind = str(argument.real_type).removeprefix("Optional[").rstrip("]")
            if kind in _ENUMERATORS or argument.name in _ENUMERATORS:
                raise TypeError(
                    f"{operator}: {argument.name} is {value}; give a torch.dtype, torch.layout or "
                    "torch.memory_format"
                )
            bound = _BOUNDS.get(argument.name)
            if bound is not None and not (type(value) is int and value in bound):
                raise ValueError(
                    f"{operator}: {argument.name} is {value}; give a number from 0 to {bound[-1]}"
                )
    if not any(
        isinstance(each, torch.Tensor) for each in (*arguments, *named.values())
    ) and not all(_has_tensors(each._schema) for each in overloads):
        raise TypeError(f"{operator}: give a tensor; what it does with other values is not served")


def check_call(function, arguments, named):
    """Raises PermissionError unless other workers may call `function` here, and TypeError or
    ValueError where an operator of torch would not check its arguments.
    """
    if in_force.policy is None:
        return
    if not in_force.policy.may_call(function):
        raise PermissionError(
            f"{name_of(function)} is not among what other workers may call here: give it to "
            "init_rpc(functions=[...]) on this worker"
        )
    if isinstance(function, _OPERATORS):
        _check_operator(function, arguments, named)


def serve(data, tensors, references, answer):
    """Runs the function of a call. Returns its result, or LATER where `answer` will get it."""
    function, arguments, named = loads(data, tensors, references)
    del tensors, references
    if in_force.policy is not None and function not in _asked_by_muster().values():
        check_call(function, arguments, named)
    result = function(*arguments, **named)
    del arguments, named
    if isinstance(result, Later):
        result = result.future
    elif not hasattr(function, "_wrapped_async_rpc_function"):
        return result
    if not isinstance(result, torch._C.Future):  # what `then` gives is no torch.futures.Future
        raise TypeError(
            "a function under async_execution must return a torch.futures.Future, not "
            f"{type(result).__name__}"
        )

    def finish(future):
        try:
            value = future.value()
        except BaseException as error:
            answer.error(error)
        else:
            answer.value(value)

    result.add_done_callback(finish)
    return LATER


def check_method(value, name):
    """Raises PermissionError unless other workers may call this method of `value` here."""
    if in_force.policy is not None and not in_force.policy.may_call_method(value, name):
        raise PermissionError(
            f"{type(value).__qualname__}.{name} is not among what other workers may call here: "
            "those are the public methods that the classes "
            "listed by init_rpc(functions=[...]) on this worker define themselves, and inherited "
            "ones that are listed"
        )


def call_method(reference, name, arguments, named):
    """On the owner of `reference`: a method of its value."""
    value = reference.local_value()
    check_method(value, name)
    method = getattr(value, name)
    result = method(*arguments, **named)
    return Later(result) if hasattr(method, "_wrapped_async_rpc_function") else result


class RRefProxy:
    """Methods of an RRef's value, run by its owner: what `rref.rpc_sync()`, `rref.rpc_async()` and
    `rref.remote()` give.
    """

    def __init__(self, rref, way, timeout):
        self._call = functools.partial(
            getattr(importlib.import_module("muster.rpc"), way),
            rref.owner(),
            call_method,
            timeout=timeout,
        )
        self._rref = rref

    def __getattr__(self, name):
        return lambda *arguments, **named: self._call(args=(self._rref, name, arguments, named))


def name_of(function):
    return (
        getattr(function, "__qualname__", None)
        or getattr(function, "__name__", None)
        or type(function).__qualname__
    )


# ---- exceptions


def _full_name(kind):
    return f"{kind.__module__}.{kind.__qualname__}"


def describe(error):
    """(type, text, traceback, ranks, code) of an exception; the last two of muster's own, else
    None.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    trace = "".join(traceback.format_exception(type(error), error, frames))
    ranks, code = None, ""
    if isinstance(error, _C.DistError):
        # Raised by a program, it has but a class.
        of_class = [
            (_C.DistArgumentError, "invalid argument"),
            (_C.DistNetworkError, "network"),
            (_C.DistStoreError, "store"),
        ]
        code = getattr(error, "code", None) or next(
            (word for kind, word in of_class if isinstance(error, kind)), "internal"
        )
        ranks = list(getattr(error, "ranks", []))
    return _full_name(type(error)), str(error), trace, ranks, code


def _class_of(name):
    """The exception class of that full name, in a module that is imported already: an answer
    imports nothing. None where there is none.
    """
    if "::" in name or "." not in name:
        return None  # of C++'s
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:length]))
        if module is None:
            continue
        found = module
        for part in parts[length:]:
            found = vars(found).get(part) if isinstance(found, type) or found is module else None
        return found if isinstance(found, type) and issubclass(found, Exception) else None
    return None


def error(fallback, worker, worker_id, kind, text, trace):
    """The exception to raise here for one that was raised on `worker`; `fallback` where its type is
    not known here.
    """
    known = _class_of(kind)
    made = fallback
    if known is not None:
        message = str(fallback).replace(kind, known.__qualname__, 1)
        try:
            made = known(message)
        except Exception:  # its constructor wants something else
            made = known.__new__(known, message)
            made.args = (message,)
    try:
        made.worker, made.worker_id, made.remote_type, made.remote_text, made.remote_traceback = (
            worker,
            worker_id,
            kind,
            text,
            trace,
        )
        if trace and hasattr(made, "add_note"):
            made.add_note(f"On worker {worker!r}:\n{trace}")
    except AttributeError:
        pass  # a class with slots
    return made


# ---- futures


class Future(torch.futures.Future):
    """The result of rpc_async: a torch.futures.Future. A thread that waits for it processes this
    worker's messages meanwhile.
    """

    _call = None

    def wait(self):
        """Returns the result; raises what the function over there has raised, or why there is no
        answer.
        """
        if self._call is not None and not self.done():
            self._call.wait()
        return super().wait()

    def then(self, callback):
        self._has_callbacks()
        return super().then(callback)

    def add_done_callback(self, callback):
        self._has_callbacks()
        super().add_done_callback(callback)

    def _has_callbacks(self):
        if self._call is not None:
            self._call.has_callbacks()


def complete(future, call):
    try:
        value = call.result()
    except Exception as error:
        future.set_exception(error)
    except BaseException as error:
        future.set_exception(RuntimeError(repr(error)))
    else:
        future.set_result(value)
    future._call = None


_C._set_rpc_inside(dumps, loads, serve, LATER, describe, error, complete)
