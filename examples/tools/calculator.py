"""A tool that computes: the parts of Python's expressions that are numbers, with bounds on their size, and no ``eval``.

    tools.names=examples/tools/calculator.py:calculator
"""

import ast
import math
import operator

MAX_CHARS = 1000
MAX_BITS = 4096  # of an integer result: what a power may cost is bounded by it
MAX_FACTORIAL = 300  # and of digits to round to

_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def _factorial(value: float) -> int:
    if value > MAX_FACTORIAL:
        raise ValueError(f"factorial of more than {MAX_FACTORIAL}")
    return math.factorial(value)


def _round(value: float, digits: int = 0) -> float:
    if abs(digits) > MAX_FACTORIAL:
        raise ValueError(f"rounding to more than {MAX_FACTORIAL} digits")
    return round(value, digits)


_FUNCTIONS = {
    **{name: getattr(math, name) for name in ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan")},
    **{name: getattr(math, name) for name in ("floor", "ceil", "gcd")},
    "factorial": _factorial,
    "abs": abs,
    "round": _round,
    "min": min,
    "max": max,
}


def calculator(expression: str) -> int | float:
    """Compute an arithmetic expression such as (3 + 4) * 2.

    Operators and precedence are Python's; ``^`` is a power too.

    Raises:
        ValueError: it is no such expression, too long, or its result too large; divisions by zero too.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"an expression has at most {MAX_CHARS} characters")
    source = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/")
    try:
        value = _value(ast.parse(source, mode="eval").body)
    except SyntaxError:
        raise ValueError("this is not an arithmetic expression") from None
    except (RecursionError, MemoryError):
        raise ValueError("the expression is nested too deeply") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the result is too large") from None
    except TypeError as error:
        raise ValueError(str(error)) from None
    if not math.isfinite(value):
        raise ValueError("the result is not finite")
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float()):
            return _bounded(node.value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp() if type(node.op) in _UNARY:
            return _UNARY[type(node.op)](_value(node.operand))
        case ast.BinOp(op=ast.Pow()):
            return _power(_value(node.left), _value(node.right))
        case ast.BinOp() if type(node.op) in _BINARY:
            return _bounded(_BINARY[type(node.op)](_value(node.left), _value(node.right)))
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*map(_value, node.args)))
    raise ValueError(f"'{ast.unparse(node)}' is not arithmetic")


def _power(base: float, exponent: float) -> int | float:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > MAX_BITS:
        raise ValueError("the power is too large")
    return _bounded(base**exponent)


def _bounded(value: int | float) -> int | float:
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError("the number is too large")
    return value
