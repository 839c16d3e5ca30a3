"""Read pickles from others without calling anything that they name."""

import pickletools
from typing import Any

import numpy as np

__all__ = ["read_pickle"]


class PickledArray:
    """An array in a pickle; only its shape and its bytes are used."""

    state: tuple[Any, ...] = ()

    def array(self) -> np.ndarray:
        _, shape, dtype, fortran, content = self.state
        if dtype is not UINT8 or type(content) is not bytes:
            raise ValueError("its arrays must be of bytes")
        # A copy, as in `sources.read_idx`.
        return np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C").copy()


UINT8 = object()  # stands for NumPy's
NAMES = {  # that a pickle may ask for
    "numpy.core.multiarray _reconstruct": "array",
    "numpy._core.multiarray _reconstruct": "array",  # as NumPy 2 has it
    "numpy ndarray": "ndarray",
    "numpy dtype": "dtype",
    "_codecs encode": "encode",  # how Python 3 writes bytes for Python 2
}
STEPS = 2_000_000  # ten times those of CIFAR-100's training part
ENCODED = 2**29  # bytes, three times that part's


def read_pickle(content: bytes) -> Any:
    """Return what a pickle holds: dictionaries, lists, tuples, integers, strings and arrays of bytes, nothing else.

    Python's own reader calls what a pickle names, with the arguments and the state that it gives. So a pickle can make
    it execute code, read memory at planted addresses, or crash. This reader calls nothing: it accepts only instructions
    that build such values.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    encoded = 0

    def since_mark() -> list[Any]:
        place = marks.pop()
        found = stack[place:]
        del stack[place:]
        return found

    def append(items: list[Any]) -> None:
        if type(stack[-1]) is not list:
            raise ValueError("it appends to something that is not a list")
        stack[-1] += items

    def set_items(items: list[Any]) -> None:
        # Keys are strings, since hashing nested tuples may recurse without limit.
        if type(stack[-1]) is not dict or not all(type(key) in (bytes, str) for key in items[::2]):
            raise ValueError("it sets an item of something that is not a dictionary of strings")
        stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def ask(name: str) -> None:
        if name not in NAMES:
            raise ValueError(f"it asks for {name.replace(' ', '.'):.80}, which no data file needs")
        stack.append(NAMES[name])

    instructions: Any = pickletools.genops(content)
    for step, (code, value, _) in enumerate(instructions):
        if step == STEPS:
            raise ValueError(f"it has more than {STEPS:,} instructions")
        match code.name:
            case "BININT" | "BININT1" | "BININT2" | "INT" | "LONG" | "LONG1":
                stack.append(value)
            case "STRING" | "BINSTRING" | "SHORT_BINSTRING":  # Python 2's, that is bytes
                stack.append(value.encode("latin-1"))
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[value] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            case "UNICODE" | "BINUNICODE" | "SHORT_BINUNICODE" | "BINBYTES" | "SHORT_BINBYTES":
                stack.append(value)
            case "MARK":
                marks.append(len(stack))
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[code.name])
            case "EMPTY_TUPLE" | "EMPTY_LIST" | "EMPTY_DICT":
                stack.append({"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict}[code.name]())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(code.name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "LIST":
                stack.append(since_mark())
            case "DICT":
                items = since_mark()
                stack.append({})
                set_items(items)
            case "APPEND":
                append([stack.pop()])
            case "APPENDS":
                append(since_mark())
            case "SETITEM":
                item = stack.pop()
                set_items([stack.pop(), item])
            case "SETITEMS":
                set_items(since_mark())
            case "GLOBAL":
                ask(value)
            case "STACK_GLOBAL":
                name = stack.pop()
                ask(f"{stack.pop():.80} {name:.80}")
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                if function == "array":
                    stack.append(PickledArray())
                elif function == "dtype" and arguments[0] in ("u1", b"u1"):
                    stack.append(UINT8)
                elif function == "encode" and arguments[1] == "latin1":
                    stack.append(arguments[0].encode("latin-1"))
                    encoded += len(stack[-1])
                    if encoded > ENCODED:
                        raise ValueError("it unpacks to far more than a data file holds")
                else:
                    raise ValueError("it makes something other than arrays of bytes")
            case "BUILD":
                state = stack.pop()
                if type(stack[-1]) is PickledArray and type(state) is tuple:
                    stack[-1].state = state
                elif stack[-1] is not UINT8:
                    raise ValueError("it makes something other than arrays of bytes")
            case "STOP":
                return stack.pop()
            case "PROTO" | "FRAME":
                pass
            case other:
                raise ValueError(f"it has the instruction {other}, which no data file needs")
