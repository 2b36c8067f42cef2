"""Encodings of web pages: declared, wrong, absent; and compressed bodies."""

# ruff: noqa: RUF001 - letters of other scripts
from __future__ import annotations

import gzip
import zlib

import pytest

from dynmo_tools.web.charset import decode
from dynmo_tools.web.http_client import FetchError, _decompressed

TEXTS = {
    "ru": "В начале сентября река была тёплой, и дети купались до вечера.",
    "el": "Το πρωί ο ψαράς βγήκε στη θάλασσα με τη μικρή του βάρκα.",
    "he": "בבוקר הלכו הילדים אל בית הספר ליד השוק הישן.",
    "ar": "ذهب الأولاد في الصباح إلى المدرسة القريبة من السوق.",
    "th": "ตอนเช้าเด็กๆ เดินไปโรงเรียนที่อยู่ใกล้ตลาด",
    "ja": "朝になると、子どもたちは川のそばの学校へ歩いていきました。",
    "zh": "早上孩子们沿着河边走到学校去，老师已经在门口等他们了。",
    "zh-tw": "早上孩子們沿著河邊走到學校去，老師已經在門口等他們了。",
    "ko": "아침이 되자 아이들은 강가를 따라 학교로 걸어갔습니다.",
    "fr": "L’été, les élèves français préfèrent le café à côté de l’église.",
    "pl": "Wcześnie rano dzieci poszły ścieżką do szkoły, śpiewając pieśń.",
    "tr": "Sabah çocuklar nehir boyunca yürüyüp eski köyün okuluna gitti, ışık azdı.",
}
# Language, encoding of the bytes, and whether the bytes alone determine it.
ENCODINGS = (
    ("ru", "windows-1251", True), ("ru", "koi8-r", True), ("ru", "ibm866", True), ("ru", "iso-8859-5", True),
    ("el", "windows-1253", True), ("he", "windows-1255", True), ("ar", "windows-1256", True),
    ("th", "windows-874", True), ("ja", "Shift_JIS", True), ("ja", "x-sjis", True), ("ja", "EUC-JP", True),
    ("ja", "ISO-2022-JP", True), ("zh", "GBK", True), ("zh", "GB18030", True), ("zh-tw", "Big5", True),
    ("ko", "EUC-KR", True), ("ko", "ks_c_5601-1987", True), ("fr", "windows-1252", True),
    ("pl", "windows-1250", True), ("pl", "iso-8859-2", False), ("tr", "windows-1254", True), ("fr", "utf-8", True),
    ("fr", "utf-16-le", True), ("fr", "utf-16-be", True),
)  # fmt: skip
PYTHON = {"x-sjis": "cp932", "windows-874": "cp874"}
META = '<meta charset="{}">'
EQUIV = "<META content='text/html; charset={}' HTTP-EQUIV=Content-Type>"
PROLOG = '<?xml version="1.0" encoding="{}"?>'


def page(text, before="", head=""):
    return f"{before}<html><head>{head}<title>T</title></head><body><ul><li>Home</li></ul><p>{text}</p></body></html>"


def test_pages_of_every_encoding_are_decoded():
    rows = []
    for language, label, is_guessed in ENCODINGS:
        text, codec = TEXTS[language], PYTHON.get(label, label)
        if is_guessed:
            rows.append((label, "nothing", page(text).encode(codec), None, page(text)))
        rows.append((label, "header", page(text).encode(codec), label, page(text)))
        if not label.startswith("utf-16"):
            for before, head in (("", META), ("", EQUIV), (PROLOG, "")):
                whole = page(text, before.format(label), head.format(label))
                rows.append((label, before or head, whole.encode(codec), None, whole))
    french = page(TEXTS["fr"])
    name = page("朱镕基在北京和孩子们说话")  # 镕 is not in GB 2312
    declared = {
        "mark before header": ("\ufeff" + french).encode(),
        "mark of UTF-16": french.encode("utf-16"),
        "mark of UTF-32": french.encode("utf-32"),
    }
    rows += [(mark, "", payload, "windows-1251", french) for mark, payload in declared.items()]
    # What servers and authors get wrong.
    russian = page(TEXTS["ru"], head=META.format("windows-1251"))
    rows += [
        ("default of the server", "", french.encode(), "iso-8859-1", french),
        ("default and a true meta", "", russian.encode("cp1251"), "iso-8859-1", russian),
        ("utf-8 declared", "", page(TEXTS["ru"]).encode("cp1251"), "utf-8", page(TEXTS["ru"])),
        ("unknown label", "", french.encode(), "foo-bar", french),
        ("codec of Python", "", b"<p>\\u0041", "unicode_escape", "<p>\\u0041"),
        ("gb2312 for GBK", "", name.encode("gbk"), "gb2312", name),
        ("quotes of latin1", "", "‘a’ – b".encode("cp1252"), "latin1", "‘a’ – b"),
        ("one damaged byte", "", french.encode()[:-10] + b"\xff", "utf-8", french[:-10] + "\ufffd"),
    ]  # fmt: skip
    for comment in ('<!-- <meta charset="koi8-r"> -->', '<meta name="description" content="charset=koi8-r">'):
        whole = page(TEXTS["ru"], head=comment + META.format("windows-1251"))
        rows.append((comment, "", whole.encode("cp1251"), None, whole))
    wrong = [
        (label, kind) for label, kind, payload, header, text in rows if decode(payload, header, is_markup=True) != text
    ]
    assert wrong == []


def test_noise_is_not_text():
    noise = zlib.compress(b"".join(number.to_bytes(4, "big") for number in range(2000)))
    for header in (None, "utf-8", "windows-1251", "shift_jis"):
        assert decode(noise, header, is_markup=True) is None, header
    assert decode(b"", "utf-8", is_markup=True) == ""


def test_bodies_are_decompressed_within_the_limit():
    body = b"<p>text</p>" * 50
    raw = zlib.compressobj(wbits=-15)
    encoded = {
        "gzip": (gzip.compress(body[:99]) + gzip.compress(body[99:]), "gzip"),
        "x-gzip": (gzip.compress(body) + b"\0\0", "x-gzip"),
        "zlib": (zlib.compress(body), "deflate"),
        "raw deflate": (raw.compress(body) + raw.flush(), "deflate"),
        "identity": (body, "identity"),
    }
    for name, (payload, encoding) in encoded.items():
        assert _decompressed(payload, encoding, 1 << 20) == body, name
    assert _decompressed(gzip.compress(bytes(1 << 24)), "gzip", 1000) == bytes(1000)
    for payload, encoding in ((b"<p>plain", "gzip"), (gzip.compress(body)[:-9], "gzip"), (body, "br")):
        with pytest.raises(FetchError, match=encoding):
            _decompressed(payload, encoding, 1 << 20)
