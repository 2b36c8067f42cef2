"""Character encoding of web pages: byte-order mark, header, markup, and the bytes themselves.

The order is that of the Encoding and HTML standards (https://encoding.spec.whatwg.org), with two exceptions. Bytes
that are valid UTF-8 are UTF-8, whatever is declared: servers add a default charset to pages of any encoding. And bytes
decide between two declarations that contradict each other, and where none is valid.
"""

# ruff: noqa: RUF001 - letters of other scripts
from __future__ import annotations

import codecs
import re
from collections.abc import Iterable

# Longest first: the mark of UTF-32 begins with that of UTF-16.
BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# Browsers read a label as the superset that pages use. A codec that is not in this table decodes no page: labels come
# from strangers, and Python's "unicode_escape", "idna" or "utf-7" are not encodings of the web.
SUPERSETS = {
    "ascii": "cp1252", "iso8859-1": "cp1252", "cp1252": "cp1252", "iso8859-9": "cp1254", "cp1254": "cp1254",
    "iso8859-11": "cp874", "tis-620": "cp874", "cp874": "cp874", "gb2312": "gb18030", "gbk": "gb18030",
    "gb18030": "gb18030", "shift_jis": "cp932", "cp932": "cp932", "euc_kr": "cp949", "cp949": "cp949",
    "euc_jp": "euc_jis_2004", "iso2022_jp": "iso2022_jp_2004", "big5": "big5hkscs", "cp950": "big5hkscs",
    "big5hkscs": "big5hkscs", "hz": "hz", "koi8-r": "koi8-r", "koi8-u": "koi8-u", "cp866": "cp866",
    "mac-roman": "mac-roman", "mac-cyrillic": "mac-cyrillic", "utf-8": "utf-8", "utf-16": "utf-16-le",
    "utf-16-le": "utf-16-le", "utf-16-be": "utf-16-be",
    **{f"iso8859-{part}": f"iso8859-{part}" for part in (2, 3, 4, 5, 6, 7, 8, 10, 13, 14, 15, 16)},
    **{f"cp{page}": f"cp{page}" for page in (1250, 1251, 1253, 1255, 1256, 1257, 1258)},
}  # fmt: skip
# Labels of the standard that Python does not have as aliases.
LABELS = {
    "x-sjis": "cp932", "x-gbk": "gb18030", "gb_2312-80": "gb18030", "x-x-big5": "big5hkscs", "cn-big5": "big5hkscs",
    "x-euc-jp": "euc_jis_2004", "ks_c_5601-1989": "cp949", "windows-949": "cp949", "windows-874": "cp874",
    "dos-874": "cp874", "x-mac-roman": "mac-roman", "x-mac-cyrillic": "mac-cyrillic", "iso-8859-8-i": "iso8859-8",
    "logical": "iso8859-8", "visual": "iso8859-8", "koi": "koi8-r", "koi8": "koi8-r", "unicode": "utf-16-le",
    "unicode-1-1-utf-8": "utf-8", "x-unicode20utf8": "utf-8", "x-user-defined": "cp1252",
    **{f"x-cp125{page}": f"cp125{page}" for page in range(9)},
}  # fmt: skip
HEAD_BYTES = 1 << 14
_HIDDEN = re.compile(rb"<!--.*?-->|<script\b.*?</script", re.DOTALL | re.IGNORECASE)
_META = re.compile(rb"<meta\b[^>]*>", re.IGNORECASE)
_CHARSET = re.compile(rb"charset\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
_PROLOG = re.compile(rb"\s*<\?xml\b[^>]*?\bencoding\s*=\s*[\"']\s*([\w.:-]+)", re.IGNORECASE)
_ESCAPES = re.compile(rb"\x1b\$[@B]")  # ISO-2022-JP, which has ASCII bytes only
_REPLACED = "\ufffd"
_NOISE = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\ufffd]")
_KANA = re.compile("[\u3041-\u30ff]")
_HANGUL = re.compile("[\uac00-\ud7a3]")
NOISE_SHARE = 0.01
DAMAGED_SHARE = 0.3  # of the characters beyond ASCII; text of another encoding has nearly all
# Evidence that each guess needs, as a share of the characters beyond ASCII. Text of another encoding has about a third.
KANA_SHARE, COMMON_SHARE, LETTER_SHARE = 0.2, 0.6, 0.55
SAMPLE_BYTES = 1 << 16
# Frequent letters beyond ASCII of the languages that each code page was made for. In the first group, words have these
# letters only; in the second, they have them between ASCII letters. Of equal shares, the first code page is taken.
OTHER_SCRIPTS = {
    "cp1251": "оеаинтсрвлкмдпуяыьгзбчйі",
    "koi8-r": "оеаинтсрвлкмдпуяыьгзбчй",
    "cp866": "оеаинтсрвлкмдпуяыьгзбчй",
    "iso8859-5": "оеаинтсрвлкмдпуяыьгзбчй",
    "cp1253": "αοιετσνηυρπκμλςωγδθόίέάήύώ",
    "cp1255": "יולאהמרתשנבדםכחקפעט",
    "cp1256": "اليمونرتبهدعفسكقحجةأشىی",
    "cp874": "านรอกเงมยลวดทสตะปบคหแจพชขใไโผซณธฐถภศญ\u0e31\u0e35\u0e34\u0e37\u0e38\u0e39\u0e48\u0e49\u0e4c\u0e47",
}
LATIN_SCRIPTS = {
    "cp1252": "éèàçêâôûîïùœäöüßñóáíúãõåøæÉÀÄÖÜ’‘“”–—…€«»°",
    "cp1250": "ąćęłńśźżáéíýčďěňřšťůúžăâîşţőűöüđ„”–’",
    "cp1254": "ışğçöüİâ’“”",
    "cp1257": "ąčęėįšųūžāēģīķļņõäöü„“–",
}
_HIGH_RUN = re.compile(rb"[\x80-\xff]{2,}")


def codec_of(label: str) -> str | None:
    """The codec of a label; None if the label is not one of the standard."""
    label = label.strip().strip("\"'").lower()
    if label in LABELS:
        return LABELS[label]
    try:
        return SUPERSETS.get(codecs.lookup(label).name)
    except (LookupError, ValueError):  # ValueError: a NUL in the label
        return None


def declared_labels(payload: bytes) -> list[str]:
    """The encodings that the markup of a page declares, ``<meta>`` first."""
    head = _HIDDEN.sub(b"", payload[:HEAD_BYTES])
    labels: list[str] = []
    for found in _META.finditer(head):
        tag = found.group().lower()
        # <meta charset=...>, or http-equiv; a description may have the word, too.
        if (b"content" not in tag or b"http-equiv" in tag) and (charset := _CHARSET.search(tag)):
            label = charset[1].decode("ascii", "replace")
            # Bytes in which the tag can be read as ASCII are not UTF-16.
            labels.append("utf-8" if label.startswith(("utf-16", "unicode")) else label)
    if prolog := _PROLOG.match(head):
        labels.append(prolog[1].decode("ascii", "replace"))
    return labels


def decode(payload: bytes, header: str | None, *, is_markup: bool) -> str | None:
    """Decode a page.

    Args:
        payload: bytes of the page.
        header: charset of the ``Content-Type``.
        is_markup: the page is HTML and may declare its encoding.

    Returns:
        The text; None for bytes that are not text, in whatever encoding.
    """
    text = _decode(payload, header, is_markup=is_markup)
    return None if len(_NOISE.findall(text)) > NOISE_SHARE * len(text) else text


def _decode(payload: bytes, header: str | None, *, is_markup: bool) -> str:
    for mark, codec in BYTE_ORDER_MARKS:
        if payload.startswith(mark):
            return payload.decode(codec, "replace")
    labels = [header] if header else []
    if is_markup:
        labels += declared_labels(payload)
    declared = [codec for codec in map(codec_of, labels) if codec is not None]
    # In these encodings the bytes of a page are ASCII, which is valid UTF-8.
    if (wide := _wide(payload)) is not None or "hz" in declared:
        return payload.decode(wide or "hz", "replace")
    text = _strict(payload, "utf-8")
    # Two Chinese characters of GBK may be valid UTF-8 by chance; text is not.
    if text is not None and (set(declared) <= {"utf-8"} or sum(character > "\x7f" for character in text) > 2):
        return text
    texts = {codec: text for codec in declared if (text := _strict(payload, codec)) is not None}
    guess = _guess(payload) if len(texts) != 1 else None
    if texts:
        return texts.get(guess or "", next(iter(texts.values())))
    # Single damaged bytes in a page of the declared encoding.
    for codec in [*declared[:1], "utf-8"]:
        text = payload.decode(codec, "replace")
        if text.count(_REPLACED) < DAMAGED_SHARE * sum(character > "\x7f" for character in text):
            return text
    return payload.decode(guess or "cp1252", "replace")


def _strict(payload: bytes, codec: str) -> str | None:
    try:
        return payload.decode(codec)
    except UnicodeDecodeError:
        return None


def _wide(payload: bytes) -> str | None:
    """The codec of text without a byte-order mark that has NUL bytes or escape sequences."""
    if _ESCAPES.search(payload) and payload.isascii():
        return "iso2022_jp_2004"
    half = len(payload) // 2
    for offset, codec in ((1, "utf-16-le"), (0, "utf-16-be")):
        # Markup alone, with its ASCII signs, makes this share.
        if half and payload[offset::2].count(0) > 0.3 * half and payload[1 - offset :: 2].count(0) < 0.05 * half:
            return codec
    return None


def _guess(payload: bytes) -> str | None:
    """The encoding that fits the bytes beyond ASCII; None without evidence for one."""
    sample = payload[:SAMPLE_BYTES]
    # A cut within a character is not an error.
    for cut in range(4):
        whole = sample[: len(sample) - cut] if len(sample) == SAMPLE_BYTES else payload
        if found := _guess_multibyte(whole):
            return found
    # Which group: most letters of another script are next to one of it.
    num_high = sum(byte > 0x7F for byte in sample)
    is_other = sum(map(len, _HIGH_RUN.findall(sample))) > 0.6 * num_high
    shares = {
        codec: _letter_share(sample, codec, frequent)
        for codec, frequent in (OTHER_SCRIPTS if is_other else LATIN_SCRIPTS).items()
    }
    best = max(shares, key=lambda codec: shares[codec])
    return best if shares[best] >= LETTER_SHARE else None


def _guess_multibyte(sample: bytes) -> str | None:
    for codec in ("cp932", "euc_jis_2004"):
        if (text := _strict(sample, codec)) is not None and _share(_KANA.findall(text), text) >= KANA_SHARE:
            return codec
    # Hangul syllables also are common Chinese characters of GBK; Chinese text has a third beyond them.
    if (text := _strict(sample, "cp949")) is not None and _share(_HANGUL.findall(text), text) >= 0.85:
        return "cp949"
    # The first level of both standards is the common characters.
    for codec, charset, first, last in (("big5hkscs", "big5", 0xA4, 0xC6), ("gb18030", "gb2312", 0xB0, 0xD7)):
        text = _strict(sample, codec)
        if text is None:
            continue
        beyond = [character.encode(charset, "ignore") for character in text if character > "\u2fff"]
        if _share([code for code in beyond if code and first <= code[0] <= last], text) >= COMMON_SHARE and (
            # Second bytes of Big5 also are ASCII; those of GB 2312 are not.
            codec != "big5hkscs" or _share([code for code in beyond if code[1:] < b"\x7f"], text) >= 0.15
        ):
            return codec
    return None


def _share(found: Iterable[object], text: str) -> float:
    return sum(1 for _ in found) / max(sum(character > "\x7f" for character in text), 1)


def _letter_share(sample: bytes, codec: str, frequent: str) -> float:
    """The share of frequent letters among the characters beyond ASCII."""
    text = sample.decode(codec, "replace")
    return _share([character for character in text if character > "\x7f" and character in frequent], text)
