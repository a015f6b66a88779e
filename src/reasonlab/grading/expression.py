"""A small reader of mathematical expressions: tokens, then a tree. It knows LaTeX as answers use it and nothing else.

The tree is data (nested tuples); what it is worth is the business of `numeric.py`. Nothing here calls a parser that can
run code, and both the number of tokens and the depth are bounded.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

Node = tuple[Any, ...]  # ("num", Fraction, decimals) ("sym", name) ("add", …) ("mul", …) ("pow", a, b) ("fn", name, …)

MOST_TOKENS = 600
DEEPEST = 40
MOST_DIGITS = 1000
MOST_FACTORS = 100  # of a product, and signs after a number


class UnreadableError(Exception):
    """Not an expression we know how to read."""


class ProseError(UnreadableError):
    """Words, not mathematics."""


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


FUNCTIONS = _names(
    "sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh coth ln log lg exp sqrt cbrt abs "
    "floor ceil gcd lcm max min Re Im det arg sgn"
)
UNEVALUATED = _names("sum prod int iint oint lim")
_UNKNOWN = _names(
    "partial nabla bigcup bigcap forall exists Rightarrow implies iff rightarrow mapsto left right begin "
    "end cases pmod bmod mod underbrace overbrace stackrel circ cap subset"
)
_ACCENTS = _names(
    "overline overrightarrow vec hat bar tilde widehat widetilde dot ddot mathbb mathcal mathfrak mathscr "
    "underline overleftrightarrow overarc wideparen"
)
_SHORT_WORDS = _names(
    "no yes odd the is are of for all any day way not but its let so we sum mod to be as it on by at if "
    "one two six ten red sat sun mon tue wed thu fri may jan feb mar apr jun jul aug sep oct nov dec"
)
_TOKEN = re.compile(
    r"\s+|[0-9]+(?:\.\d+)?[eE][+-]?\d{1,3}(?![\d.])|\d+(?:\.\d+)?|\.\d+|\\[A-Za-z]+|\\.|[A-Za-z]+"
    r"|<=|>=|!=|==|=>|[^\sA-Za-z\d]",
)
_TEXT_BODY = re.compile(r"\s*\{([^{}]*)\}")
_RELATIONS = {
    "=": "=", "==": "=", "<": "<", ">": ">", "<=": "≤", ">=": "≥", "!=": "≠", r"\le": "≤", r"\ge": "≥", r"\ne": "≠",
    r"\approx": "≈", r"\in": "∈", r"\equiv": "≡", r"\sim": "∼", r"\propto": "∝", r"\cong": "≅",
}  # fmt: skip
_CONNECTIVES = {"and", "or", "and or", "und", "et", "ou", "和", "或", "与", "或者", "以及"}


def tokenise(text: str) -> list[str]:
    """Tokens as strings. `\\text{…}` becomes `t:…`, a word we know a separator or relation; other words are prose."""
    tokens: list[str] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        assert match is not None  # the last alternative takes any character
        token = match.group(0)
        before, position = position - 1, match.end()
        if token.isspace():
            # a space between two numbers means something: 1 1/4
            if tokens and tokens[-1][-1].isdecimal() and text[position : position + 1].isdecimal():
                tokens.append(" ")
            continue
        if token == r"\text" and (body := _TEXT_BODY.match(text, position)):
            position = body.end()
            token = _text_token(body.group(1))
        elif token == r"\text":
            continue  # "\rm x"
        elif token[0] == "\\" and token[1:] in _ACCENTS and (body := _TEXT_BODY.match(text, position)):
            if not (token in (r"\overline", r"\dot", r"\bar") and body.group(1).strip().isdecimal()):
                position = body.end()
                token = f"s:{token[1:]} {''.join(body.group(1).split())}"
        elif token == "!=" and tokens and (tokens[-1][-1].isdecimal() or tokens[-1] == ")") and text[before] != " ":
            tokens.append("!")  # 6!=720
            token = "r:="
        elif token in _RELATIONS:
            token = "r:" + _RELATIONS[token]
        elif token[0].isalpha():
            tokens.extend(_words(token))
            continue
        if token:
            tokens.append(token)
        if len(tokens) > MOST_TOKENS:
            raise UnreadableError("too many tokens")
    return tokens


def _text_token(body: str) -> str:
    word = " ".join(body.split()).strip(" ,.")
    if word.lower() in _CONNECTIVES:
        return "&"
    if word in FUNCTIONS:
        return "\\" + word
    if word in ("e", "i"):
        return word
    if re.fullmatch(r"-?\d+(?:\.\d+)?", word):
        return word
    return f"s:{word.lower() if len(word) > 1 else word}" if word else ""


def _words(word: str) -> list[str]:
    """Letters in a row: a connective, a function, short products such as `xy`, or prose."""
    if len(word) == 1 and word.isascii():
        return [word]
    lower = word.lower()
    if lower in _CONNECTIVES:
        return ["&"]
    if word in FUNCTIONS or word == "pi":
        return ["\\" + word]
    if lower in ("infinity", "inf", "oo"):
        return [r"\infty"]
    if word.startswith(("sqrt", "log", "sin", "cos", "tan")) and len(word) == 4:
        return ["\\" + word[:-1], word[-1]] if word[:-1] in FUNCTIONS else ["\\" + word]
    if lower in _SHORT_WORDS or len(word) > 3 or not word.isascii():
        raise ProseError(word)
    return list(word)


class Parser:
    """Recursive descent over tokens. `sign` is what `\\pm` stands for."""

    def __init__(self, tokens: list[str], sign: int = 1) -> None:
        self.tokens = list(tokens)
        self.at = 0
        self.sign = sign
        self.depth = 0
        self.bars = 0
        self.angle = False

    def parse(self) -> Node:
        node = self.sum()
        if self.at != len(self.tokens):
            raise UnreadableError(self.tokens[self.at])
        return node

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        if not token:
            raise UnreadableError("the end came too early")
        self.at += 1
        return token

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > DEEPEST:
            raise UnreadableError("nested too deeply")
        terms = [self.product()]
        while self.peek() in ("+", "-", r"\pm", r"\mp"):
            negative = self._negative(self.take())
            term = self.product()
            terms.append(negate(term) if negative else term)
        self.depth -= 1
        return terms[0] if len(terms) == 1 else ("add", *terms)

    def _negative(self, token: str) -> bool:
        return token == "-" or (token == r"\pm" and self.sign < 0) or (token == r"\mp" and self.sign > 0)

    def product(self) -> Node:
        node = self.signed()
        for _ in range(MOST_FACTORS):
            token = self.peek()
            if token in ("*", r"\cdot", r"\times"):
                self.take()
                node = multiply(node, self.signed())
            elif token in ("/", r"\div"):
                self.take()
                node = divide(node, self.signed())
            elif self._starts_factor(token):
                node = self._beside(node)
            else:
                return node
        raise UnreadableError("too many factors")

    def _beside(self, node: Node) -> Node:
        """Two things side by side: a product, or a mixed number such as 2 1/3."""
        if self.peek() == " ":
            self.take()
            numerator, slash, denominator = self.tokens[self.at : self.at + 3] + [""] * (
                3 - len(self.tokens[self.at :])
            )
            if (
                node[0] == "num"
                and slash == "/"
                and numerator.isdecimal()
                and denominator.isdecimal()
                and int(numerator) < int(denominator)
            ):
                self.at += 3
                return _mixed(node, ("num", Fraction(int(numerator), int(denominator)), -1))
            raise UnreadableError("two numbers side by side")
        mixed = self.peek() == r"\frac" and node[0] == "num" and node[2] == 0
        if self.peek()[0].isdecimal() and node[0] == "num":
            raise UnreadableError("two numbers side by side")
        factor = self.power()
        if (
            mixed
            and factor[0] == "div"
            and _whole(factor[1])
            and _whole(factor[2])
            and 0 <= factor[1][1] < factor[2][1]
        ):
            return _mixed(node, factor)
        return multiply(node, factor)

    def _starts_factor(self, token: str) -> bool:
        if not token or token in ("|", r"\|"):
            return bool(token) and not self.bars
        if token in ("(", "{", "[", r"\{", " ", r"\lfloor", r"\lceil"):
            return True
        if token[0] == "\\":
            return token[1:].isalpha() and token not in (
                r"\pm",
                r"\mp",
                r"\cup",
                r"\deg",
                r"\rfloor",
                r"\rceil",
                r"\cap",
            )
        return (token[0].isalnum() and token[:2] != "r:") or (token[0] == "." and len(token) > 1)

    def signed(self) -> Node:
        token = self.peek()
        if token in ("+", "-", r"\pm", r"\mp"):
            self.take()
            self.depth += 1
            if self.depth > DEEPEST:
                raise UnreadableError("nested too deeply")
            node = self.signed()
            self.depth -= 1
            return negate(node) if self._negative(token) else node
        return self.power()

    def power(self) -> Node:
        node = self.atom()
        for _ in range(MOST_FACTORS):
            token = self.peek()
            if token == "^":
                self.take()
                node = self._raise(node)
            elif token == "!":
                self.take()
                node = ("fn", "factorial", node)
            elif token == r"\deg":
                self.take()
                if self.angle:
                    node = multiply(node, divide(("sym", "π"), ("num", Fraction(180), 0)))
            elif token == "%":
                self.take()
                node = divide(node, ("num", Fraction(100), 0))
            elif token == "'" and node[0] == "sym":
                self.take()
                node = ("sym", node[1] + "'")
            elif token == "_" and node[0] in ("sym", "pow") and (node[0] == "sym" or node[1][0] == "sym"):
                self.take()
                index = self.raw_argument()
                symbol = node if node[0] == "sym" else node[1]
                named = ("sym", f"{symbol[1]}_{index}")
                node = named if node[0] == "sym" else ("pow", named, node[2])
            else:
                return node
        raise UnreadableError("too many signs")

    def _raise(self, node: Node) -> Node:
        if self.peek() in (r"\prime", "*", r"\star", r"\dagger"):
            return ("sym", f"{node[1]}{self.take()}") if node[0] == "sym" else self._fail()
        if self.tokens[self.at : self.at + 3] == ["{", r"\prime", "}"] and node[0] == "sym":
            self.at += 3
            return ("sym", node[1] + "'")
        if self.peek() in ("+", "-"):
            exponent = self.signed()
        else:
            exponent = self.argument(whole_numbers=True)
            if self.peek() == "^":  # towers are read from the right
                self.take()
                self.depth += 1
                if self.depth > DEEPEST:
                    raise UnreadableError("nested too deeply")
                exponent = self._raise(exponent)
                self.depth -= 1
        return ("pow", node, exponent)

    def _fail(self) -> Node:
        raise UnreadableError(self.peek())

    def atom(self) -> Node:
        token = self.take()
        if token == " ":  # \log_2 8
            token = self.take()
        if token[0] in "0123456789" or (token[0] == "." and len(token) > 1):
            return self._number(token)
        if token in ("(", "{", "[", r"\{", r"\lfloor", r"\lceil", "|", r"\|"):
            return self._bracket(token)
        if token[:2] == "s:":
            return ("sym", token[2:])
        if token == "i":
            return ("sym", "ⅈ")
        if token == "e":
            return ("sym", "ℯ")
        if len(token) == 1 and token.isalpha() and token.isascii():
            return ("sym", token)
        if token[0] == "\\":
            return self._command(token[1:])
        raise UnreadableError(token)

    def _number(self, token: str) -> Node:
        if len(token) > MOST_DIGITS:
            raise UnreadableError("too many digits")
        if "e" in token or "E" in token:
            return ("num", Fraction(token), -1)
        decimals = len(token.partition(".")[2])
        if self.peek() in (r"\overline", r"\dot", r"\bar") and decimals + token.endswith("."):
            return self._recurring(token, decimals)
        if self.peek() == "." and self.tokens[self.at + 1 : self.at + 2] in ([r"\overline"], [r"\dot"], [r"\bar"]):
            self.take()
            return self._recurring(token, 0)
        return ("num", Fraction(token), decimals)

    def _recurring(self, token: str, decimals: int) -> Node:
        self.take()
        digits = self.raw_argument()
        if not digits.isdecimal() or len(digits) > MOST_DIGITS:
            raise UnreadableError(digits)
        tail = Fraction(int(digits), (10 ** len(digits) - 1) * 10**decimals)
        return ("num", Fraction(token) + tail, -1)

    def _bracket(self, token: str) -> Node:
        closing = {"(": ")", "{": "}", "[": "]", r"\{": r"\}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}.get(
            token, token
        )
        bars, self.bars = self.bars, int(closing == token)
        angle = self.angle
        self.angle = angle and token in ("(", "{")
        node = self.sum()
        if self.take() != closing:
            raise UnreadableError(f"no {closing}")
        self.bars, self.angle = bars, angle
        name = {r"\lfloor": "floor", r"\lceil": "ceil", "|": "abs", r"\|": "abs"}.get(token)
        return ("fn", name, node) if name else node

    def _command(self, name: str) -> Node:
        if name == "frac":
            top = self.argument()
            return divide(top, self.argument())
        if name in ("binom", "dbinom", "tbinom"):
            n = self.argument()
            return ("fn", "binom", n, self.argument())
        if name == "sqrt":
            return self._root()
        if name in FUNCTIONS:
            return self._function(name)
        if name in UNEVALUATED:
            return self._unevaluated(name)
        if name == "pi":
            return ("sym", "π")
        if name == "infty":
            return ("inf",)
        if name in _UNKNOWN or not name.isalpha():
            raise UnreadableError("\\" + name)
        return ("sym", "\\" + name)

    def _root(self) -> Node:
        degree: Node = ("num", Fraction(2), 0)
        if self.peek() == "[":
            self.take()
            degree = self.sum()
            if self.take() != "]":
                raise UnreadableError("no ]")
        inside = self.argument(whole_numbers=True)
        return ("pow", inside, divide(("num", Fraction(1), 0), degree))

    def _function(self, name: str) -> Node:
        exponent: Node | None = None
        base: Node | None = None
        for _ in range(2):
            if self.peek() == "^":
                self.take()
                exponent = self.argument(whole_numbers=True) if self.peek() != "-" else self.signed()
            elif self.peek() == "_":
                self.take()
                base = self.argument(whole_numbers=True)
        angle, self.angle = self.angle, name in ("sin", "cos", "tan", "cot", "sec", "csc")
        arguments = self._arguments()
        self.angle = angle
        if exponent == ("num", Fraction(-1), 0) or exponent == ("neg", ("num", Fraction(1), 0)):
            name, exponent = "arc" + name, None
        node: Node = ("fn", name, *arguments) if base is None else ("fn", name, *arguments, base)
        return node if exponent is None else ("pow", node, exponent)

    def _unevaluated(self, name: str) -> Node:
        """A sum or an integral: its limits as they are written, and what it runs over."""
        limits = {"_": "", "^": ""}
        for _ in range(2):
            if self.peek() in limits:
                place = self.take()
                limits[place] = self.raw_argument()
        return ("fn", name, ("sym", f"{name} from {limits['_']} to {limits['^']}"), self.product())

    def _arguments(self) -> list[Node]:
        if self.peek() == "(":
            self.take()
            arguments = [self.sum()]
            while self.peek() == ",":
                self.take()
                arguments.append(self.sum())
            if self.take() != ")":
                raise UnreadableError("no )")
            return arguments
        node = self.power()
        while True:  # \sin 2x, but not \sin x \cos x
            token = self.peek()
            if not self._starts_factor(token) or token in ("(", "[", r"\{") or token[1:] in FUNCTIONS:
                return [node]
            node = self._beside(node)

    def argument(self, whole_numbers: bool = False) -> Node:
        """What a command applies to: a group or one token. \\frac12 takes one digit, 2^10 the whole number."""
        token = self.peek()
        if token == " ":
            self.take()
            token = self.peek()
        if token.isdecimal() and len(token) > 1 and not whole_numbers:
            self.tokens[self.at : self.at + 1] = [token[0], token[1:]]
        if token[:1] in "-+":
            return self.signed()
        node = self.atom()
        return node

    def raw_argument(self) -> str:
        """The argument as written, for names: x_{max}, \\overline{3}."""
        if self.peek() != "{":
            return self.take().removeprefix("s:")
        self.take()
        parts: list[str] = []
        depth = 1
        while True:
            token = self.take()
            depth += (token == "{") - (token == "}")
            if depth == 0:
                return "".join(parts)
            parts.append(token.removeprefix("s:"))


def _mixed(whole: Node, part: Node) -> Node:
    value = part[1] if part[0] == "num" else part[1][1] / part[2][1]
    return ("num", whole[1] - value if whole[1] < 0 else whole[1] + value, -1)


def _whole(node: Node) -> bool:
    return bool(node[0] == "num" and node[2] == 0)


def negate(node: Node) -> Node:
    return ("num", -node[1], node[2]) if node[0] == "num" else ("neg", node)


def multiply(a: Node, b: Node) -> Node:
    return ("mul", a, b)


def divide(a: Node, b: Node) -> Node:
    return ("div", a, b)


def symbols(node: Node) -> set[str]:
    """The names in a tree, constants left out."""
    if node[0] == "sym":
        return set() if node[1] in ("π", "ℯ", "ⅈ") else {node[1]}
    return set().union(*(symbols(part) for part in node if isinstance(part, tuple)))
