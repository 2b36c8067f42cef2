"""Text of templates within sentences, by name: without it words would be missing.

Templates are pages of a wiki, which a dump of articles does not have. These are the frequent ones whose text is in
their values; notes are dropped, and so is what stands alone on its line, such as boxes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(","))


SPACES = _names("nbsp, nbs, space, spaces, snd, spnd, spaced ndash, ndash, mdash, mdashb, dash")
SIGNS = {"!": "|", "=": "=", "'": "'", "'s": "'s", '-"': "", "·": "·", "•": "•", "dot": "·", "sic": ""}
# {{lang|fr|mot}}, {{color|red|word}}: a single value is the language or color.
SECOND_VALUE = _names(
    "lang, lang2, langx, xlang, rtl-lang, langue, transl, transliteration, script, color, colour, font color, fontcolor"
)
LAST_VALUE = _names("nowrap, nobr, small, big, visible anchor")
FIRST_VALUE = _names(
    # Links to other languages, in English, Chinese, Japanese, Russian.
    "ill, ill2, illm, interlanguage link, le, tsl, internal link helper, link-interwiki, 仮リンク, нп1, нп2, нп3, нп4, "
    "нп5, не переведено, не переведено 2, не переведено 3, не переведено 5, "
    # Words with a reading or translation.
    "nihongo, nihongo2, nihongo3, 読み仮名, ruby, ruby-ja, ふりがな, китайский, linktext, proper name, not a typo, "
    # Numbers and formulas.
    "val, num, nombre, число, unité, formatnum, math, mvar, math2, s, "
    # Looks.
    "angbr, angle bracket, grapheme, sc, smallcaps, sub, sup, abbr, tooltip, abbrlink, abréviation, quote, strong, em, "
    "b, i, bold, italic, code, mono, kbd, samp, tt, var, underline, overline, bdi, as written"
)
# {{convert|5|km}}: number and unit.
TWO_VALUES = _names("convert, cvt, unit, einheit")
JOINED = _names("chem, chem2, ce, formule chimique")
SHIPS = _names("uss, hms, hmas, hmcs, rms, ss, mv, uscgc")
AFTER_NAME = {"as of": "As of ", "since": "Since ", "circa": "c. ", "c.": "c. ", "ca": "ca. "}
FRACTIONS = _names("frac, sfrac, fraction")
# Notes to readers and authors: the sentence is complete without them. Beginnings of names; "$" ends one.
_NOTES = re.compile(
    r"(?:#|-$|infobox|cit[ae]|citation|sfn|efn|ref|note|harv|rp$|r$|fn|cn$|fact|who|when$|where$|which$|why$|"
    r"by whom|clarif|dubious|disputed|verif|unreferenced|unsourced|uncited|page needed|failed|dead|better|weasel|"
    r"vague|update|according|original research|or$|specify|need|inline|in lang|attrib|expand|example|self|t$|tl$|pp-|"
    r"short desc|coord|anchor|portal|main|see|clear|flag|ipa|respell|audio|pron|listen|stub|authority|defaultsort|"
    r"commons|sister|wikt|toc|use |good|featured|about|other|redirect|hatnote|"
    r"источник|нет аи|кто|когда|где|какой|проверить|примечани|переход|уточнить|求来源|来源请求|來源請求|何时|谁|"
    r"要出典|誰|いつ|要検証|出典|réf|quand|qui|où|belege|wer|wann|cita req|cr$|사실|출처|누가|언제)"
)


def template_text(name: str, values: Sequence[str]) -> str | None:
    """The text of a template; empty if it shows none in a sentence, None if it is unknown.

    Args:
        name: name, lower-cased.
        values: values without a name, in order.
    """
    function, colon, value = name.partition(":")
    if colon and function in ("formatnum", "lc", "uc", "ucfirst", "lcfirst"):
        return value.strip()
    if name in SPACES:
        return " "
    if name in SIGNS:
        return SIGNS[name]
    if name in SECOND_VALUE:
        return values[-1] if len(values) > 1 else ""
    if name in LAST_VALUE:
        return "".join(values[-1:])
    if name in FIRST_VALUE or name.startswith(("lang-", "link-")):
        return next((value for value in values if value.strip()), "")
    return _of_several(name, values)


def _of_several(name: str, values: Sequence[str]) -> str | None:
    if name in TWO_VALUES:
        return " ".join(values[:2]) if len(values) > 1 else ""
    if name in JOINED:
        return "".join(values)
    if name in SHIPS:
        return " ".join([name.upper(), *values[:1]])
    if name == "date":
        return " ".join(values[:3])
    if name in AFTER_NAME:
        return AFTER_NAME[name] + " ".join(values)
    if name in FRACTIONS and values:
        return "/".join(values) if len(values) < 3 else f"{values[0]} {values[1]}/{values[2]}"
    return "" if _NOTES.match(name) else None
