"""One spelling for one answer: LaTeX and unicode clean-up before anything is compared or parsed.

Every step is a table look-up or a linear scan, so a megabyte of model text costs milliseconds.
"""

from __future__ import annotations

import re
from functools import lru_cache

LONGEST = 2000  # characters; nothing longer is parsed, and no formula among the golds we know comes near it

_UNICODE = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": r" \times ", "·": r" \cdot ", "⋅": r" \cdot ",
    "÷": r" \div ",
    "∗": "*", "∕": "/", "⁄": "/", "√": r"\sqrt ", "∛": r"\sqrt[3] ", "π": r" \pi ", "∞": r" \infty ", "∪": r" \cup ",
    "∩": r" \cap ", "≤": r" \le ", "⩽": r" \le ", "≥": r" \ge ", "⩾": r" \ge ", "≠": r" \ne ", "≈": r" \approx ",
    "∈": r" \in ", "±": r" \pm ", "∓": r" \mp ", "°": r"\deg ", "º": r"\deg ", "∅": r" \emptyset ", "∖": r" \setminus ",
    "θ": r" \theta ", "α": r" \alpha ", "β": r" \beta ", "γ": r" \gamma ", "δ": r" \delta ", "λ": r" \lambda ",
    "μ": r" \mu ", "ω": r" \omega ", "φ": r" \phi ", "ρ": r" \rho ", "σ": r" \sigma ", "τ": r" \tau ", "Δ": r" \Delta ",
    "²": "^{2}", "³": "^{3}", "¹": "^{1}", "⁰": "^{0}", "⁴": "^{4}", "⁵": "^{5}", "⁶": "^{6}", "⁷": "^{7}", "⁸": "^{8}",
    "⁹": "^{9}", "ⁿ": "^{n}", "₀": "_{0}", "₁": "_{1}", "₂": "_{2}", "₃": "_{3}", "₄": "_{4}", "₅": "_{5}", "₆": "_{6}",
    "₇": "_{7}", "₈": "_{8}", "₉": "_{9}", "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}",
    "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅕": r"\frac{1}{5}", "⅙": r"\frac{1}{6}", "⅛": r"\frac{1}{8}",
    "，": ",", "；": ";", "：": ":", "（": "(", "）": ")", "。": ".", "、": ",", "％": "%", "＝": "=", "＋": "+",
    "“": '"', "”": '"', "‘": "'", "’": "'", "′": "'", "ℝ": r"\mathbb{R}", "⟨": r"\langle ", "⟩": r"\rangle ",
    "€": "", "£": "", "¥": "", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2061": "", "\u2062": "", "\u200b": "",
}  # fmt: skip
_TABLE = str.maketrans(_UNICODE)

# What says how a formula looks and not what it means. The order is that of the alternatives below.
_COMMANDS = {
    **dict.fromkeys(["dfrac", "tfrac", "cfrac"], r"\frac"),
    **dict.fromkeys(
        [
            "mbox",
            "textbf",
            "textrm",
            "textit",
            "textnormal",
            "textsf",
            "texttt",
            "mathrm",
            "mathbf",
            "mathit",
            "hbox",
            "mathsf",
            "mathtt",
            "mathop",
            "operatorname",
            "operatorname*",
            "boldsymbol",
            "bm",
            "emph",
            "textup",
            "rm",
        ],
        r"\text",
    ),
    **dict.fromkeys(
        [
            "left",
            "right",
            "bigl",
            "bigr",
            "Bigl",
            "Bigr",
            "biggl",
            "biggr",
            "Biggl",
            "Biggr",
            "big",
            "Big",
            "bigg",
            "Bigg",
            "middle",
            "displaystyle",
            "textstyle",
            "scriptstyle",
            "limits",
            "nolimits",
            "mathstrut",
            "hfill",
            "bf",
            "it",
            "boldmath",
            "nonumber",
            "dollar",
            "protect",
        ],
        "",
    ),
    **dict.fromkeys(["quad", "qquad", "enspace", "enskip", "thinspace", "space", "newline"], " "),
    **dict.fromkeys(["leq", "leqslant", "leqq"], r"\le"),
    **dict.fromkeys(["geq", "geqslant", "geqq"], r"\ge"),
    **dict.fromkeys(["lt"], "<"),
    **dict.fromkeys(["gt"], ">"),
    **dict.fromkeys(["neq"], r"\ne"),
    **dict.fromkeys(["simeq", "thickapprox", "fallingdotseq", "doteq"], r"\approx"),
    **dict.fromkeys(["lbrace"], r"\{"),
    **dict.fromkeys(["rbrace"], r"\}"),
    **dict.fromkeys(["lbrack"], "["),
    **dict.fromkeys(["rbrack"], "]"),
    **dict.fromkeys(["lvert", "rvert", "vert", "mid"], "|"),
    **dict.fromkeys(["degree", "degrees"], r"\deg"),
    **dict.fromkeys(["varnothing"], r"\emptyset"),
    **dict.fromkeys(["to", "longrightarrow"], r"\rightarrow"),
    "backslash": r"\setminus",
    "ast": "*",
    "colon": ":",
    "infin": r"\infty",
    "land": r"\text{and}",
    "lor": r"\text{or}",
}
_COMMAND = re.compile(r"\\([A-Za-z]+\*?)")
_TWICE = re.compile(  # "\\frac": the text went through an escape too many; "\\\frac" is a new row and a fraction
    r"(?<!\\)\\\\(?=(?:[dtc]?frac|left|right|sqrt|leq?|geq?|pi|infty|text|boxed|cup|cdot|times|neq|circ|in|pm|begin|end|%)"
    r"(?![A-Za-z]))"
)
_BOLD_LETTER = re.compile(r"\\(?:mathbf|boldsymbol|bm)\{\s*([a-z])\s*\}")  # a vector; capitals may be choices
_CHINESE = re.compile(r"[\u3400-\u9fff]+")
_POWERS_OF_TEN = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_LARGE_WORDS = re.compile(r"(?<=[\d\s}])(\\text\s*\{)?\s*\b(hundred|thousand|million|billion|trillion)s?\b")
_LINES = re.compile(r"(?<=\$)[ \t,;]*\n\s*(?=\$)")  # formulas on lines of their own
_QUADS = re.compile(r"(?:\\q?quad\b\s*)+")
_RELATION = re.compile(r"[=<>]|\\[lg]eq?(?![a-z])|\\text|and")
_SPACES = re.compile(r"(?<!\\)\\[,;:> ]|~|\\hspace\*?\{[^{}]*\}|\\phantom\{[^{}]*\}|\s+")
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|(?<=[\d\s}])degrees?\b")
_PERCENT = re.compile(
    r"\\%|\\text\{\s*(?:%|percent|pct|per\s?cent)\s*\}|(?<=[\d\s}])(?:percentage|percent|per cent|pct)\b"
)
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\!,|\{,\}\\!)\s*(?=\d{3}(?!\d))")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d,]|\.\d)")
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"))
_TEXT_ONLY = re.compile(r"\\text\s*\{([^{}\\$]*)\}")
_SPACE_OF_NO_MEANING = re.compile(r"(?<!\d)\s+|\s+(?!\d)")  # 1 1/2 is not 11/2


def _command(match: re.Match[str]) -> str:
    name = match.group(1)
    plain = _COMMANDS.get(name)
    if plain is None:
        return match.group(0)
    # "\le" must not run into the letter after it
    return (
        plain + " " if plain.startswith("\\") and plain[1:].isalpha() and plain not in (r"\frac", r"\text") else plain
    )


@lru_cache(maxsize=8192)
def normalise(answer: str) -> str:
    """The answer without its wrappings: one spelling of commands, spaces, degree signs, percents and thousands."""
    text = answer.strip()
    if not text.isascii():
        text = text.translate(_TABLE)
        if r"\text" not in text and r"\mathrm" not in text:
            text = _CHINESE.sub(r"\\text{\g<0>}", text)
    text = unwrap(text)
    if "\n" in text and "$" in text:
        text = _LINES.sub(" ; ", text)
    if "\\" in text:
        if "\\\\" in text:
            text = _TWICE.sub(lambda _: "\\", text)
            if r"\begin" not in text:
                text = text.replace("\\\\", " ; ")
        text = text.replace(r"\$", "")
        text = _THOUSANDS.sub("", text).replace(r"\!", "")
        if "bf{" in text or "bm{" in text or "symbol{" in text:
            text = _BOLD_LETTER.sub(r"\\vec{\1}", text)
        if "quad" in text:
            text = _split_at_quads(text)
        text = _COMMAND.sub(_command, text)
        text = text.replace(r"\(", "").replace(r"\)", "").replace(r"\[", "").replace(r"\]", "")
        if "circ" in text:
            text = _DEGREES.sub(r"\\deg ", text)
    elif "{,}" in text:
        text = _THOUSANDS.sub("", text)
    if "degree" in text:
        text = _DEGREES.sub(r"\\deg ", text)
    text = text.replace("$", "")
    if "%" in text or "p" in text:
        text = _PERCENT.sub("%", text)
    if "llion" in text or "thousand" in text or "hundred" in text:
        text = _LARGE_WORDS.sub(_power_of_ten, text)
    text = _SPACES.sub(" ", text).strip()
    if " " in text and not text.isalpha():
        text = _GROUPED.sub(lambda m: m.group(0).replace(" ", ""), text)
    text = text.rstrip(" .,;:\\") if not text.endswith(("\\}", "\\|")) else text
    return text.replace("**", "^") if "**" in text else text


def _power_of_ten(match: re.Match[str]) -> str:
    return rf" \times 10^{{{_POWERS_OF_TEN[match.group(2)]}}} {match.group(1) or ''}"


def _split_at_quads(text: str) -> str:
    """Equations set apart by white space are a list of equations."""
    parts = [part for part in _QUADS.split(text) if part.strip(" ,;")]
    return " ; ".join(parts) if len(parts) > 1 and all(_RELATION.search(part) for part in parts) else text


def unwrap(text: str) -> str:
    """Without `$…$`, `\\(…\\)`, `**…**`, a final full stop and one box around the whole."""
    while True:
        before = text
        for opening, closing in _WRAPPERS:
            inside = text[len(opening) : len(text) - len(closing)]
            wrapped = len(text) >= len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing)
            if wrapped and opening not in inside and closing not in inside:
                text = inside.strip()
        if (text.endswith(".") and not text.endswith("..")) or text.endswith(","):
            text = text[:-1].rstrip()
        for box in (r"\boxed", r"\fbox"):
            if text.startswith(box + "{") and text.endswith("}"):
                inside = text[len(box) + 1 : -1]
                if closes_itself(inside):
                    text = inside.strip()
        if text == before:
            return text


def closes_itself(text: str) -> bool:
    """Whether no brace in the text belongs to one outside."""
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(0), 0)
        if depth < 0:
            return False
    return depth == 0


def spelling(text: str) -> str:
    """What two answers share when they differ only in spaces, quotes, text commands and letter case."""
    bare = _TEXT_ONLY.sub(r"\1", text)
    return _SPACE_OF_NO_MEANING.sub("", bare).replace('"', "").rstrip(".,;:").lower()


def plain_words(text: str) -> str:
    """The text with `\\text{…}` opened."""
    return " ".join(_TEXT_ONLY.sub(r" \1 ", text).split())
